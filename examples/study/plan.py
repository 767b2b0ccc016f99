"""Which runs an arm of a workload calls for, and doing those that are missing."""

import functools
import pathlib
from typing import Any

import numpy as np

from examples.pretrain.errors import UsageError
from examples.study.arms import KNOWN, SETTLED
from examples.study.results import (
    UNIFORM_EVERY,
    Result,
    append_result,
    best_rate_of,
    make_result,
    read_results,
)
from examples.study.runs import Trainer
from examples.study.search import best_rate, settle
from examples.study.workloads import SENSITIVITY, WORKLOADS, Workload


def find_workload(name: str) -> Workload:
    """The workload of a name.

    Raises:
      UsageError: If there is none.
    """
    known = WORKLOADS | SENSITIVITY
    if name not in known:
        raise UsageError(f"--workloads {name} is unknown. Choose of: {', '.join(known)}.")
    return known[name]


def table_of(folder: pathlib.Path, workload: str) -> pathlib.Path:
    """Where the results of a workload are."""
    return folder / f"{workload}.csv"


def inherited_rate(folder: pathlib.Path, workload: Workload) -> float:
    """AdamW's best rate.

    Raises:
      UsageError: If AdamW was not run.
    """
    path = table_of(folder, workload.rates_of or workload.name)
    found = [r for r in read_results(path) if r.arm == "adamw"]
    if not found:
        raise UsageError(f"{path} has no run of adamw, from which rates are inherited.")
    return best_rate_of(found, for_all_seeds=True)


class Runs:
    """The runs of an arm, each done once.

    Args:
      workload: What is trained.
      arm: With what.
      adam_rate: Of AdamW's parameters, where they do not share the rate.
      folder: Of the tables, where results are read and written.
    """

    def __init__(
        self, workload: Workload, arm: str, adam_rate: float, folder: pathlib.Path
    ):
        self._arm, self._workload, self._folder = arm, workload, folder
        self._path = table_of(folder, workload.name)
        self._adam_rate = adam_rate
        found = read_results(self._path)
        self._done = {(r.rate, r.seed): r for r in found if r.arm == arm}

    def result(self, rate: float, seed: int) -> Result:
        """What is written down of a run; without that, it is done first."""
        rate = float(f"{rate:.6g}")
        if (rate, seed) not in self._done:
            run = self._trainer.train(rate, seed, self._factors(rate, seed))
            result = make_result(self._arm, rate, seed, run, _guess(self._workload))
            append_result(self._path, result)
            self._done[rate, seed] = result
        return self._done[rate, seed]

    def _factors(self, rate: float, seed: int) -> np.ndarray | None:
        """Those that the arm replays: the mean ratios of another's run."""
        if self._replayed is None:
            return None
        uniform = self._replayed.result(rate, seed).uniform
        steps = np.arange(self._trainer.setup.recipe.num_steps)
        return np.interp(steps, UNIFORM_EVERY * np.arange(len(uniform)), uniform)

    @functools.cached_property
    def _replayed(self) -> "Runs | None":
        name = KNOWN[self._arm].replays
        if name is None:
            return None
        return Runs(self._workload, name, self._adam_rate, self._folder)

    @functools.cached_property
    def _trainer(self) -> Trainer:
        return Trainer(self._workload, KNOWN[self._arm], self._adam_rate)


def run_arm(
    workload: Workload, arm: str, folder: pathlib.Path, seeds: tuple[int, ...]
) -> None:
    """Does all runs of an arm that are not written down.

    All seeds at the inherited rate and at the arm's own, which is searched for at the
    first seed, and for some arms then at all of them. Where the workload has another's
    rates, all seeds at the inherited one.
    """
    tuned = workload.rates_of is None
    if arm == "adamw" and tuned:
        adam_rate = workload.config.recipe.learning_rate
    else:
        adam_rate = inherited_rate(folder, workload)
    first = KNOWN[arm].rate * adam_rate
    runs = Runs(workload, arm, adam_rate, folder)

    def mean_loss_of(rate: float) -> float:
        return float(np.mean([runs.result(rate, seed).loss for seed in seeds]))

    if arm != "adamw" or not tuned:
        mean_loss_of(first)
    if tuned:
        own = best_rate(lambda rate: runs.result(rate, seeds[0]).loss, first)
        mean_loss_of(own)
        if arm in SETTLED:
            settle(mean_loss_of, own)


def _guess(workload: Workload) -> float:
    """The loss of a uniform guess, in nats."""
    sizes: Any = workload.config.model
    classes = sizes.classes if hasattr(sizes, "classes") else sizes.vocab_size
    return float(np.log(classes))
