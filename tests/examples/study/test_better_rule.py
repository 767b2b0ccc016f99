"""Candidates for a better rule: their runs, the rule, and the factors of one of them."""

import csv
import math
import pathlib
import re

import numpy as np
import pytest
from scipy import stats

from examples.pretrain.controls import MODEL_OPTIMA
from examples.study import better_rule, plan, second
from examples.study.optima import read_optima
from examples.study.records import Cell
from examples.study.runs import Run
from examples.study.statistics import compare

DENSE, MIXTURE = "dense-small", "mixture-small"
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "better_rule_protocol.md"


@pytest.mark.parametrize("kind, workload", [("dense", DENSE), ("mixture", MIXTURE)])
def test_factors_are_those_of_the_table(kind, workload):
    optima = read_optima(second.FOLDER / "classes.csv")
    found = [
        optima[Cell(workload + init, "muon_moonlight")] for init in ("", "-small-init")
    ]
    expected = {
        name: stats.gmean([of[name].optimum for of in found])
        for of in found
        for name in of
    }
    assert MODEL_OPTIMA[kind] == pytest.approx(expected, abs=0.0051)


def test_a_candidate_is_searched_and_compared_on_fresh_seeds(tmp_path, monkeypatch):
    asked = []

    def train(self, rates, seed, factors=None):
        arm = self.arm.optimizer
        asked.append((arm, seed))
        ours = arm == "scale_between"
        octaves = math.log2(rates.matrix / (0.032 if ours else 0.016))
        loss = 2 + 0.02 * octaves**2 + 0.02 * abs(math.log2(rates.adam / 0.064))
        return Run([loss + 0.001 * seed - 0.01 * ours], 1.0, [], math.nan, math.nan, {})

    monkeypatch.setattr(plan.Trainer, "train", train)
    before = {path: path.read_bytes() for path in second.FOLDER.glob("*.csv")}
    options = better_rule.Options(("scale_between",), (DENSE,), tmp_path)
    plan.prepare(options.workloads, tmp_path)
    rates, losses = better_rule.candidate(DENSE, "scale_between", tmp_path)
    assert rates == (0.032, 0.064)
    reference = better_rule.reference_losses(DENSE, tmp_path)
    differences = [reference[seed] - losses[seed] for seed in losses]
    np.testing.assert_allclose(differences, 0.01, atol=1e-5)
    table = [*better_rule.lines(options)]
    assert "0.032, 0.064 | -0.0100 [-0.0100, -0.0100]" in table[2]
    assert "lower in 1, higher in 0 | no better rule" in table[3]
    fresh, searched = {*range(200, 212)}, {20, 21, 22}
    assert {seed for arm, seed in asked if arm == "muon_moonlight"} == fresh
    assert {seed for arm, seed in asked if arm == "scale_between"} == fresh | searched
    assert before == {path: path.read_bytes() for path in second.FOLDER.glob("*.csv")}


def test_what_the_ratio_adds_is_paired_by_seed(tmp_path, monkeypatch):
    def train(self, rates, seed, factors=None):
        far = abs(math.log2(rates.matrix / 0.016)) + abs(math.log2(rates.adam / 0.064))
        gain = 0.01 * (self.arm.optimizer == "orscale_on_normuon")
        return Run([2 + far + 0.001 * seed - gain], 1.0, [], math.nan, math.nan, {})

    monkeypatch.setattr(plan.Trainer, "train", train)
    arms = (better_rule.RATIO, better_rule.DIRECTION)
    options = better_rule.Options(arms, (DENSE,), tmp_path)
    plan.prepare(options.workloads, tmp_path)
    *_, row, all_workloads = better_rule.ratio_lines(options)
    assert row == f"| `{DENSE}` | -0.0100 [-0.0100, -0.0100] |"
    assert all_workloads.startswith("| **all: lower in 1, higher in 0** | -0.0100 ")


@pytest.mark.parametrize(
    "means, better",
    [
        ([-1, -1, -1, 0, 0, 0], True),
        ([-1, -1, 0, 0, 0, 0], False),
        ([-1, -1, -1, -1, 0, 1], False),
    ],
)
def test_the_rule(means, better):
    """Significantly worse nowhere, significantly better in three workloads."""
    noise = np.random.default_rng(0).normal(0, 0.01, (len(means), 12))
    differences = [dict(enumerate(m + n)) for m, n in zip(means, noise, strict=True)]
    for difference, mean in zip(differences, means, strict=True):
        if not mean:
            difference[0] += 1.0  # An interval around zero.
            difference[1] -= 1.0
    assert better_rule.is_better(compare(differences)) == better


def test_the_table_of_the_page(monkeypatch):
    """What the results hold; no run is done for it."""
    monkeypatch.setattr(plan.Trainer, "train", lambda *_: pytest.fail("a run"))
    [table] = re.findall(
        r"<!-- table: better rule -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL
    )
    *shown, whole = table.splitlines()[2:]
    workloads = tuple(re.findall(r"`([^`]+)`", table))
    options = better_rule.Options(("twice_the_decay",), workloads)
    assert workloads == second.TEXTS
    assert table.splitlines() == [*better_rule.lines(options)]
    assert "lower in 3, higher in 0 | a better rule" in whole
    mean = whole.split("|")[-2].strip()
    assert f"({mean} over the six)" in (PAGE.parent / "two_rates.md").read_text()
    for name, line in zip(workloads, shown, strict=True):
        table = (better_rule.FOLDER / f"{name}.csv").read_text()
        rows = [*csv.DictReader(table.splitlines())]
        losses = {
            arm: {r["seed"]: float(r["loss"]) for r in rows if r["arm"] == arm}
            for arm in ("twice_the_decay", "muon_moonlight")
        }
        seeds = [str(seed) for seed in range(200, 212)]
        found = [
            losses["twice_the_decay"][s] - losses["muon_moonlight"][s] for s in seeds
        ]
        assert f"| {np.mean(found):+.4f} [" in line
