"""A run's readings in one file, which survives being killed."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from orscale_jax import _checks
from orscale_jax.diagnostics.readouts.reading import Reading
from orscale_jax.diagnostics.readouts.step_file import StepFile, header_of
from orscale_jax.diagnostics.readouts.tabulate import tabulate
from orscale_jax.trees.boxes import PyTree

if TYPE_CHECKING:
    import pandas

    from orscale_jax.diagnostics.theory.step_gain import StepGain

FILE_NAME = "history.csv"
_FIRST = ("step", "matrix", "class", *Reading._fields)
# κ along the step and its standard error, from the first append with ``gained`` on.
_GAINED = ("kappa_step", "kappa_step_stderr")


class History:
    """The readings of a run, appended to one CSV file: a row for each matrix and step.

    The columns are ``step``, ``matrix``, ``class``, the fields of :class:`Reading`, then
    ``measurements`` (one number per matrix, at the steps at which they are taken) and
    ``scalars`` (one number per step, in all its rows). The first :meth:`append` with
    ``gained`` adds the columns ``kappa_step`` and ``kappa_step_stderr``. A missing number
    is an empty field. :func:`pandas.read_csv` reads the file. If it is called
    ``history.csv``, ``python -m orscale_jax.diagnostics`` makes a report of its folder.

    A step is on the disk when :meth:`append` returns. If a process is killed while it
    writes, the next one drops the incomplete step. A run that continues from a checkpoint
    calls :meth:`rewind` with the checkpoint's step. Only one process may write a file.

    Attributes:
      path: The file.
      classes: See :func:`summarize`.
      measurements: Names of columns with one number per matrix.
      scalars: Names of columns with one number per step, such as ``"loss"``.

    Raises:
      ValueError: If two columns have the same name, the file has other columns, or it was
        not written by a History.

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
        for name, given in (("measurements", measurements), ("scalars", scalars)):
            if isinstance(given, str):
                _checks.refuse(name, given, "pass a sequence of names")
        self.path, self.classes = pathlib.Path(path), classes
        self.measurements, self.scalars = tuple(measurements), tuple(scalars)
        columns = [*_FIRST, *self.measurements, *self.scalars]
        if len(set(columns)) < len(columns):
            _checks.refuse(
                "measurements and scalars",
                (*self.measurements, *self.scalars),
                "give each column a different name",
            )
        gained = [*columns, *(name for name in _GAINED if name not in columns)]
        self._file = StepFile(
            self.path, gained if header_of(self.path) == gained else columns
        )

    @property
    def last_step(self) -> int | None:
        """The last step in the file; None if there is none."""
        return max(self._file.steps, default=None)

    def append(
        self,
        step: int,
        reading: Reading,
        measurements: Mapping[str, PyTree] | None = None,
        *,
        gained: "StepGain | None" = None,
        **scalars: Any,
    ) -> None:
        """Add a step. This fetches the reading, and so waits for the device.

        Args:
          step: The number of optimizer steps done, larger than the last one in the file.
          reading: From :func:`read`.
          measurements: Trees with one entry per matrix, by the name of their column.
          gained: From :func:`step_gain`, for the verdict of the report.
          **scalars: Numbers of the step, by the name of their column.

        Raises:
          ValueError: If a name is no column, the step is no whole number or not after the
            last one, a scalar is no real number, or the matrices are not those of the
            file.
        """
        step = _checks.whole("step", step)
        unknown = ({*(measurements or {})} - {*self.measurements}) | (
            {*scalars} - {*self.scalars}
        )
        if unknown:
            raise ValueError(
                f"{sorted(unknown)} are no columns of {self.path}: name them in "
                "History(measurements=..., scalars=...)."
            )
        table = tabulate(reading, self.classes, measurements)
        self._require_next(step, list(table["matrix"]))
        if gained is not None:
            scalars |= self._columns_of(gained, scalars)
        count = len(table["matrix"])
        fetched = jax.device_get(scalars)
        given = {name: [_number(name, x)] * count for name, x in fetched.items()}
        given["step"] = [str(step)] * count
        columns = [
            given.get(name) or [_text(x) for x in table.get(name, [""] * count)]
            for name in self._file.columns
        ]
        self._file.append(zip(*columns, strict=True))

    def rewind(self, step: int) -> None:
        """Drop all later steps, for a run that continues from this one."""
        self._file.rewind(step)

    def frame(self) -> "pandas.DataFrame":
        """The file as a data frame of pandas."""
        import pandas

        frame = pandas.read_csv(self.path)
        # Parameters may be called "NA", and a lone one has an empty name.
        texts = pandas.read_csv(
            self.path, usecols=["matrix", "class"], dtype=str, keep_default_na=False
        )
        return frame.assign(**texts)

    def _columns_of(
        self, gained: "StepGain", scalars: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The numbers of a gain by column, which the file may not have yet."""
        if not hasattr(gained, "kappa") or scalars.keys() & {*_GAINED}:
            _checks.refuse("gained", gained, "pass what step_gain() returned, once")
        if added := [name for name in _GAINED if name not in self._file.columns]:
            self._file.add_columns(added)
        return dict(zip(_GAINED, gained.kappa, strict=True))

    def _require_next(self, step: int, matrices: list[str]) -> None:
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"step={step} is not after {self.last_step}, the last one in {self.path}:"
                " call rewind() if the run continues from a checkpoint."
            )
        steps = self._file.steps
        known = [row[1] for row in self._file.rows_of_first_step()]
        if len(steps) == 1 and known == matrices[: len(known)] != matrices:
            self.rewind(steps[0] - 1)  # A process was killed as it wrote the step.
        elif known and known != matrices:
            raise ValueError(
                f"the reading has {len(matrices)} matrices, and {self.path} has "
                f"{len(known)}, or other names: pass another path for another model."
            )


def _number(name: str, value: Any) -> str:
    """A scalar of the user's in the form that it has in the file."""
    array = np.asarray(value)
    if array.size != 1 or not (array.dtype == bool or _checks.is_real(array.dtype)):
        _checks.refuse(name, value, "pass a real number")
    return _text(array.reshape(())[()])


def _text(value: Any) -> str:
    """A name, or a number: whole as it is, of Python with 15 digits, of arrays with 7."""
    if isinstance(value, str):
        return value
    if np.asarray(value).dtype.kind in "biu":
        return str(int(value))
    return f"{float(value):.{15 if isinstance(value, float) else 7}g}"
