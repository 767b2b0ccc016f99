"""What the second protocol asks: its endpoints, its list, and what it only reports."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from examples.study.arms import KNOWN
from examples.study.records import Records, difference
from examples.study.second import IMAGES, LARGE, REFERENCE, SMALLER, TEXTS
from examples.study.statistics import Comparison, holm, interval, p_value
from examples.study.workloads import LADDER, LONG, SMALL_INIT

MARGIN = 0.005  # Nats, of "as good as" in the first endpoint.
MIXTURES = (
    "mixture-small", f"mixture-small{SMALL_INIT}",
    *(LADDER[experts] for experts in (4, 16, 32)),
)  # fmt: skip
LONGER = {
    steps: tuple(f"{name}-{steps}-steps" for name in LONG) for steps in (1200, 4800)
}


@dataclasses.dataclass(frozen=True)
class Question:
    """The difference of two arms, summed over workloads with weights.

    Attributes:
      ours: An arm.
      theirs: The arm whose losses are subtracted.
      over: The workloads in words.
      weights: Of the difference in each workload.
    """

    ours: str
    theirs: str
    over: str
    weights: Mapping[str, float]

    @property
    def text(self) -> str:
        """The two arms in words."""
        return f"{KNOWN[self.ours].label} − {KNOWN[self.theirs].label}"

    def differences(self, records: Records) -> list[list[float]] | None:
        """By workload and seed, in nats; None unless all runs are there."""
        found = [difference(records, n, self.ours, self.theirs) for n in self.weights]
        rows = [list(by_seed.values()) for by_seed in found if by_seed is not None]
        return rows if len(rows) == len(found) else None

    def by_seed(self, records: Records) -> list[float] | None:
        """The sum over the workloads, in nats; None unless all runs are there."""
        found = self.differences(records)
        if found is None:
            return None
        return (np.array(list(self.weights.values())) @ np.array(found)).tolist()


class Answer(NamedTuple):
    """What the runs say of a question.

    Attributes:
      found: The difference in each workload, and as its average the weighted sum.
      p: Of the two-sided t test that the sum is zero.
      corrected: The same with Holm's correction over the list.
    """

    found: Comparison
    p: float
    corrected: float


def comparison(question: Question, records: Records) -> Comparison | None:
    """The difference in each workload and their sum; None unless all runs are there."""
    found, sums = question.differences(records), question.by_seed(records)
    if found is None or sums is None:
        return None
    return Comparison(tuple(map(interval, found)), interval(sums))


def answers(records: Records) -> list[Answer | None]:
    """The answers to the questions of the list; None where runs are missing.

    Such a question counts with p = 1, so that the list keeps its length for Holm's
    correction: what is rejected now remains so, whatever the missing runs say.
    """
    sums = [question.by_seed(records) for question in LIST]
    p_values = [1.0 if found is None else p_value(found) for found in sums]
    found = [comparison(question, records) for question in LIST]
    return [
        None if of is None else Answer(of, p, corrected)
        for of, p, corrected in zip(found, p_values, holm(p_values), strict=True)
    ]


def _mean(workloads: Iterable[str]) -> dict[str, float]:
    names = list(workloads)
    return dict.fromkeys(names, 1 / len(names))


def _slope(places: Mapping[str, float]) -> dict[str, float]:
    """The weights of the slope that least squares find by the places of workloads."""
    away = np.array(list(places.values())) - np.mean(list(places.values()))
    return dict(zip(places, (away / np.sum(away**2)).tolist(), strict=True))


_TWO = ("orscale", REFERENCE)
_TEXT, _SMALLER = _mean(TEXTS), _mean(SMALLER)
FIRST = Question(*_TWO, "text", _TEXT)
SECOND = Question("orscale", "pooled", "five mixtures", _mean(MIXTURES))
ENDPOINTS = ((FIRST, MARGIN), (SECOND, 0.0))
LIST = (
    Question(
        *_TWO,
        "mixtures minus dense",
        {
            f"{name}{init}": sign / 2
            for name, sign in (("mixture-small", 1), ("dense-small", -1))
            for init in ("", SMALL_INIT)
        },
    ),
    Question(
        *_TWO,
        "slope by log₂ of the number of experts",
        _slope({name: float(np.log2(experts)) for experts, name in LADDER.items()}),
    ),
    Question(*_TWO, "`like-16b`", _mean(["like-16b"])),
    Question(*_TWO, "images", _mean(IMAGES)),
    Question(*_TWO, "1,200 steps", _mean(LONGER[1200])),
    Question("orscale", "decoupled_weight_decay", "4,800 steps", _mean(LONGER[4800])),
    Question("muon", REFERENCE, "text", _TEXT),
    Question("normuon", REFERENCE, "text", _TEXT),
    Question("one_scale", REFERENCE, "three workloads", _SMALLER),
    Question("full_rank_anchor", "orscale", "three workloads", _SMALLER),
    Question("orscale", "replayed", "three workloads", _SMALLER),
    Question("orscale_on_normuon", "normuon", "three workloads", _SMALLER),
)
# Reported without a verdict.
REPORTED = (
    Question("adamw_apart", REFERENCE, "text", _TEXT),
    Question("adamw_apart", REFERENCE, "`like-16b`", _mean(["like-16b"])),
    Question("hyperball", REFERENCE, "three workloads", _SMALLER),
    Question(*_TWO, "the large workloads", _mean(LARGE)),
    Question(*_TWO, "4,800 steps", _mean(LONGER[4800])),
)
