"""What runs came to: a row for each in one small table for each workload."""

import csv
import functools
import io
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from examples.pretrain.operation.rundir import write_atomically
from examples.study.prose import FOLDER, write_prose
from examples.study.runs import Result, Trainer
from examples.study.search import Settings
from examples.study.workloads import find_workload

_FIELDS = (
    "arm", "rate", "seed", "loss", "diverged", "growth", "spread", "at_bound", "losses",
    "uniform", "class_ratio", "adam_rate", "decay",
)  # fmt: skip


class NotRun(LookupError):
    """A run that no table has is asked for, where none may be done."""


class Runs:
    """The runs of an arm on a workload, each done once and written down.

    Args:
      workload: The name of what is trained.
      arm: With which optimizer: one of `examples.pretrain.optimizers.OPTIMIZERS`.
      folder: Of the tables, where results are read and written.
      train: Whether what no table has is done; otherwise it raises `NotRun`.
    """

    def __init__(self, workload: str, arm: str, folder: pathlib.Path, train: bool = True):
        self._workload, self._arm, self._train = find_workload(workload), arm, train
        self._path = folder / f"{workload}.csv"
        rows = (row for row in read_results(self._path) if row.arm == arm)
        self._done = {(row.settings, row.seed): row for row in rows}

    def losses(self, settings: Settings, seeds: Iterable[int]) -> dict[int, float]:
        """The final validation loss of each seed, in nats; what lacks is done first."""
        for seed in seeds:
            if (settings, seed) in self._done:
                continue
            if not self._train:
                raise NotRun(f"{self._path.stem} {self._arm} {settings}, seed {seed}")
            result = self._trainer.train(settings, seed)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:  # In one piece: other processes write to the same table.
                os.write(file, _lines([_row(result)]).encode())
            finally:
                os.close(file)
            self._done[settings, seed] = result
        return {seed: self._done[settings, seed].loss for seed in seeds}

    def mean_loss(self, settings: Settings, seeds: Iterable[int]) -> float:
        """The mean of the final losses of some seeds."""
        return float(np.mean(list(self.losses(settings, seeds).values())))

    @functools.cached_property
    def _trainer(self) -> Trainer:
        return Trainer(self._workload, self._arm)


def prepare(workloads: Iterable[str], folder: pathlib.Path) -> None:
    """Sorts the tables of workloads or begins them, and writes the prose if it is needed.

    Args:
      workloads: Their names.
      folder: Of the tables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in workloads:
        if str(FOLDER) in find_workload(name).config.data:
            write_prose()
        path = folder / f"{name}.csv"
        results = sorted(
            read_results(path),
            key=lambda r: (r.arm, *(x or 0 for x in r.settings), r.seed),
        )
        write_atomically(path, _lines([_FIELDS, *map(_row, results)]))


def read_results(path: pathlib.Path) -> list[Result]:
    """The rows of a table; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_parse(row) for row in csv.DictReader(file)]


def _row(result: Result) -> list[Any]:
    rates = ["" if x is None else f"{x:.6g}" for x in result.settings]
    ratios = ("" if math.isnan(x) else x for x in (result.spread, result.at_bound))
    by_class = ";".join(f"{name}={ratio}" for name, ratio in result.class_ratio.items())
    return [
        result.arm, rates[0], result.seed, result.loss, int(result.diverged),
        result.growth, *ratios, " ".join(map(str, result.losses)),
        " ".join(map(str, result.uniform)), by_class, *rates[1:],
    ]  # fmt: skip


def _lines(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _parse(row: dict[str, str]) -> Result:
    pairs = (pair.split("=") for pair in row["class_ratio"].split(";") if pair)
    settings = (row["rate"], row["adam_rate"], row.get("decay"))
    return Result(
        arm=row["arm"],
        settings=Settings(*(float(x) for x in settings if x)),
        seed=int(row["seed"]),
        loss=float(row["loss"]),
        diverged=bool(int(row["diverged"])),
        growth=float(row["growth"]),
        spread=float(row["spread"] or "nan"),
        at_bound=float(row["at_bound"] or "nan"),
        losses=tuple(map(float, row["losses"].split())),
        uniform=tuple(map(float, row["uniform"].split())),
        class_ratio={name: float(ratio) for name, ratio in pairs},
    )
