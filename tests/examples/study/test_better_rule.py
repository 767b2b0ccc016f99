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
from examples.study.arms import KNOWN
from examples.study.optima import read_optima
from examples.study.records import Cell
from examples.study.runs import Run
from examples.study.statistics import compare

DENSE, MIXTURE = "dense-small", "mixture-small"
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "study" / "better_rule_protocol.md"


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


@pytest.mark.parametrize(
    "candidate, first", [("scale_between", 200), ("orscale_twice_the_decay", 300)]
)
def test_a_candidate_is_searched_and_compared_on_fresh_seeds(
    candidate, first, tmp_path, monkeypatch
):
    asked = []

    def train(self, rates, seed, factors=None):
        arm = self.arm.optimizer
        asked.append((arm, seed))
        ours = arm == candidate
        octaves = math.log2(rates.matrix / (0.032 if ours else 0.016))
        loss = 2 + 0.02 * octaves**2 + 0.02 * abs(math.log2(rates.adam / 0.064))
        return Run([loss + 0.001 * seed - 0.01 * ours], 1.0, [], math.nan, math.nan, {})

    monkeypatch.setattr(plan.Trainer, "train", train)
    before = {path: path.read_bytes() for path in second.FOLDER.glob("*.csv")}
    options = better_rule.Options((candidate,), (DENSE,), tmp_path)
    plan.prepare(options.workloads, tmp_path)
    seeds = tuple(range(first, first + 12))
    rates, losses = better_rule.candidate(DENSE, candidate, tmp_path, seeds)
    assert rates == (0.032, 0.064)
    reference = better_rule.reference_losses(DENSE, tmp_path, seeds)
    differences = [reference[seed] - losses[seed] for seed in losses]
    np.testing.assert_allclose(differences, 0.01, atol=1e-5)
    table = [*better_rule.lines(options)]
    assert "0.032, 0.064 | -0.0100 [-0.0100, -0.0100]" in table[2]
    assert "lower in 1, higher in 0 | no better rule" in table[3]
    searched = {20, 21, 22}
    assert {seed for arm, seed in asked if arm == "muon_moonlight"} == {*seeds}
    assert {seed for arm, seed in asked if arm == candidate} == {*seeds} | searched
    assert before == {path: path.read_bytes() for path in second.FOLDER.glob("*.csv")}


def test_what_the_ratio_adds_is_paired_by_seed(tmp_path, monkeypatch):
    def train(self, rates, seed, factors=None):
        far = abs(math.log2(rates.matrix / 0.016)) + abs(math.log2(rates.adam / 0.064))
        gain = 0.01 * (self.arm.optimizer == "orscale_on_normuon")
        return Run([2 + far + 0.001 * seed - gain], 1.0, [], math.nan, math.nan, {})

    monkeypatch.setattr(plan.Trainer, "train", train)
    options = better_rule.Options(("orscale_on_normuon",), (DENSE,), tmp_path)
    plan.prepare(options.workloads, tmp_path)
    *_, row, all_workloads = better_rule.ratio_lines(options)
    assert row.endswith(f"− NorMuon | `{DENSE}` | -0.0100 [-0.0100, -0.0100] |")
    assert "NorMuon** | all: lower in 1, higher in 0 | -0.0100 " in all_workloads


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


def written(arm, name, seeds):
    """The losses of an arm in the CSV of a workload, by seed."""
    table = (better_rule.FOLDER / f"{name}.csv").read_text()
    rows = csv.DictReader(table.splitlines())
    losses = {int(row["seed"]): float(row["loss"]) for row in rows if row["arm"] == arm}
    return [losses[seed] for seed in seeds]


FIRST, LATER = range(200, 212), range(300, 312)


def by_hand(ours, theirs, names=second.TEXTS, seeds=FIRST):
    """The mean difference over workloads, with its interval."""
    differences = [
        np.subtract(*(written(arm, name, seeds) for arm in (ours, theirs)))
        for name in names
    ]
    by_seed = np.mean(differences, axis=0)
    half = stats.t.ppf(0.975, 11) * np.std(by_seed, ddof=1) / 12**0.5
    return by_seed.mean(), by_seed.mean() - half, by_seed.mean() + half


@pytest.fixture
def page(monkeypatch):
    """The page, its tables and the options of all results; no run may be done."""
    monkeypatch.setattr(plan.Trainer, "train", lambda *_: pytest.fail("a run"))
    text = PAGE.read_text()
    tables = re.findall(r"<!-- table: [^>]* -->\n(.*?)<!-- end -->", text, re.DOTALL)
    return text, [table.splitlines() for table in tables], better_rule.Options()


def test_the_tables_of_the_page(page):
    _, [candidates, ratio], options = page
    assert options.workloads == second.TEXTS and options.arms == better_rule.ARMS
    assert candidates == [*better_rule.lines(options)]
    assert ratio == [*better_rule.ratio_lines(options)]
    for ours, theirs in better_rule.RATIOS.items():
        for row, names in zip(
            [row for row in ratio if KNOWN[ours].label in row],
            [*([name] for name in second.TEXTS), second.TEXTS],
            strict=True,
        ):
            found = by_hand(ours, theirs, names, better_rule.fresh_seeds(ours))
            assert row.endswith("| {:+.4f} [{:+.4f}, {:+.4f}] |".format(*found))
    for arm in better_rule.ARMS:
        seeds = LATER if arm == "orscale_twice_the_decay" else FIRST
        for name in second.TEXTS:
            mean, low, high = by_hand(arm, "muon_moonlight", [name], seeds)
            assert any(
                f"`{name}`" in row and f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" in row
                for row in candidates
            )


def test_the_verdicts_in_words(page):
    text, [candidates, _], _ = page
    better = [row.split("**")[1] for row in candidates if "| a better rule |" in row]
    assert better == ["Twice the decay", "OrScale's ratio on NorMuon", "NorMuon"]
    words = re.sub(r"\s+", " ", text)
    dense, mixtures = (
        by_hand("orscale_on_normuon", "normuon", names)
        for names in (second.TEXTS[:4], second.TEXTS[4:])
    )
    shown = "{:+.4f} [{:+.4f}, {:+.4f}]"
    assert f"{shown.format(*dense)} over the four dense" in words
    assert f"{shown.format(*mixtures)} over the two mixtures" in words
    [row] = [row for row in candidates if row.startswith("| **OrScale's ratio on NorM")]
    assert "all: lower in 5, higher in 0" in row


def test_twice_the_decay_in_both(page):
    """The ratio costs on dense models, gains on mixtures, and is level over all."""
    text, _, _ = page
    words = re.sub(r"\s+", " ", text)
    two = ("orscale_twice_the_decay", "twice_the_decay")
    again = by_hand("twice_the_decay", "muon_moonlight", seeds=LATER)
    whole = by_hand(*two, seeds=LATER)
    dense, mixtures = (
        by_hand(*two, names, LATER) for names in (second.TEXTS[:4], second.TEXTS[4:])
    )
    shown = "{:+.4f} [{:+.4f}, {:+.4f}]"
    assert f"there again, {shown.format(*again)} (3 : 0)" in words
    assert f"the second table shows: {shown.format(*whole)}, where" in words
    assert f"costs {shown.format(*dense)} over the four dense" in words
    assert f"gains {shown.format(*mixtures)} over the two mixtures" in words
    assert whole[0] > 0  # The candidate's own rule asks for a mean below zero.
    assert "It is not, so by that rule a better λ does not change what is said" in words
