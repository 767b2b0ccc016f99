"""What the tables hold of the second protocol's jobs whose runs are all there."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from examples.study.plan import NotRun
from examples.study.results import Result
from examples.study.search import Point, Rates, best_point
from examples.study.second import JOBS, Job, first_rates, runs_of
from examples.study.statistics import paired


@dataclasses.dataclass(frozen=True)
class Record:
    """A job whose runs are all there.

    Attributes:
      job: Its arm and its workload.
      first: The rates at which its search began, which are the point (0, 0).
      best: The point that the search found.
      searched: The runs of the search by point, one for each of its seeds.
      confirmed: The runs at the best rates, one for each fresh seed.
    """

    job: Job
    first: Rates
    best: Point
    searched: Mapping[Point, tuple[Result, ...]]
    confirmed: tuple[Result, ...]

    @property
    def rates(self) -> Rates:
        """The best rates."""
        return self.first.at(self.best)

    @property
    def losses(self) -> dict[int, float]:
        """The final validation loss of each fresh seed, in nats."""
        return {run.seed: run.loss for run in self.confirmed}


class Cell(NamedTuple):
    """An arm of a workload."""

    workload: str
    arm: str


Records = Mapping[Cell, Record]


def read_records(folder: pathlib.Path) -> Records:
    """The complete jobs; no run is done."""
    found = {Cell(job.workload, job.arm): read_record(job, folder) for job in JOBS}
    return {cell: record for cell, record in found.items() if record is not None}


def read_record(job: Job, folder: pathlib.Path) -> Record | None:
    """A job whose runs are all there, or nothing; no run is done."""
    runs = runs_of(job, folder, train=False)
    searched: dict[Point, tuple[Result, ...]] = {}

    def loss_of(point: Point) -> float:
        rates = first.at(point)
        searched[point] = tuple(runs.result(rates, seed) for seed in job.search_seeds)
        return runs.mean_loss(rates, job.search_seeds)

    try:
        first = first_rates(job, folder, train=False)
        best = best_point(job.search, loss_of) if job.search_seeds else (0, 0)
        confirmed = tuple(runs.result(first.at(best), seed) for seed in job.seeds)
    except (NotRun, RuntimeError):  # Runs are missing, or the search found no end.
        return None
    return Record(job, first, best, searched, confirmed)


def difference(
    records: Records, workload: str, ours: str, theirs: str
) -> dict[int, float] | None:
    """The paired differences of two arms by seed; None unless both are complete."""
    cells = Cell(workload, ours), Cell(workload, theirs)
    if not all(cell in records for cell in cells):
        return None
    return paired(*(records[cell].losses for cell in cells))
