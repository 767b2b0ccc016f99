"""The description of an optimizer's parameters that ``describe`` returns."""

import csv
import dataclasses
import io
import itertools
import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jax.typing import DTypeLike

from orscale_jax.audit import plans
from orscale_jax.audit.plans import Placed, Stack, StepCost
from orscale_jax.audit.rows import (
    CSV_HEADINGS,
    HEADINGS,
    WORD_COLUMNS,
    ParameterRow,
    Total,
    csv_cells,
    merged_rows,
    row_cells,
    total_cells,
    total_of,
)
from orscale_jax.audit.tables import Cells, Table
from orscale_jax.distributed.plan import MeshShape
from orscale_jax.distributed.platforms import Platform

if TYPE_CHECKING:
    import rich.table

_Entry = TypeVar("_Entry", Stack, Placed)


@dataclasses.dataclass(frozen=True)
class Description:
    """The parameters and the plan of an optimizer. ``print`` shows it as a table.

    Attributes:
      rows: One :class:`ParameterRow` per leaf, in the order of the tree (one per block of
        a leaf whose blocks have several sizes).
      shared_bytes: Bytes of optimizer state that belong to no leaf, such as counts; None
        without an optimizer.
      mesh: The lengths of the axes of the parameters' mesh; empty without a mesh.
      slices: The number of slices along each axis that crosses slow links.
      state_bytes_per_device: Bytes of optimizer state on each device of the mesh, by
        :func:`state_shardings`; None without a mesh or an optimizer, in a selection, and
        for an optimizer whose ``init`` does not run on Explicit axes.
    """

    rows: tuple[ParameterRow, ...]
    shared_bytes: int | None
    mesh: Mapping[str, int]
    slices: Mapping[str, int]
    state_bytes_per_device: int | None
    # With the iteration, dtype and limits of the user.
    _platform: Platform = dataclasses.field(repr=False)
    # All rows, even in a selection, since the plan is that of all rows.
    _planned: tuple[ParameterRow, ...] = dataclasses.field(repr=False)
    _sharding_source: str = dataclasses.field(default="", repr=False)
    _merged: bool = dataclasses.field(default=True, repr=False)

    @property
    def totals(self) -> dict[str, Total]:
        """``leaves``, ``matrices``, ``parameters`` and ``state_bytes`` of each rule.

        ``"other"`` and ``"stateless"`` are there only if rows have them. ``"shared"`` is
        the state that belongs to no leaf, ``"all"`` the sum of all.
        """
        rows_of: dict[str, list[ParameterRow]] = {"matrix": [], "adamw": []}
        for row in self.rows:
            rows_of.setdefault(row.rule, []).append(row)
        return {
            **{rule: total_of(rows) for rule, rows in rows_of.items()},
            "shared": Total(0, 0, 0, self.shared_bytes),
            "all": total_of(self.rows, self.shared_bytes or 0),
        }

    @property
    def state_bytes_per_parameter(self) -> float | None:
        """Bytes of optimizer state per entry; None without an optimizer or parameters."""
        total = self.totals["all"]
        if self.shared_bytes is None or not total.parameters:
            return None
        return (total.state_bytes or 0) / total.parameters

    def unmerged(self) -> "Description":
        """The same description, printed with a line for each leaf.

        Without it, leaves that differ only by numbers in their names have one line, such
        as ``blocks.*.up × 12``, with the sums of their matrices, parameters and bytes.
        ``rows`` and :meth:`to_csv` always have all of them.
        """
        return dataclasses.replace(self, _merged=False)

    def select(self, expression: str) -> "Description":
        """Select the rows in whose paths :func:`re.search` finds the expression.

        The plan is still that of all rows; :meth:`stacks` and :meth:`placement` then show
        those stacks that hold a selected row.
        """
        rows = tuple(row for row in self.rows if re.search(expression, row.path))
        shared_bytes = None if self.shared_bytes is None else 0
        return dataclasses.replace(
            self, rows=rows, shared_bytes=shared_bytes, state_bytes_per_device=None
        )

    def stacks(self, max_bytes: int | None = None) -> list[Stack]:
        """Which matrices go through Newton–Schulz together on one device.

        Args:
          max_bytes: Replaces the ``max_stack_bytes`` that :func:`describe` was given.

        Returns:
          The stacks, in the order of their first leaves.
        """
        platform = self._platform.with_overrides(None, max_bytes)
        return self._selected(plans.stacks(platform, self._matrices))

    def placement(
        self, max_bytes: int | None = None, dtype: DTypeLike | None = None
    ) -> list[Placed]:
        """Which devices of the mesh orthogonalize which matrices.

        Args:
          max_bytes: Replaces the ``max_stack_bytes`` that :func:`describe` was given.
          dtype: Replaces the ``ns_dtype``.

        Returns:
          The plan, in the order of the leaves; empty without a mesh.
        """
        if not self.mesh:
            return []
        platform = self._platform.with_overrides(dtype, max_bytes)
        return self._selected(plans.placement(platform, self._matrices, self._shape))

    def step_cost(
        self, max_bytes: int | None = None, dtype: DTypeLike | None = None
    ) -> StepCost | None:
        """What Newton–Schulz costs each device in one step, by the plan of the mesh.

        Args:
          max_bytes: Replaces the ``max_stack_bytes`` that :func:`describe` was given.
          dtype: Replaces the ``ns_dtype``.

        Returns:
          FLOPs, bytes over fast and slow links, and estimated times; None without a mesh.
        """
        if not self.mesh:
            return None
        platform = self._platform.with_overrides(dtype, max_bytes)
        return plans.step_cost(platform, self._matrices, self._shape)

    @property
    def _shape(self) -> MeshShape:
        return MeshShape(self.mesh, self.slices)

    @property
    def _labelled(self) -> bool:
        """Whether the column "label" is shown, also in a selection."""
        return any(row.label for row in self._planned)

    @property
    def _multiplied(self) -> bool:
        """Whether multipliers of the learning rate are shown, also in a selection."""
        return any(row.multipliers != (1, 1) for row in self._planned)

    @property
    def _matrices(self) -> list[ParameterRow]:
        return [row for row in self._planned if row.rule == "matrix"]

    def _selected(self, plan: Sequence[_Entry]) -> list[_Entry]:
        names = {row.name for row in self.rows}
        return [entry for entry in plan if not names.isdisjoint(entry.names)]

    def table(self) -> "rich.table.Table":
        """The table as a ``rich.table.Table``.

        Raises:
          ImportError: If rich is not installed.
        """
        return self._table().rich()

    def to_csv(self) -> str:
        """The rows as CSV, with the columns of the table except the norms.

        Write it to ``audit.csv`` in the folder of a run:
        ``python -m orscale_jax.diagnostics`` reads the shapes of the matrices there.
        """
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        lines = [CSV_HEADINGS, *map(csv_cells, self.rows)]
        hidden = {
            "label": not self._labelled,
            "learning_rate_multiplier": not self._multiplied,
        }
        shown = [not hidden.get(heading, False) for heading in CSV_HEADINGS]
        writer.writerows(itertools.compress(line, shown) for line in lines)
        return text.getvalue()

    def __str__(self) -> str:
        """The table as fixed-width text."""
        return self._table().text()

    def __rich__(self) -> "rich.table.Table":
        """The table for rich."""
        return self.table()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        """The table, without columns that say nothing."""
        totals = self.totals
        if self.shared_bytes is None:
            del totals["shared"]
        dtypes = {row.dtype for row in self.rows}
        matrices = [row for row in self.rows if row.rule == "matrix"]
        hidden = {
            "dtype": len(dtypes) == 1,
            "label": not self._labelled,
            "class": all(row.layer_class == "other" for row in self.rows),
            "m × n": all(row.shape == (row.m, row.n) for row in matrices),
            "η ×": not self._multiplied,
            "‖W‖": all(row.norms is None for row in self.rows),
            "state bytes": self.shared_bytes is None,
            "check": not any(row.check for row in self.rows),
        }
        shown = [not hidden.get(heading, False) for heading in HEADINGS]
        named_rows = (
            merged_rows(self.rows)
            if self._merged
            else [(row.name, row) for row in self.rows]
        )

        def visible(cells: Cells) -> Cells:
            return tuple(itertools.compress(cells, shown))

        return Table(
            headings=visible(HEADINGS),
            rows=[visible(row_cells(*named)) for named in named_rows],
            totals=[visible(total_cells(*named)) for named in totals.items()],
            notes=[*self._lines_on_all(dtypes), *self._plan_lines()],
            words=sum(shown[:WORD_COLUMNS]),
        )

    def _lines_on_all(self, dtypes: Set[np.dtype[Any]]) -> list[str]:
        lines = [f"all parameters are {dtype}" for dtype in dtypes if len(dtypes) == 1]
        each, on_device = self.state_bytes_per_parameter, self.state_bytes_per_device
        if each is not None:
            told = "" if on_device is None else f", {on_device:,} bytes per device"
            lines.append(f"state: {each:.4g} bytes per parameter{told}")
        return [*lines, ""] if lines else []

    def _plan_lines(self) -> list[str]:
        if self.mesh:
            axes = " × ".join(f"{size} {name}" for name, size in self.mesh.items())
            along = " and ".join(f"{n} along {name}" for name, n in self.slices.items())
            slices = along and f", slices: {along}"
            source = self._sharding_source and f", shardings {self._sharding_source}"
            heading = f"Newton–Schulz on {axes}{slices}{source}"
            return [heading, *map(str, self.placement()), str(self.step_cost())]
        stacks = list(map(str, self.stacks()))
        return ["stacks for Newton–Schulz", *stacks] if stacks else []
