"""The results of runs, in one small table for each workload."""

import csv
import dataclasses
import io
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from examples.pretrain.errors import UsageError
from examples.pretrain.operation.records import read_csv
from examples.pretrain.operation.rundir import write_atomically
from examples.study.runs import Run
from examples.study.search import Rates, Settings

# The mean ratio is written down after the first step and every fifth one since.
UNIFORM_EVERY = 5


@dataclasses.dataclass(frozen=True)
class Result:
    """A row.

    Attributes:
      arm: One of `examples.study.arms`.
      rate: The peak learning rate.
      seed: Of the initial weights and the order of the data.
      loss: The last validation loss, in nats, at most that of a uniform guess.
      diverged: Whether it was above that, or not finite.
      growth: As in `Run`.
      spread: As in `Run`; NaN without ratios.
      at_bound: As in `Run`; NaN without ratios.
      losses: All validation losses.
      uniform: The mean ratio, every fifth step.
      class_ratio: As in `Run`.
      adam_rate: The peak learning rate of AdamW's parameters. Nothing in the tables of
        the first study: `Arm.shared` tells it.
      decay: The weight decay. Nothing: that of the workload.
    """

    arm: str
    rate: float
    seed: int
    loss: float
    diverged: bool
    growth: float
    spread: float
    at_bound: float
    losses: tuple[float, ...]
    uniform: tuple[float, ...]
    class_ratio: dict[str, float]
    adam_rate: float | None = None
    decay: float | None = None

    @property
    def rates(self) -> Rates | Settings:
        """Both peak learning rates, and the decay where it is not the workload's."""
        adam = self.rate if self.adam_rate is None else self.adam_rate
        if self.decay is not None:
            return Settings(self.rate, adam, self.decay)
        return Rates(self.rate, adam)


def make_result(
    arm: str, rates: Rates | Settings, seed: int, run: Run, guess: float
) -> Result:
    """The row of a run.

    Args:
      arm: Its name.
      rates: Its learning rates.
      seed: Its seed.
      run: What came of it.
      guess: The loss of a uniform guess, in nats.
    """
    last = run.losses[-1]
    diverged = not last <= guess
    return Result(
        arm,
        rates.matrix,
        seed,
        round(guess if diverged else last, 5),
        diverged,
        _digits(run.growth),
        _digits(run.spread),
        _digits(run.at_bound),
        tuple(_digits(loss) for loss in run.losses),
        tuple(_digits(ratio) for ratio in run.uniform[::UNIFORM_EVERY]),
        {name: _digits(ratio) for name, ratio in run.class_ratio.items()},
        rates.adam,
        rates.decay if isinstance(rates, Settings) else None,
    )


def read_results(path: pathlib.Path) -> list[Result]:
    """The rows of a table; none if there is no such file."""
    return list(map(_parse, read_rows(path)))


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column; none if there is no such file."""
    return read_csv(path) if path.exists() else []


def append_result(path: pathlib.Path, result: Result) -> None:
    """Writes a row down in one piece: other processes write to the same table.

    Raises:
      FileNotFoundError: If there is no table; `sort_results` makes one.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, _lines([_row(result)]).encode())
    finally:
        os.close(file)


def sort_results(path: pathlib.Path) -> None:
    """Orders the rows of a table by arm, rates and seed; begins one if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = read_results(path)
    rows = [_row(r) for r in sorted(results, key=lambda r: (r.arm, r.rates, r.seed))]
    write_atomically(path, _lines([_FIELDS, *rows]))


def best_rate_of(results: Sequence[Result], for_all_seeds: bool) -> float:
    """The rate that a search has found, from the rows of one arm.

    Args:
      results: The rows.
      for_all_seeds: Whether the best is that for the mean over seeds, among the rates at
        which all seeds were run, or else that for seed 0.
    """
    losses: dict[float, list[float]] = {}
    for result in results:
        if for_all_seeds or result.seed == 0:
            losses.setdefault(result.rate, []).append(result.loss)
    most = max(map(len, losses.values()))
    means = {rate: sum(x) / most for rate, x in losses.items() if len(x) == most}
    return min(means, key=means.__getitem__)


def inherited_rate(path: pathlib.Path) -> float:
    """AdamW's best rate in a table of the first study.

    Raises:
      UsageError: If AdamW was not run.
    """
    found = [r for r in read_results(path) if r.arm == "adamw"]
    if not found:
        raise UsageError(f"{path} has no run of adamw, from which rates are inherited.")
    return best_rate_of(found, for_all_seeds=True)


_FIELDS = [field.name for field in dataclasses.fields(Result)]


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _row(result: Result) -> list[Any]:
    row = {name: getattr(result, name) for name in _FIELDS}
    row["rate"] = f"{result.rate:.6g}"
    for name in ("adam_rate", "decay"):
        row[name] = "" if row[name] is None else f"{row[name]:.6g}"
    row["diverged"] = int(result.diverged)
    for name in ("spread", "at_bound"):
        row[name] = "" if math.isnan(row[name]) else row[name]
    for name in ("losses", "uniform"):
        row[name] = " ".join(map(str, row[name]))
    row["class_ratio"] = ";".join(f"{k}={v}" for k, v in result.class_ratio.items())
    return list(row.values())


def _lines(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _parse(row: dict[str, str]) -> Result:
    pairs = [pair.split("=") for pair in row["class_ratio"].split(";") if pair]
    adam_rate, decay = row.get("adam_rate"), row.get("decay")
    return Result(
        arm=row["arm"],
        rate=float(row["rate"]),
        seed=int(row["seed"]),
        diverged=bool(int(row["diverged"])),
        losses=tuple(map(float, row["losses"].split())),
        uniform=tuple(map(float, row["uniform"].split())),
        class_ratio={name: float(ratio) for name, ratio in pairs},
        loss=float(row["loss"]),
        growth=float(row["growth"]),
        spread=float(row["spread"] or "nan"),
        at_bound=float(row["at_bound"] or "nan"),
        adam_rate=float(adam_rate) if adam_rate else None,
        decay=float(decay) if decay else None,
    )
