"""Intervals, verdicts, steps saved and widths of valleys, on cases done by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from examples.study import statistics
from examples.study.statistics import FAILS, HOLDS, OPEN, Interval

LESS, MORE, NONE = (
    Interval(-1, -2, -0.5),
    Interval(1, 0.5, 2),
    Interval(0.1, -1, 1.2),
)


def test_an_interval_is_that_of_a_paired_t_test():
    ours, theirs = np.random.default_rng(0).normal(size=(2, 5))
    differences = statistics.paired(dict(enumerate(ours)), dict(enumerate(theirs)))
    found = statistics.interval(list(differences.values()))
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    np.testing.assert_allclose(found[1:], [expected.low, expected.high], rtol=1e-12)
    assert found.mean == pytest.approx(np.mean(ours - theirs))


def test_pairs_are_of_the_same_seed():
    found = statistics.paired({0: 1.0, 1: 2.0, 7: 99.0}, {1: 1.5, 0: 0.5, 8: -99.0})
    assert found == {0: 0.5, 1: 0.5}


def test_one_value_decides_nothing():
    assert statistics.interval([-3.0]).sign == 0
    nothing = statistics.compare([])
    assert math.isnan(nothing.average.mean) and not nothing.intervals


def test_the_mean_over_workloads_has_the_seeds_as_its_sample():
    values = np.random.default_rng(1).normal(size=(3, 5)) - [[9], [0], [-9]]
    found = statistics.compare([dict(enumerate(row)) for row in values])
    expected = stats.ttest_1samp(values.mean(0), 0).confidence_interval(0.95)
    assert found.average.mean == pytest.approx(values.mean())
    np.testing.assert_allclose(found.average[1:], expected, rtol=1e-12)
    assert (found.lower, found.higher) == (1, 1)
    one_more = [*[dict(enumerate(row)) for row in values], {4: 0.0, 7: 5.0}]
    assert statistics.compare(one_more).average.mean == pytest.approx(
        values[:, 4].sum() / 4
    )


def test_at_least_as_good_has_a_margin():
    assert statistics.verdict([MORE], margin=3) == HOLDS
    assert statistics.verdict([NONE], margin=1.3) == HOLDS
    assert statistics.verdict([NONE], margin=1.1) == OPEN
    assert statistics.verdict([MORE], margin=0.4) == FAILS


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([LESS, LESS, NONE], HOLDS),
        ([LESS, NONE, NONE], OPEN),
        ([LESS, LESS, MORE], OPEN),
        ([MORE, MORE, NONE], FAILS),
        ([LESS, NONE], OPEN),
        ([NONE], OPEN),
    ],
)
def test_a_verdict_takes_most_workloads_and_none_against(differences, expected):
    assert statistics.verdict(differences) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.02, -0.001, statistics.BETTER),
        (-0.02, 0.004, statistics.AS_GOOD),
        (-0.004, 0.006, statistics.NOT_TOLD),
        (0.001, 0.004, statistics.WORSE_WITHIN),
        (0.001, 0.006, statistics.WORSE),
        (0.006, 0.009, statistics.WORSE),
    ],
)
def test_an_endpoint_is_better_as_good_worse_or_not_told(low, high, expected):
    found = Interval((low + high) / 2, low, high)
    assert statistics.endpoint(found, margin=0.005) == expected


@pytest.mark.parametrize("shift", [0.0, 0.5, -2.0])
def test_a_p_value_is_that_of_a_t_test_and_agrees_with_the_interval(shift):
    values = np.random.default_rng(2).normal(size=12) + shift
    p = statistics.p_value(values)
    assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)
    assert (p < 0.05) == (statistics.interval(values).sign != 0)
    assert statistics.p_value([0.0, 0.0]) == 1 and statistics.p_value([1.0, 1.0]) == 0


def test_holm_multiplies_the_smallest_by_the_most_and_keeps_the_order():
    # By hand: 4 × 0.01, 3 × 0.02, then at least that, 1 × 0.5.
    assert statistics.holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx(
        [0.5, 0.04, 0.06, 0.06]
    )
    assert statistics.holm([0.9, 0.8]) == [1, 1] and statistics.holm([]) == []


def test_holm_errs_in_as_many_families_as_the_level_says():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(800, 12, 12))
    p = stats.ttest_1samp(values, 0, axis=2).pvalue
    errors = np.mean([min(statistics.holm(row)) < 0.05 for row in p])
    assert stats.binomtest(round(800 * errors), 800, 0.05).pvalue > 0.01
    # Scipy's step-up procedure rejects whatever Holm's does, at the same level.
    for row in p[:50]:
        of_holm, of_fdr = statistics.holm(row), stats.false_discovery_control(row)
        assert all(a >= b - 1e-12 for a, b in zip(of_holm, of_fdr, strict=True))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [([HOLDS, HOLDS], HOLDS), ([HOLDS, OPEN], OPEN), ([OPEN, FAILS, HOLDS], FAILS)],
)
def test_a_claim_of_parts_holds_if_all_do(parts, expected):
    assert statistics.all_of(parts) == expected


@pytest.mark.parametrize(
    ("target", "expected"), [(2.5, 15.0), (2.0, 20.0), (3.5, 10.0), (1.5, math.nan)]
)
def test_steps_to_a_loss_are_interpolated(target, expected):
    found = statistics.steps_to(target, losses=(3.0, 2.0, 1.8), steps=(10, 20, 30))
    assert found == pytest.approx(expected, nan_ok=True)


def test_a_valley_ends_where_the_loss_crosses_the_bound():
    # 2 % of 1 is crossed half way to 0.5, and a quarter of the way from 4 to 8.
    losses = {0.5: 1.04, 1.0: 1.0, 2.0: 1.0, 4.0: 1.01, 8.0: 1.05}
    assert statistics.valley_width(losses) == pytest.approx(0.5 + 1 + 1 + 0.25)
    assert statistics.valley_width({1.0: 1.0, 2.0: 1.01}) == 1.0


def test_a_ranking_holds_if_it_is_sure():
    x = np.arange(8.0)
    assert statistics.correlation(x, x**3) == (pytest.approx(1), HOLDS)
    assert statistics.correlation(x, -x) == (pytest.approx(-1), FAILS)
    assert statistics.correlation(x, [0, 3, 1, 2, 9, 4, 0.5, 3.5])[1] == OPEN
    assert statistics.correlation(x, np.ones(8))[1] == OPEN
