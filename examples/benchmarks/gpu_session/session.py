"""Stages of cases, their tables, and what measures the cases that lack."""

import csv
import itertools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from examples.benchmarks.timing import Quartiles


class Measured(NamedTuple):
    """One quantity of a case."""

    quantity: str
    unit: str  # Empty for ratios.
    quartiles: Quartiles
    step: int = 0  # Of a training run; 0 for everything else.


class Case(NamedTuple):
    """What is measured at once."""

    name: str  # What is measured, such as a model.
    variant: str  # In which way, such as an optimizer.
    quantity: str  # The case is done where the table has this quantity of it.
    measure: Callable[..., Iterator[Measured]]
    last: int = 0  # The last step of a training run, whose rows are written as they come.
    told: bool = False  # `measure` takes the rows of this card that the table then has.


class Row(NamedTuple):
    """A line of a table."""

    case: str
    variant: str
    step: int
    quantity: str
    unit: str
    low: float  # The first quartile.
    median: float
    high: float
    number: int  # Of values.
    card: str
    driver: str
    jax: str
    clock_mhz: str  # Of the multiprocessors, right after the case.


# Groups of cases, those first that are wanted most; in miniature if told so.
Stage = Callable[[bool], Sequence[Sequence[Case]]]


def run(
    stages: Mapping[str, Stage], folder: pathlib.Path, seconds: float, tiny: bool
) -> tuple[list[str], list[str]]:
    """Measures what the tables lack of this card.

    Stages take turns, a group of each. After so many seconds no case is started, and no
    training run goes on.

    Returns:
      The cases for which no time was left, and those that failed.
    """
    card, began = jax.devices()[0].device_kind, time.perf_counter()
    left, failed = [], []
    named = ([(name, of) for of in stages[name](tiny)] for name in stages)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*named))
    for stage, case in ((name, case) for name, of in filter(None, turns) for case in of):
        path = folder / f"{stage}.csv"
        wanted = (case.name, case.variant, case.last, case.quantity, card)
        if wanted in map(_key, read(path)):
            continue
        title = f"{stage}: {case.name}, {case.variant}, {case.quantity}"
        try:
            rows = [row for row in read(path) if row.card == card]
            measured = case.measure(*([rows] if case.told else []))
            while time.perf_counter() - began < seconds:
                found = list(itertools.islice(measured, 1 if case.last else None))
                add(path, case, found)
                if found[-1].step == case.last:
                    print(f"{title} ({time.perf_counter() - began:.0f} s)", flush=True)
                    break
            else:
                left.append(title)
        except jax.errors.JaxRuntimeError as error:  # Such as a lack of memory.
            reason = str(error).partition("\n")[0]
            print(f"{title} failed: {reason}", file=sys.stderr, flush=True)
            failed.append(title)
    return left, failed


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a table; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        kinds = Row.__annotations__.values()
        lines = list(csv.reader(file))[1:]
        return [Row(*(of(x) for of, x in zip(kinds, x, strict=True))) for x in lines]


def add(path: pathlib.Path, case: Case, found: Iterable[Measured]) -> None:
    """Adds all rows, in place of the same ones, or none if the process is killed."""
    device = jax.devices()[0].device_kind
    card = device, nvidia_smi("driver_version"), jax.__version__, nvidia_smi("clocks.sm")
    rows = {_key(row): row for row in read(path)}
    for quantity, unit, quartiles, step in found:
        row = Row(case.name, case.variant, step, quantity, unit, *quartiles, *card)
        rows[_key(row)] = row
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for row in rows.values():
            writer.writerow(f"{x:.5g}" if isinstance(x, float) else x for x in row)
    os.replace(new, path)


def _key(row: Row) -> tuple[str, str, int, str, str]:
    return row.case, row.variant, row.step, row.quantity, row.card


def nvidia_smi(query: str) -> str:
    """What it tells of the first card; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.check_output(
            command, text=True, timeout=10, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    line = text.strip().partition("\n")[0]
    return "" if line.startswith("[") else line  # Such as [N/A].
