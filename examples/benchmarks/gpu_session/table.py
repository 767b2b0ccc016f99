"""The rows of a stage as a CSV file."""

import csv
import os
import pathlib
from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """A line of the file.

    Attributes:
      case: What was measured, such as a model.
      variant: In which way, such as an optimizer.
      step: Of a training run; 0 for everything else.
      quantity: What the numbers are.
      unit: Their unit; empty for ratios.
      low: The first quartile.
      median: The second.
      high: The third.
      number: Of values.
      card: Its name.
      driver: The version of its driver.
      jax: The version of JAX.
      clock_mhz: The clock of the multiprocessors right after the case.
    """

    case: str
    variant: str
    step: int
    quantity: str
    unit: str
    low: float
    median: float
    high: float
    number: int
    card: str
    driver: str
    jax: str
    clock_mhz: str


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        kinds = Row.__annotations__
        return [
            Row(**{name: kinds[name](text) for name, text in line.items()})
            for line in csv.DictReader(file)
        ]


def append(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Adds all rows, or none of them if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for row in [*read(path), *rows]:
            writer.writerow(f"{x:.5g}" if isinstance(x, float) else x for x in row)
    os.replace(new, path)
