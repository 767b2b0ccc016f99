"""What `examples.study.classes` measured: ratios by class of layers beside r*."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from scipy import stats

from examples.study.classes import WORKLOADS
from examples.study.records import Cell
from examples.study.results import read_rows

READINGS = 4  # Of a class: two seeds, at two steps of each.


class Optimum(NamedTuple):
    """Geometric means over the readings of a class.

    Attributes:
      ratio: Of the ratio that is used; 1 without ratios.
      optimum: Of r*, the ratio that the paper's model would choose.
    """

    ratio: float
    optimum: float


Optima = Mapping[Cell, Mapping[str, Optimum]]


def read_optima(path: pathlib.Path) -> Optima:
    """The means of each class, by workload and arm whose measurements are all there."""
    rows: dict[Cell, list[dict[str, str]]] = {}
    for row in read_rows(path):
        rows.setdefault(Cell(row["workload"], row["arm"]), []).append(row)
    return {
        cell: _means(rows[cell])
        for cell in sorted(rows, key=lambda cell: WORKLOADS.index(cell.workload))
        if len({(row["seed"], row["step"]) for row in rows[cell]}) == READINGS
    }


def _means(rows: list[dict[str, str]]) -> dict[str, Optimum]:
    by_class: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_class.setdefault(row["class"], []).append(row)
    return {
        name: Optimum(
            *(
                float(stats.gmean([float(row[field]) for row in found]))
                for field in ("ratio", "optimum")
            )
        )
        for name, found in sorted(by_class.items())
    }
