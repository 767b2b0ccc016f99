"""A CSV file with some rows for each step, which survives being killed."""

import csv
import io
import itertools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Row = Sequence[str]


class _Step(NamedTuple):
    """The lines of a step, and where they begin in the file."""

    step: int
    start: int
    rows: int


class StepFile:
    """A CSV file that grows by steps, and can go back to one of them.

    One column is called ``step``. Rows are on the disk when :meth:`append` returns. If a
    process is killed while it writes, the next one drops what is incomplete: half a line,
    or a step with fewer rows than the first one. Only one process may write a file.

    Attributes:
      path: The file.
      columns: The names of its columns.

    Raises:
      ValueError: If the file has other columns.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]):
        """Open the file, or begin it."""
        self.path, self.columns = pathlib.Path(path), list(columns)
        found = header_of(self.path)
        if found is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(_lines([self.columns]), mode="w")
        elif found != self.columns:
            raise ValueError(
                f"{self.path} has the columns {', '.join(found)}, and this run has "
                f"{', '.join(self.columns)}: pass the same columns (to a History: the "
                "same measurements and scalars), or another path."
            )
        self._steps = self._read_steps()
        torn = (step for step in self._steps if step.rows < self._steps[0].rows)
        self._cut(next(torn, None))

    @property
    def steps(self) -> list[int]:
        """The steps in the file, in its order."""
        return [step.step for step in self._steps]

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows, in the order of their steps."""
        start, text = self.path.stat().st_size, ""
        place = self.columns.index("step")
        added = []
        for step, of_step in itertools.groupby(rows, lambda row: int(row[place])):
            lines = list(of_step)
            added.append(_Step(step, start + len(text.encode()), len(lines)))
            text += _lines(lines)
        self._write(text)
        self._steps += added

    def rewind(self, step: int) -> None:
        """Drop all later steps."""
        self._cut(next((later for later in self._steps if later.step > step), None))

    def rows_of_first_step(self) -> list[list[str]]:
        """The rows of the first step; none if there is no step."""
        if not self._steps:
            return []
        with open(self.path, newline="", encoding="utf-8") as file:
            file.seek(self._steps[0].start)
            return list(itertools.islice(csv.reader(file), self._steps[0].rows))

    def add_columns(self, names: Sequence[str]) -> None:
        """Add columns, which are empty in the rows so far."""
        new = self.path.with_name(self.path.name + ".new")
        with (
            open(self.path, newline="", encoding="utf-8") as old,
            open(new, "w", newline="", encoding="utf-8") as file,
        ):
            rows = csv.reader(old)
            file.writelines(_lines([[*next(rows), *names]]))
            file.writelines(_lines([[*row, *("" for _ in names)]]) for row in rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path)  # A kill leaves the old file or the new one.
        self.columns += names
        self._steps = self._read_steps()

    def _write(self, text: str, mode: str = "a") -> None:
        with open(self.path, mode, newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _cut(self, first: _Step | None) -> None:
        """Drop a step and all later ones; without a step, only half a line at the end."""
        if first is not None:
            os.truncate(self.path, first.start)
            del self._steps[self._steps.index(first) :]
        with open(self.path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)

    def _read_steps(self) -> list[_Step]:
        """The steps of the file, without half a line at its end."""
        place, steps = self.columns.index("step"), list[_Step]()
        with open(self.path, "rb") as file:
            start = len(file.readline())
            for line in file:
                if line.endswith(b"\n"):
                    step = int(line.split(b",", place + 1)[place])
                    if not steps or steps[-1].step != step:
                        steps.append(_Step(step, start, 0))
                    steps[-1] = steps[-1]._replace(rows=steps[-1].rows + 1)
                start += len(line)
        return steps


def header_of(path: pathlib.Path) -> list[str] | None:
    """The names of a file's columns; None if there is no file, or half a line only."""
    if not path.exists() or not path.stat().st_size:  # /dev/full has no end.
        return None
    with open(path, newline="", encoding="utf-8") as file:
        line = file.readline()
    return next(csv.reader([line])) if line.endswith("\n") else None


def _lines(rows: Iterable[Iterable[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
