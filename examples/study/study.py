"""All results of the study, by workload, arm and learning rate."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from examples.study.arms import ARMS, KNOWN, SENSITIVE, SETTLED
from examples.study.gains import Gains, read_gains
from examples.study.plan import find_workload, table_of
from examples.study.results import Result, best_rate_of, read_results
from examples.study.seconds import read_seconds
from examples.study.statistics import (
    Comparison,
    Interval,
    compare,
    interval,
    paired,
    steps_to,
    valley_width,
)
from examples.study.workloads import SENSITIVITY, WORKLOADS

# The third one is twice AdamW's best rate.
Column = Literal["inherited", "own", "twice"]
COLUMNS: tuple[Column, ...] = ("inherited", "own")
REFERENCE = "muon_moonlight"


class Cell(NamedTuple):
    """An arm at one of its rates."""

    arm: str
    column: Column


def reference_of(arm: str) -> str:
    """What an arm is compared with: Muon+Moonlight with as many free rates."""
    if KNOWN[arm].shared or arm == f"{REFERENCE}_apart":
        return REFERENCE
    return f"{REFERENCE}_apart"


@dataclasses.dataclass(frozen=True)
class Study:
    """The tables.

    Attributes:
      results: Rows of each workload that was run.
      gains: What was measured along OrScale's runs.
      seconds: Of a step, by workload and arm.
      arms: A workload counts as done once all of these were run.
      without: Seeds that are left out of all but the choice of rates.
    """

    results: Mapping[str, tuple[Result, ...]]
    gains: tuple[Gains, ...]
    seconds: Mapping[str, Mapping[str, float]]
    arms: Sequence[str] = tuple(ARMS)
    without: frozenset[int] = frozenset()

    @functools.cached_property
    def workloads(self) -> list[str]:
        """Those with rates of their own that are done, in the protocol's order."""
        return [name for name in WORKLOADS if self._is_done(name, self.arms)]

    @functools.cached_property
    def variations(self) -> list[str]:
        """Those with the rates of another that are done."""
        return [name for name in SENSITIVITY if self._is_done(name, SENSITIVE)]

    def _is_done(self, workload: str, arms: Sequence[str]) -> bool:
        """Whether all arms have several seeds at both of their rates."""
        return workload in self.results and all(
            self.has(workload, arm) and len(self.losses(workload, arm, column)) > 1
            for arm in arms
            for column in COLUMNS
        )

    def rows(self, workload: str, arm: str) -> list[Result]:
        """The runs of an arm."""
        return [r for r in self.results[workload] if r.arm == arm]

    def has(self, workload: str, arm: str) -> bool:
        """Whether the arm was run."""
        return bool(self.rows(workload, arm))

    def search(self, workload: str, arm: str) -> dict[float, float]:
        """Losses of the first seed by learning rate."""
        return {r.rate: r.loss for r in self.rows(workload, arm) if r.seed == 0}

    def rate(self, workload: str, arm: str, column: Column) -> float:
        """The learning rate of a column."""
        if column == "own":
            return best_rate_of(self.rows(workload, arm), for_all_seeds=arm in SETTLED)
        source = find_workload(workload).rates_of or workload
        best = self.rate(source, "adamw", "own")
        factor = 2 if column == "twice" else 1
        return float(f"{factor * best * KNOWN[arm].rate:.6g}")

    def runs(self, workload: str, arm: str, column: Column) -> dict[int, Result]:
        """The runs of a column by seed."""
        rate = self.rate(workload, arm, column)
        found = [r for r in self.rows(workload, arm) if r.rate == rate]
        return {r.seed: r for r in found if r.seed not in self.without}

    def losses(self, workload: str, arm: str, column: Column) -> dict[int, float]:
        """The last validation losses of a column by seed."""
        return {s: run.loss for s, run in self.runs(workload, arm, column).items()}

    def difference(
        self,
        workload: str,
        arm: str,
        column: Column,
        than: str = REFERENCE,
    ) -> Interval:
        """Loss of an arm minus that of another, in nats, seed by seed.

        Args:
          workload: Its name.
          arm: The one.
          column: At which rates, of both.
          than: The other.
        """
        by_seed = self.by_seed(workload, Cell(arm, column), Cell(than, column))
        return interval(list(by_seed.values()))

    def by_seed(self, workload: str, one: Cell, other: Cell) -> dict[int, float]:
        """Loss of one cell minus that of another, by seed."""
        return paired(self.losses(workload, *one), self.losses(workload, *other))

    def compare(self, one: Cell, other: Cell, kind: str = "") -> Comparison:
        """One cell minus another in all workloads that have both, or those of a kind.

        Args:
          one: An arm at one of its rates.
          other: What it is compared with.
          kind: "text" or "images"; nothing for all.
        """
        names = [
            name
            for name in self.workloads
            if self.has(name, one.arm) and self.has(name, other.arm)
            if not kind or kind == kind_of(name)
        ]
        return compare([self.by_seed(name, one, other) for name in names])

    def differences(self, arm: str, column: Column, than: str = REFERENCE) -> Comparison:
        """An arm minus another, both at the rates of one column."""
        return self.compare(Cell(arm, column), Cell(than, column))

    def share_of_steps(self, workload: str, arm: str) -> float:
        """Steps to the final loss of tuned Muon+Moonlight, over its own; mean over seeds.

        NaN where a seed does not get there.
        """
        # Not `loss`, which is written with more digits than the losses on the way.
        reference = self.runs(workload, REFERENCE, "own")
        targets = {seed: run.losses[-1] for seed, run in reference.items()}
        recipe = find_workload(workload).config.recipe
        every = recipe.validation_every
        shares = []
        for seed, run in self.runs(workload, arm, "own").items():
            ends = [every * (i + 1) for i in range(len(run.losses))]
            steps = [min(end, recipe.num_steps) for end in ends]
            reached = steps_to(targets.get(seed, math.nan), run.losses, steps)
            shares.append(reached / recipe.num_steps)
        return float(np.mean(shares))

    def valley(self, workload: str, arm: str) -> float:
        """Octaves of learning rates within 2 % of the best loss, at the first seed."""
        return valley_width(self.search(workload, arm))

    def mean(self, workload: str, arm: str, column: Column, field: str) -> float:
        """The mean of a field of the results over seeds."""
        runs = self.runs(workload, arm, column).values()
        return float(np.mean([getattr(run, field) for run in runs]))

    def uniform(self, workload: str, arm: str, column: Column) -> float:
        """The geometric mean of all ratios, steps and seeds."""
        runs = self.runs(workload, arm, column).values()
        return float(np.exp(np.mean([np.mean(np.log(run.uniform)) for run in runs])))

    def gain(self, workload: str, field: str) -> float:
        """The mean of one of the theory's numbers, over seeds and steps.

        Without those along which the curvature was negative, which have none; NaN if no
        number is left.
        """
        rows = [g for g in self.gains if g.workload == workload]
        rows = [g for g in rows if g.seed not in self.without]
        values = [x for x in (getattr(g, field) for g in rows) if math.isfinite(x)]
        return float(np.mean(values)) if values else math.nan

    def class_ratios(self, workload: str, arm: str, column: Column) -> dict[str, float]:
        """The mean ratio of each class at the end, geometric over seeds."""
        runs = list(self.runs(workload, arm, column).values())
        return {
            name: float(np.exp(np.mean([np.log(run.class_ratio[name]) for run in runs])))
            for name in runs[0].class_ratio
        }


def kind_of(workload: str) -> str:
    """Whether a workload is of text or of images."""
    return "images" if workload.startswith("vision") else "text"


def read_study(folder: pathlib.Path, arms: Sequence[str] = tuple(ARMS)) -> Study:
    """Reads the tables of a folder; those that are missing are left out.

    Args:
      folder: Where they are.
      arms: Those that make a workload whole; tables of other arms may be missing.
    """
    results = {}
    for name in (*WORKLOADS, *SENSITIVITY):
        rows = read_results(table_of(folder, name))
        if rows:
            results[name] = tuple(rows)
    gains = tuple(read_gains(folder / "gains.csv"))
    return Study(results, gains, read_seconds(folder / "seconds.csv"), arms)
