"""The runs with one matrix per head: what differs, and that other tables stay."""

import math
import pathlib
import re

import pytest

from examples.study import per_head, plan, second
from examples.study.arms import KNOWN
from examples.study.plan import Runs, find_workload
from examples.study.runs import Run, Trainer
from examples.study.search import Rates
from examples.study.workloads import BY_HEAD
from orscale_jax import describe


@pytest.mark.extended
@pytest.mark.parametrize("name", per_head.WORKLOADS)
def test_only_the_projections_of_attention_differ(name):
    def matrices(kind):
        setup = Trainer(find_workload(name + kind), KNOWN["orscale"]).setup
        rows = describe(setup.abstract["params"], setup.weight_dimension_numbers).rows
        return {row.path: row for row in rows if row.rule == "matrix"}

    whole, by_head = matrices(""), matrices(BY_HEAD)
    assert whole.keys() == by_head.keys()
    heads = find_workload(name).config.model.heads
    divided = {"attention query", "attention output", "attention latent up"}
    divided |= {"attention key", "attention value"}
    for path, row in whole.items():
        times = heads if row.layer_class in divided else 1
        assert by_head[path].matrices == times * row.matrices, path
        size, other = row.m * row.n, by_head[path].m * by_head[path].n
        assert size == times * other, path


def test_both_variants_are_searched_alike_in_their_own_folder(tmp_path, monkeypatch):
    asked = []

    def train(self, rates, seed, factors=None):
        assert factors is None
        asked.append((self.workload.name, seed))
        best = 0.032 if self.workload.name.endswith(BY_HEAD) else 0.016
        octaves = math.log2(rates.matrix / best)
        loss = 2 + 0.02 * octaves**2 + 0.02 * abs(math.log2(rates.adam / 0.064))
        loss += 0.001 * seed - 0.01 * (best == 0.032)
        return Run([loss], 1.0, [], math.nan, math.nan, {})

    monkeypatch.setattr(plan.Trainer, "train", train)
    before = {path: path.read_bytes() for path in second.FOLDER.glob("*.csv")}
    plan.prepare(["dense-small", f"dense-small{BY_HEAD}"], tmp_path)
    whole, by_head = (
        per_head.find("dense-small", "orscale", kind, tmp_path) for kind in ("", BY_HEAD)
    )
    assert whole.rates == Rates(0.016, 0.064)
    assert by_head.rates == Rates(0.032, 0.064)
    assert by_head.mean_loss == pytest.approx(whole.mean_loss - 0.01)
    assert whole.losses.keys() == by_head.losses.keys() == {*per_head.SEEDS}
    assert {seed for _, seed in asked} == {*per_head.SEARCH_SEEDS, *per_head.SEEDS}
    assert {path: path.read_bytes() for path in second.FOLDER.glob("*.csv")} == before
    assert {path.stem for path in tmp_path.glob("*.csv")} == {
        "dense-small", f"dense-small{BY_HEAD}",
    }  # fmt: skip


def test_the_searches_begin_where_runs_are_written_down(monkeypatch):
    """Rates of the second protocol are read: none of its runs is done."""

    def refuse(self):
        raise AssertionError("A run of the second protocol would be done.")

    monkeypatch.setattr(Runs, "_trainer", property(refuse))
    for name in per_head.WORKLOADS.values():
        for arm in per_head.ARMS:
            job = per_head.job_of(name, arm)
            assert per_head.best_rates(job, second.FOLDER).matrix > 0


def test_the_table_has_a_row_for_each_optimizer_and_workload(monkeypatch):
    def find(workload, arm, kind, folder):
        losses = {seed: 2 + 0.1 * bool(kind) + 1e-3 * seed for seed in per_head.SEEDS}
        return per_head.Found(Rates(0.016, 0.064), losses)

    monkeypatch.setattr(per_head, "find", find)
    head, _, *rows = per_head.lines()
    assert [row.split(" | ")[:2] for row in rows][:2] == [
        ["| `dense-small`", "Muon+Moonlight"],
        ["| `dense-small`", "OrScale"],
    ]
    assert len(rows) == 6 and {row.count("|") for row in (head, *rows)} == {8}
    assert rows[0].endswith("| 2.3020 | 2.4020 | +0.1000 [+0.1000, +0.1000] |")


def test_no_search_has_seen_the_seeds():
    assert not {*per_head.SEEDS} & {*per_head.SEARCH_SEEDS}


def test_the_page_has_the_table(monkeypatch):
    def refuse(self):
        raise AssertionError("A run is missing in docs/data/per_head.")

    monkeypatch.setattr(Runs, "_trainer", property(refuse))
    page = (
        pathlib.Path(__file__).parents[3] / "docs/study/per_head_protocol.md"
    ).read_text()
    [table] = re.findall(r"<!-- table: per head -->\n((?:\|.*\n)+)", page)
    assert table.splitlines() == list(per_head.lines())
