"""A stage is a list of cases; what runs those that are missing."""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax

from examples.benchmarks.gpu_session import figure, table
from examples.benchmarks.gpu_session.card import Card, clock, this_card
from examples.benchmarks.gpu_session.table import Row
from examples.benchmarks.timing import Quartiles


class Measured(NamedTuple):
    """One quantity of a case; the step is that of a training run."""

    quantity: str
    unit: str
    quartiles: Quartiles
    step: int = 0


class Case(NamedTuple):
    """What is measured at once, and written down when it is done."""

    name: str
    variant: str
    measure: Callable[[], Iterable[Measured]]

    def rows(self, card: Card) -> list[Row]:
        """Measures."""
        found = list(self.measure())
        now = clock()
        return [
            Row(
                self.name,
                self.variant,
                step,
                quantity,
                unit,
                *quartiles,
                *card,
                clock_mhz=now,
            )
            for quantity, unit, quartiles, step in found
        ]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Cases, and the figure of what they gave.

    Attributes:
      cases: All of them, in the order in which they are wanted; in miniature if told.
      draw: Draws rows of one card into a PNG.
    """

    cases: Callable[[bool], Sequence[Case]]
    draw: Callable[[Sequence[Row], pathlib.Path], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The cases of a stage that were not measured: out of time, or failed."""

    left: tuple[str, ...]
    failed: tuple[str, ...]


def run(
    name: str, stage: Stage, folder: pathlib.Path, seconds: float, tiny: bool
) -> Outcome:
    """Measures what the table lacks of this card, and draws what it then has.

    Args:
      name: Of the stage, its table and its figure.
      stage: The stage.
      folder: Where both go.
      seconds: After which no case is started.
      tiny: Whether all is in miniature.
    """
    path, card = folder / f"{name}.csv", this_card()
    began = time.perf_counter()
    left, failed = [], []
    for case in _missing(stage.cases(tiny), path, card):
        title = f"{name}: {case.name}, {case.variant}"
        if time.perf_counter() - began >= seconds:
            left.append(title)
            continue
        try:
            table.append(path, case.rows(card))
        except jax.errors.JaxRuntimeError as error:  # Such as a lack of memory.
            reason = str(error).partition("\n")[0]
            print(f"{title} failed: {reason}", file=sys.stderr, flush=True)
            failed.append(title)
        else:
            print(f"{title} ({time.perf_counter() - began:.0f} s)", flush=True)
    if rows := [row for row in table.read(path) if row.card == card.name]:
        stage.draw(rows, figure.path_of(path))
    return Outcome(tuple(left), tuple(failed))


def _missing(cases: Iterable[Case], path: pathlib.Path, card: Card) -> list[Case]:
    rows = (row for row in table.read(path) if row.card == card.name)
    done = {(row.case, row.variant) for row in rows}
    return [case for case in cases if (case.name, case.variant) not in done]
