"""What the tables say: paired differences, steps saved, widths of valleys."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
VALLEY = 1.02  # Of the best loss.

HOLDS, FAILS, OPEN = "holds", "fails", "inconclusive"
BETTER, AS_GOOD, WORSE, NOT_TOLD = "better", "as good as", "worse", "inconclusive"
WORSE_WITHIN = "worse by less than the margin"


class Interval(NamedTuple):
    """A mean and its 95 % interval, by Student's t."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """-1 or 1 if the interval excludes zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)

    def minus(self, margin: float) -> "Interval":
        """The same interval, moved down by a margin."""
        return Interval(*(end - margin for end in self))


def interval(values: Sequence[float]) -> Interval:
    """The mean of a sample; a single value has an endless interval, none is NaN."""
    mean = float(np.mean(values)) if len(values) else math.nan
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    factor = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    error = float(factor * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Interval(mean, mean - error, mean + error)


def in_words(found: Interval) -> str:
    """A mean and its interval, in nats."""
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*found)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """The differences of the seeds that both have."""
    seeds = sorted(ours.keys() & theirs.keys())
    return {seed: ours[seed] - theirs[seed] for seed in seeds}


class Comparison(NamedTuple):
    """Two arms in several workloads.

    Attributes:
      intervals: The difference in each workload.
      average: The mean over the workloads, whose sample are the seeds.
    """

    intervals: tuple[Interval, ...]
    average: Interval

    @property
    def lower(self) -> int:
        """The number of workloads in which the difference is significantly negative."""
        return sum(found.sign < 0 for found in self.intervals)

    @property
    def higher(self) -> int:
        """The number of workloads in which the difference is significantly positive."""
        return sum(found.sign > 0 for found in self.intervals)


def compare(differences: Sequence[Mapping[int, float]]) -> Comparison:
    """The differences of each workload, by seed."""
    intervals = tuple(interval(list(by_seed.values())) for by_seed in differences)
    every = [set(by_seed) for by_seed in differences] or [set()]
    seeds = sorted(set.intersection(*every))
    means = [float(np.mean([by_seed[s] for by_seed in differences])) for s in seeds]
    return Comparison(intervals, interval(means))


def verdict(differences: Sequence[Interval], margin: float = 0.0) -> str:
    """Whether a claim that differences are negative holds, by the protocol's rule.

    Args:
      differences: One for each workload.
      margin: How much above zero still counts as negative: "at least as good" instead of
        "better".
    """
    signs = [found.minus(margin).sign for found in differences]
    lower, higher, half = signs.count(-1), signs.count(1), len(signs) / 2
    if lower > half and not higher:
        return HOLDS
    if higher > half and not lower:
        return FAILS
    return OPEN


def endpoint(found: Interval, margin: float) -> str:
    """What the interval of a difference says of an endpoint of the second protocol.

    Args:
      found: The interval; below zero is better.
      margin: What "as good as" may be worse by, in the units of the interval.
    """
    within = found.high < margin
    if found.high < 0:
        return BETTER
    if found.low > 0:
        return WORSE_WITHIN if within else WORSE
    return AS_GOOD if within else NOT_TOLD


def p_value(values: Sequence[float]) -> float:
    """The p-value of a two-sided t test that the mean of a sample is zero."""
    found = interval(values)
    if found.low == found.high:  # All values are the same.
        return float(found.mean == 0)
    t = np.mean(values) / (np.std(values, ddof=1) / math.sqrt(len(values)))
    return float(2 * stats.t.sf(abs(t), len(values) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values with Holm's correction, in their order.

    Those below a level are the hypotheses that are rejected at it, with at most that
    probability of any error among them.
    """
    p = np.asarray(p_values)
    order = np.argsort(p, kind="stable")
    corrected = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(corrected)
    adjusted[order] = np.minimum(corrected, 1.0)
    return [float(value) for value in adjusted]


def all_of(verdicts: Sequence[str]) -> str:
    """The verdict on a claim of several parts."""
    if FAILS in verdicts:
        return FAILS
    return OPEN if OPEN in verdicts else HOLDS


def correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, str]:
    """Spearman's ρ, and whether the claim that it is positive holds.

    NaN of fewer than three, and where all of one kind are the same.
    """
    if len(x) < 3 or not np.ptp(x) or not np.ptp(y):
        return math.nan, OPEN
    found = stats.spearmanr(x, y)
    rho, p = float(found.statistic), float(found.pvalue)
    if p > 1 - CONFIDENCE:
        return rho, OPEN
    return rho, HOLDS if rho > 0 else FAILS


def steps_to(target: float, losses: Sequence[float], steps: Sequence[int]) -> float:
    """The step at which a loss is reached, by linear interpolation; NaN if never."""
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return float(steps[0])
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))
    return math.nan


def valley_width(losses: Mapping[float, float]) -> float:
    """Octaves of learning rates around the best within 2 % of its loss.

    Between rates the loss is linear in their logarithm; beyond the last one nothing is
    known, and the valley ends there.
    """
    rates = sorted(losses)
    best = min(rates, key=losses.__getitem__)
    bound = VALLEY * losses[best]
    middle = rates.index(best)
    return _reach(rates[middle:], losses, bound) + _reach(
        rates[middle::-1], losses, bound
    )


def _reach(rates: Sequence[float], losses: Mapping[float, float], bound: float) -> float:
    """Octaves from the first of the rates to where the loss crosses the bound."""
    octaves = 0.0
    for near, far in itertools.pairwise(rates):
        step = abs(math.log2(far / near))
        if losses[far] > bound:
            return octaves + step * (bound - losses[near]) / (losses[far] - losses[near])
        octaves += step
    return octaves
