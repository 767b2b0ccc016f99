"""The runs of an arm of a workload, each done once."""

import functools
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from examples.pretrain.errors import UsageError
from examples.study.arms import KNOWN
from examples.study.prose import FOLDER, write_prose
from examples.study.results import (
    UNIFORM_EVERY,
    Result,
    append_result,
    make_result,
    read_results,
    sort_results,
)
from examples.study.runs import Trainer
from examples.study.search import Rates, Search, Settings, best_point
from examples.study.workloads import KNOWN_WORKLOADS, Workload


def find_workload(name: str) -> Workload:
    """The workload of a name.

    Raises:
      UsageError: If there is none.
    """
    if name not in KNOWN_WORKLOADS:
        known = ", ".join(KNOWN_WORKLOADS)
        raise UsageError(f"--workloads {name} is unknown. Choose of: {known}.")
    return KNOWN_WORKLOADS[name]


def table_of(folder: pathlib.Path, workload: str) -> pathlib.Path:
    """Where the results of a workload are."""
    return folder / f"{workload}.csv"


def prepare(workloads: Iterable[str], folder: pathlib.Path) -> None:
    """Sorts the tables of workloads or begins them, and writes the prose if it is needed.

    Args:
      workloads: Their names.
      folder: Of the tables.
    """
    for name in workloads:
        if str(FOLDER) in find_workload(name).config.data:
            write_prose()
        sort_results(table_of(folder, name))


class NotRun(LookupError):
    """A run that no table has is asked for, where none may be done."""


class Runs:
    """The runs of an arm, each done once.

    Args:
      workload: What is trained.
      arm: With what.
      folder: Of the tables, where results are read and written.
      train: Whether what no table has is done; otherwise it raises `NotRun`.
    """

    def __init__(
        self, workload: Workload, arm: str, folder: pathlib.Path, train: bool = True
    ):
        self._arm, self._workload, self._folder = arm, workload, folder
        self.train = train
        self._path = table_of(folder, workload.name)
        found = read_results(self._path)
        self._done = {(r.rates, r.seed): r for r in found if r.arm == arm}
        self.new = 0

    def result(self, rates: Rates | Settings, seed: int) -> Result:
        """What is written down of a run; without that, it is done first."""
        if (rates, seed) not in self._done:
            if not self.train:
                raise NotRun(f"{self._workload.name} {self._arm} {rates}, seed {seed}")
            run = self._trainer.train(rates, seed, self._factors(rates, seed))
            guess = _guess(self._workload)
            result = make_result(self._arm, rates, seed, run, guess)
            append_result(self._path, result)
            self._done[rates, seed] = result
            self.new += 1
        return self._done[rates, seed]

    def mean_loss(self, rates: Rates | Settings, seeds: tuple[int, ...]) -> float:
        """The mean of the final losses of some seeds."""
        return float(np.mean([*self.losses(rates, seeds).values()]))

    def losses(self, rates: Rates | Settings, seeds: tuple[int, ...]) -> dict[int, float]:
        """The final validation loss of each seed, in nats."""
        return {seed: self.result(rates, seed).loss for seed in seeds}

    def best(self, search: Search, first: Rates, seeds: tuple[int, ...]) -> Rates:
        """The best rates that a search finds around the first ones, by the mean loss."""
        point = best_point(search, lambda point: self.mean_loss(first.at(point), seeds))
        return first.at(point)

    def _factors(self, rates: Rates | Settings, seed: int) -> np.ndarray | None:
        """Those that the arm replays: the mean ratios of another's run."""
        if self._replayed is None:
            return None
        uniform = self._replayed.result(rates, seed).uniform
        steps = np.arange(self._trainer.setup.recipe.num_steps)
        return np.interp(steps, UNIFORM_EVERY * np.arange(len(uniform)), uniform)

    @functools.cached_property
    def _replayed(self) -> "Runs | None":
        name = KNOWN[self._arm].replays
        return None if name is None else Runs(self._workload, name, self._folder)

    @functools.cached_property
    def _trainer(self) -> Trainer:
        return Trainer(self._workload, KNOWN[self._arm])


def _guess(workload: Workload) -> float:
    """The loss of a uniform guess, in nats."""
    sizes: Any = workload.config.model
    classes = sizes.classes if hasattr(sizes, "classes") else sizes.vocab_size
    return float(np.log(classes))
