"""What losses say: paired differences with intervals, Holm's correction, tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Interval(NamedTuple):
    """A mean and its 95 % interval, in nats; ``print`` shows four digits."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """-1 or 1 if the interval excludes zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)

    def __str__(self) -> str:
        return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*self)


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """The mean of a sample of two values or more, by Student's t."""
    mean, count = float(np.mean(values)), len(values)
    error = math.sqrt(np.var(values, ddof=1) / count)
    half = float(stats.t.ppf(0.975, count - 1)) * error
    return Interval(mean, mean - half, mean + half)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> np.ndarray:
    """The differences of the seeds that both have, in the order of the seeds."""
    return np.array([ours[seed] - theirs[seed] for seed in sorted({*ours} & {*theirs})])


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


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first columns are text, and the others numbers."""
    rule = ["---"] * left + ["--:"] * (len(heading) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *rows))
