"""What a run writes down as it goes: CSV files that survive being killed."""

import csv
import dataclasses
import io
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np
import optax

from examples.pretrain.config import Config
from examples.pretrain.rundir import write_atomically

METRICS = ["arm", "step", "tokens", "train_loss", "val_loss", "learning_rate", "seconds"]

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Interval:
    """What is known of some steps in a row.

    Attributes:
      step: How many steps are done.
      state: After them. The next step takes its memory.
      losses: One per step of the interval.
      seconds: What these steps took.
    """

    step: int
    state: dict[str, Any]
    losses: list[float]
    seconds: float


class CsvLog:
    """A CSV file with a ``step`` column that grows by rows and can go back to a step."""

    def __init__(self, path: pathlib.Path, columns: Sequence[str]):
        self._path = path
        self._columns = columns

    def rewind(self, step: int) -> list[dict[str, str]]:
        """Drops what follows ``step``, even half a line, and gives the rows that stay."""
        rows = read_csv(self._path) if self._path.exists() else []
        rows = [row for row in rows if int(row["step"]) <= step]
        write_csv(self._path, self._columns, rows)
        return rows

    def append(self, rows: Iterable[Row]) -> None:
        """Adds rows; they are on the disk when it returns."""
        with open(self._path, "a", newline="") as file:
            _writer(file, self._columns).writerows(rows)
            file.flush()
            os.fsync(file.fileno())


class Recorder:
    """Writes down one arm's metrics, a row per step.

    What it writes depends on the step alone (but for the seconds), wherever the run was
    interrupted.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        arm: str,
        start: int,
        schedule: optax.Schedule,
        config: Config,
    ):
        self._arm, self._config = arm, config
        steps = np.arange(config.steps)
        self._learning_rates = jax.device_get(jax.jit(jax.vmap(schedule))(steps))
        self._metrics = CsvLog(folder / "metrics.csv", METRICS)
        rows = self._metrics.rewind(start)
        self._seconds = float(rows[-1]["seconds"]) if rows else 0.0
        self.tokens_per_second = 0.0

    def record(self, interval: Interval, val_loss: float | None) -> None:
        """Writes an interval down; the validation loss belongs to its last step."""
        count = len(interval.losses)
        tokens_per_step = self._config.batch_size * self._config.seq_len
        self.tokens_per_second = count * tokens_per_step / interval.seconds
        rows = []
        for index, loss in enumerate(interval.losses):
            step = interval.step - count + index + 1
            self._seconds += interval.seconds / count  # Single steps are not timed.
            rows.append(
                {
                    "arm": self._arm,
                    "step": step,
                    "tokens": step * tokens_per_step,
                    "train_loss": f"{loss:.6f}",
                    "val_loss": "",
                    "learning_rate": f"{self._learning_rates[step - 1]:.6g}",
                    "seconds": f"{self._seconds:.3f}",
                }
            )
        if val_loss is not None:
            rows[-1]["val_loss"] = f"{val_loss:.6f}"
        self._metrics.append(rows)


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file, up to its last line end."""
    with open(path, newline="") as file:
        whole, _, _ = file.read().rpartition("\n")
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def write_csv(path: pathlib.Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Writes a CSV file that is seen whole or not at all."""
    text = io.StringIO(newline="")
    writer = _writer(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def _writer(file: TextIO, columns: Sequence[str]) -> csv.DictWriter:
    return csv.DictWriter(file, columns, lineterminator="\n")
