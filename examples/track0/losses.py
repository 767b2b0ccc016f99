"""The runs of an entry on disk: a row that was killed loses no run that had ended."""

import csv
import hashlib
import inspect
import pathlib
import sys
from collections.abc import Iterator
from importlib import metadata

from examples.pretrain.errors import UsageError
from examples.track0.factories import Factory
from examples.track0.runs import POINTS, Rates, Run

_HEADING = ["workload", "learning_rate", "other_learning_rate", "seed", "cpu_seconds"]
_HEADING += [f"loss_{i}_of_{POINTS}" for i in range(1, POINTS + 1)]
Key = tuple[str, Rates, int]  # Workload, rates, seed.


def facts_of(entry: str, factory: Factory) -> str:
    """What decides the losses of an entry: its name, its module and versions."""
    module = sys.modules[factory.__module__]
    digest = hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:12]
    names = ("orscale-jax", "jax", "optax", "flax")
    versions = [f"{name} {metadata.version(name)}" for name in names]
    return ", ".join([entry, f"{module.__name__} {digest}", *versions])


class Losses:
    """A table of runs in a CSV file, whose first line says what they were made with.

    A run is added at once. With `facts`, a file that was made with others is refused, and
    without them the file is only read.
    """

    def __init__(self, path: pathlib.Path, facts: str | None = None):
        self.path = path
        self._runs: dict[Key, Run] = {}
        self.facts = facts or ""
        if path.exists():
            # A kill may have torn the last row, whose run is then done again.
            whole, _, _ = path.read_text().rpartition("\n")
            there, *lines = whole.removeprefix("# ").split("\n")
            if facts not in (None, there):
                raise UsageError(
                    f"{path} was made with other code or versions.\nThere: {there}\n"
                    f"Now:   {facts}\nPass another --name, or remove the file."
                )
            self._runs = dict(_run(row) for row in csv.DictReader(lines))
            self.facts = there
        elif facts is None:
            raise UsageError(f"{path} is missing.")
        if facts is not None:
            self._write()

    @property
    def entry(self) -> str:
        """The MODULE:FACTORY that was trained."""
        return self.facts.partition(", ")[0]

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    def __getitem__(self, key: Key) -> Run:
        return self._runs[key]

    def last_rates(self, workload: str, seed: int) -> Rates:
        """The rates at which this seed was trained last."""
        found = [key[1] for key in self._runs if (key[0], key[2]) == (workload, seed)]
        if not found:
            raise UsageError(f"{self.path} has no run of seed {seed} on {workload}.")
        return found[-1]

    def add(self, key: Key, run: Run) -> None:
        self._runs[key] = run
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(_row(key, run))

    def _write(self) -> None:
        """Without a torn row, so that the next one begins a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        with partial.open("w", newline="") as file:
            file.write(f"# {self.facts}\n")
            rows = (_row(*pair) for pair in self._runs.items())
            csv.writer(file, lineterminator="\n").writerows([_HEADING, *rows])
        partial.replace(self.path)


def _row(key: Key, run: Run) -> Iterator[object]:
    workload, rates, seed = key
    yield from (workload, *rates, seed, f"{run.seconds:.5f}", *run.losses)


def _run(row: dict[str, str]) -> tuple[Key, Run]:
    workload, rate, other, seed, seconds, *losses = (row[name] for name in _HEADING)
    rates = Rates(float(rate), float(other))
    return (workload, rates, int(seed)), Run(tuple(map(float, losses)), float(seconds))
