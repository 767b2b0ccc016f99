"""A run's readings in one file, which survives being killed."""

import contextlib
import csv
import io
import itertools
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orscale_jax import validate
from orscale_jax.diagnostics.reading import Reading
from orscale_jax.diagnostics.summaries import tabulate
from orscale_jax.trees.boxes import PyTree

FILE_NAME = "history.csv"


class StepFile:
    """A CSV file of whole rows, which grows by steps.

    It drops what a killed process or a failed write left incomplete.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]):
        """Open the file, or begin it; one of the columns is called ``step``."""
        self.path, self.columns = pathlib.Path(path), list(columns)
        # The steps in the file: the place where each begins, and the number of its rows.
        self.steps: dict[int, tuple[int, int]] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # /dev/full is no file, and has no end.
        with open(self.path, "rb") if self.path.is_file() else io.BytesIO() as file:
            header = file.readline()
            lines = [line for line in file if line.endswith(b"\n")]
        self._end = 0  # The place where the last whole row ends.
        if not header.endswith(b"\n"):
            self._append(_line(self.columns), mode="wb")
            return
        if (present := next(csv.reader([header.decode()]))) != self.columns:
            raise ValueError(
                f"{self.path} has the columns {', '.join(present)}, and this run has "
                f"{', '.join(self.columns)}: pass the same columns (to a History: the "
                "same measurements and scalars), or another path."
            )
        self._end = self._count(lines, len(header))
        os.truncate(self.path, self._end)
        rows = [rows for _, rows in self.steps.values()]
        if rows and rows[-1] < rows[0]:
            self.rewind([*self.steps][-2])

    def append(self, rows: Iterable[Sequence[str]]) -> None:
        """Add rows, in the order of their steps."""
        start, lines = self._end, [*map(_line, rows)]
        self._append(b"".join(lines))
        self._count(lines, start)

    def rewind(self, step: int) -> None:
        """Drop all later steps."""
        later = [each for each in self.steps if each > step]
        if later:
            os.truncate(self.path, self.steps[later[0]][0])
            self._end = self.steps[later[0]][0]
        for each in later:
            del self.steps[each]

    def _count(self, lines: Iterable[bytes], start: int) -> int:
        """Note rows that begin at this place; where they end."""
        for line in lines:
            step = int(line.split(b",")[self.columns.index("step")])
            first, rows = self.steps.get(step, (start, 0))
            self.steps[step] = first, rows + 1
            start += len(line)
        return start

    def _append(self, rows: bytes, mode: str = "r+b") -> None:
        """Write behind the last whole row. If that fails, the file ends there again."""
        left = rows
        # Without a buffer, which would be written once more as the file is closed.
        with open(self.path, mode, buffering=0) as file:
            try:
                file.seek(self._end)
                while left:  # The system may take a part.
                    left = left[file.write(left) :]
                file.truncate()
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):  # The next row goes there anyway.
                    file.truncate(self._end)
                raise
        self._end += len(rows)


class History:
    """The readings of a run, appended to one CSV file: a row for each matrix and step.

    The columns are ``step``, ``matrix``, ``class``, the fields of :class:`Reading`, then
    ``measurements`` and ``scalars`` (the same in all rows of a step). A missing number is
    an empty field.

    When :meth:`append` returns, the step is on the disk. If a process is killed in the
    middle of a step, the next process drops this step. A run that continues from a
    checkpoint calls :meth:`rewind` with the step of the checkpoint. Only one process may
    write a file.

    Attributes:
      path: The file.
      classes: See :func:`summarize`.
      measurements: Names of columns with one number per matrix.
      scalars: Names of columns with one number per step, such as ``"loss"``.

    Raises:
      ValueError: If two columns have the same name, if a scalar is called like an
        argument of :meth:`append`, if the file has other columns, or if the file was not
        written by a History.

    Example:
      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from orscale_jax import diagnostics, orscale
      >>> params = {"up": jnp.ones((2, 8)), "down": jnp.ones((8, 2))}
      >>> reading = diagnostics.read(orscale(1e-3).init(params), params)
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> history = diagnostics.History(folder / "history.csv", scalars=["loss"])
      >>> history.append(10, reading, loss=2.5)
      >>> print(history.path.read_text().splitlines()[1])
      10,down,other,1,1,0,4,0,,1,0,0,0,0,2.5
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        classes: PyTree | None = None,
        measurements: Sequence[str] = (),
        scalars: Sequence[str] = (),
    ):
        """Open the file, or begin it."""
        for name, names in (("measurements", measurements), ("scalars", scalars)):
            if isinstance(names, str):
                validate.refuse(name, names, "pass a sequence of names")
        self.path, self.classes = pathlib.Path(path), classes
        self.measurements, self.scalars = tuple(measurements), tuple(scalars)
        extra_columns = *self.measurements, *self.scalars
        columns = ["step", "matrix", "class", *Reading._fields, *extra_columns]
        arguments = {"reading", "measurements"}.intersection(self.scalars)
        if arguments or len(set(columns)) < len(columns):
            remedy = "give each column a different name, and none of append's arguments"
            validate.refuse("measurements and scalars", extra_columns, remedy)
        self._file = StepFile(self.path, columns)

    @property
    def last_step(self) -> int | None:
        """The last step in the file; None if there is none."""
        return max(self._file.steps, default=None)

    def append(
        self,
        step: int,
        reading: Reading,
        measurements: Mapping[str, PyTree] | None = None,
        **scalars: Any,
    ) -> None:
        """Add a step. This fetches the reading, and so waits for the device.

        Args:
          step: The number of optimizer steps done, larger than the last one in the file.
          reading: From :func:`read`.
          measurements: Trees with one entry per matrix, by the name of their column.
          **scalars: Numbers of the step, by the name of their column.

        Raises:
          ValueError: If a name is not the name of a column, if the step is not a whole
            number or not after the last step, if a scalar is not a real number, or if the
            matrices are not the matrices of the file.
        """
        step, measurements = validate.whole("step", step), measurements or {}
        unknown = {*measurements} - {*self.measurements} | {*scalars} - {*self.scalars}
        if unknown:
            raise ValueError(
                f"{sorted(unknown)} are no columns of {self.path}: name them in "
                "History(measurements=..., scalars=...)."
            )
        table = tabulate(reading, self.classes, measurements)
        matrices, steps = [*map(_text, table["matrix"])], self._file.steps
        if steps and step <= max(steps):
            raise ValueError(
                f"step={step} is not after {max(steps)}, the last one in {self.path}:"
                " call rewind() if the run continues from a checkpoint."
            )
        start, rows = next(iter(steps.values()), (0, 0))
        with open(self.path, newline="", encoding="utf-8") as file:
            file.seek(start)
            known = [row[1] for row in itertools.islice(csv.reader(file), rows)]
        is_beginning = len(known) < len(matrices) and known == matrices[: len(known)]
        if len(steps) == 1 and is_beginning:
            self.rewind(min(steps) - 1)  # A process was killed as it wrote the step.
        elif known and known != matrices:
            pairs = itertools.zip_longest(matrices, known)
            new, old = next((new, old) for new, old in pairs if new != old)
            raise ValueError(
                f"the reading has {len(matrices)} matrices, and {self.path} has {rows}; "
                f"the first to differ is {new!r} here and {old!r} there: pass another "
                "path for another model."
            )
        columns: dict[str, Any] = {**table, "step": [step] * len(matrices)}
        for name, value in jax.device_get(scalars).items():
            array = np.asarray(value)
            real = array.dtype == bool or validate.is_real(array.dtype)
            if array.size != 1 or not real:
                validate.refuse(name, value, "pass a real number")
            columns[name] = [array.reshape(())[()]] * len(matrices)
        missing = [""] * len(matrices)
        ordered = (columns.get(name, missing) for name in self._file.columns)
        self._file.append([*map(_text, row)] for row in zip(*ordered, strict=True))

    def rewind(self, step: int) -> None:
        """Drop all later steps, for a run that continues from this one."""
        self._file.rewind(step)


def _text(value: Any) -> str:
    """A name, or a number: whole as it is, of Python with 15 digits, of arrays with 7."""
    if isinstance(value, str):
        return value.replace("\n", r"\n")  # A row is one line.
    if np.asarray(value).dtype.kind in "biu":
        return str(int(value))
    return f"{float(value):.{15 if isinstance(value, float) else 7}g}"


def _line(row: Iterable[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(row)
    return text.getvalue().encode()
