"""What is said of the parameters, and of the matrices that are handled together."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from orscale_jax import _stacking
from orscale_jax._placement import Journey, Sharded, plan
from orscale_jax._precision import compute_dtype
from orscale_jax._tables import Cells, Table

if TYPE_CHECKING:
    import rich.table

_HEADINGS = (
    "parameter", "shape", "dtype", "rule", "matrices", "m × n", "s", "‖W‖", "parameters",
    "state bytes", "check",
)  # fmt: skip
_WORDS = 4  # Columns of words; the others are of numbers.
_NAMES = 4  # Of a stack, before it is abridged.


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """One leaf of the parameters, or one of its blocks where these have several sizes.

    Attributes:
      path: The leaf's path, with dots.
      shape: Its shape; the block's, of a block.
      dtype: Its dtype.
      rule: ``"matrix"`` or ``"adamw"``.
      matrices: How many matrices it holds; 0 under AdamW, as for ``m`` and ``n``.
      m: Rows of each matrix.
      n: Columns of each matrix.
      scale: The factor s of Q; None under AdamW.
      norms: Least and largest Frobenius norm of its matrices; None where there are no
        matrices or no values.
      parameters: The number of its entries.
      state_bytes: Bytes of optimizer state that belong to it; None without optimizer.
      block: Where in the leaf the block lies, such as ``[:, 768:1024]``; empty for a
        whole leaf.
      batch_shape: How its matrices are counted, such as layers × experts.
      check: Why a careful person would look at this leaf: it is named like a fused
        projection, a router, a table or a head, one side is 16 times as long as the
        other or more, or an axis of length 1 counts matrices. Empty where nothing is odd.
      mesh_axes: For each axis of its matrices ``(*batch, m, n)``, the axes of the mesh
        that it is sharded over; empty off a mesh and under AdamW.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rule: Literal["matrix", "adamw"]
    matrices: int
    m: int
    n: int
    scale: float | None
    norms: tuple[float, float] | None
    parameters: int
    state_bytes: int | None
    block: str = ""
    batch_shape: tuple[int, ...] = ()
    mesh_axes: tuple[tuple[str, ...], ...] = ()
    check: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Path and block, as the table shows them."""
        return (self.path or "(the only leaf)") + self.block


class Stack(NamedTuple):
    """Matrices that go through Newton–Schulz together.

    Attributes:
      shape: ``(leaves, *batch, m, n)`` with ``m <= n``: tall matrices are transposed.
      names: Of the leaves, or of their blocks.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        *counts, m, n = self.shape
        return f"{math.prod(counts):,} of {m} × {n}: {_abridged(self.names)}"


class Placed(NamedTuple):
    """Matrices that go through Newton–Schulz together on a mesh.

    The devices form groups, and each group has matrices of its own (experts that are
    sharded over experts) or all of them.

    Attributes:
      shape: ``(m, n)`` of each that is not shared, or of each if all are; with
        ``m <= n`` where they travel. Smaller ones are padded.
      matrices: How many a group of devices has.
      devices: How many devices a group has, over which they are distributed.
      each: How many a device takes; of the last ones some are zeros.
      sharers: How many devices share the columns of one matrix, where any do.
      shared: How many of the matrices are shared. Where others are not, a device has as
        many columns of them as ``shape`` says.
      bytes_sent: By each device, there and back, and inside the iteration if matrices
        are shared.
      names: Of the leaves, or of their blocks.
    """

    shape: tuple[int, int]
    matrices: int
    devices: int
    each: int
    sharers: int
    shared: int
    bytes_sent: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        m, n = self.shape
        where = f"over {self.devices} devices" if self.devices > 1 else "on each device"
        whole = self.matrices - self.shared
        kinds = [
            (whole, n, f"{self.each} each"),
            (self.shared, n * self.sharers if whole else n, f"{self.sharers} to one"),
        ]
        found = [kind for kind in kinds if kind[0]]
        matrices = " and ".join(f"{count:,} of {m} × {n}" for count, n, _ in found)
        each = " or ".join(each for *_, each in found)
        return (
            f"{matrices} {where}, {each}, {self.bytes_sent:,} bytes sent: "
            f"{_abridged(self.names)}"
        )


def _abridged(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more:,} more" if more > 0 else "")


@dataclasses.dataclass(frozen=True)
class Total:
    """Sums over rows; ``state_bytes`` is None without optimizer."""

    leaves: int
    matrices: int
    parameters: int
    state_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Description:
    """What :func:`describe` found. ``print`` shows it as a table.

    Attributes:
      rows: One :class:`ParameterRow` per leaf, in the order of the tree (one per block of
        a leaf whose blocks have several sizes).
      shared_bytes: Bytes of optimizer state that belong to no leaf, such as counts; None
        without optimizer.
      mesh: The lengths of the axes of the parameters' mesh; empty off a mesh.
    """

    rows: tuple[ParameterRow, ...]
    shared_bytes: int | None = None
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def totals(self) -> dict[str, Total]:
        """``leaves``, ``matrices``, ``parameters`` and ``state_bytes`` of each rule.

        Under ``"shared"`` stands the state that belongs to no leaf, under ``"all"`` the
        sum of everything.
        """
        return {
            "matrix": _total(row for row in self.rows if row.rule == "matrix"),
            "adamw": _total(row for row in self.rows if row.rule == "adamw"),
            "shared": Total(0, 0, 0, self.shared_bytes),
            "all": _total(self.rows, self.shared_bytes or 0),
        }

    def select(self, expression: str) -> "Description":
        """The rows in whose paths :func:`re.search` finds the expression, alone."""
        rows = tuple(row for row in self.rows if re.search(expression, row.path))
        return Description(rows, None if self.shared_bytes is None else 0, self.mesh)

    def stacks(self, max_bytes: int = _stacking.MAX_BYTES) -> list[Stack]:
        """Which matrices go through Newton–Schulz together.

        Args:
          max_bytes: As ``max_stack_bytes`` of :func:`orthogonalize`. The default is that
            of GPUs; TPUs have 16 MiB, CPUs at most 32 leaves in 256.

        Returns:
          The stacks, in the order of their first leaves.
        """
        rows = [row for row in self.rows if row.rule == "matrix"]
        kinds = [
            _stacking.Kind(
                (*row.batch_shape, *sorted((row.m, row.n))),
                compute_dtype(jax.ShapeDtypeStruct((), row.dtype)),
            )
            for row in rows
        ]
        return [
            Stack(
                (len(members), *kinds[members[0]].shape),
                tuple(rows[index].name for index in members),
            )
            for members in _stacking.plan(kinds, max_bytes)
        ]

    def placement(
        self,
        max_bytes: int = _stacking.MAX_BYTES,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> list[Placed]:
        """Which devices of the mesh orthogonalize which matrices.

        With ``ns_preconditioning="aol"``, square matrices do not travel as transposes.

        Args:
          max_bytes: As for :meth:`stacks`.
          dtype: In which the matrices are sent, ``ns_dtype`` of :func:`orscale`.

        Returns:
          The plan, in the order of the leaves; empty off a mesh.
        """
        rows = [row for row in self.rows if row.rule == "matrix"]
        shapes = [(*row.batch_shape, row.m, row.n) for row in rows]
        arrays = [
            Sharded(shape, jnp.dtype(dtype), row.mesh_axes or ((),) * len(shape))
            for row, shape in zip(rows, shapes, strict=True)
        ]
        return [
            _placed(journey, rows)
            for journey in plan(arrays if self.mesh else [], self.mesh, max_bytes)
        ]

    def table(self) -> "rich.table.Table":
        """The table as a ``rich.table.Table``.

        Raises:
          ImportError: If rich is not installed.
        """
        return self._table().rich()

    def __str__(self) -> str:
        return self._table().text()

    def __rich__(self) -> "rich.table.Table":
        return self.table()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        """Without the columns of what is not known."""
        totals = self.totals
        if self.shared_bytes is None:
            del totals["shared"]
        hidden = {
            "‖W‖": all(row.norms is None for row in self.rows),
            "state bytes": self.shared_bytes is None,
            "check": not any(row.check for row in self.rows),
        }
        shown = [not hidden.get(heading, False) for heading in _HEADINGS]

        def visible(cells: Cells) -> Cells:
            return tuple(itertools.compress(cells, shown))

        return Table(
            headings=visible(_HEADINGS),
            rows=[visible(_row_cells(row)) for row in self.rows],
            totals=[visible(_total_cells(*named)) for named in totals.items()],
            notes=self._stack_lines(),
            words=_WORDS,
        )

    def _stack_lines(self) -> list[str]:
        if self.mesh:
            axes = " × ".join(f"{size} {name}" for name, size in self.mesh.items())
            return [f"Newton–Schulz on {axes}", *map(str, self.placement())]
        stacks = list(map(str, self.stacks()))
        return ["stacks for Newton–Schulz", *stacks] if stacks else []


def _total(rows: Iterable[ParameterRow], shared_bytes: int = 0) -> Total:
    rows = list(rows)
    found = [row.state_bytes for row in rows if row.state_bytes is not None]
    known = len(found) == len(rows)
    return Total(
        leaves=len({row.path for row in rows}),
        matrices=sum(row.matrices for row in rows),
        parameters=sum(row.parameters for row in rows),
        state_bytes=sum(found) + shared_bytes if known else None,
    )


def _placed(journey: Journey, rows: Sequence[ParameterRow]) -> Placed:
    m, n = journey.shape
    legs = [leg for leg in journey.legs if leg.sharers > 1]
    all_shared = len(legs) == len(journey.legs)
    return Placed(
        shape=(m, n * journey.sharers if all_shared else n),
        matrices=journey.matrices,
        devices=journey.owners,
        each=journey.rounds,
        sharers=journey.sharers,
        shared=sum(leg.matrices for leg in legs),
        bytes_sent=journey.bytes_sent,
        names=tuple(
            rows[index].name
            for index in dict.fromkeys(part.array for part in journey.parts)
        ),
    )


def _row_cells(row: ParameterRow) -> Cells:
    return (
        row.name,
        str(row.shape),
        str(row.dtype),
        row.rule,
        f"{row.matrices:,}" if row.scale is not None else "",
        f"{row.m} × {row.n}" if row.scale is not None else "",
        f"{row.scale:.4g}" if row.scale is not None else "",
        " … ".join(dict.fromkeys(f"{norm:.4g}" for norm in row.norms or ())),
        f"{row.parameters:,}",
        "" if row.state_bytes is None else f"{row.state_bytes:,}",
        ", ".join(row.check),
    )


def _total_cells(name: str, total: Total) -> Cells:
    leaves = "leaf" if total.leaves == 1 else "leaves"
    return (
        name,
        f"{total.leaves:,} {leaves}" if name != "shared" else "",
        *("", ""),
        f"{total.matrices:,}" if name in ("matrix", "all") else "",
        *("", "", ""),
        f"{total.parameters:,}" if name != "shared" else "",
        "" if total.state_bytes is None else f"{total.state_bytes:,}",
        "",
    )
