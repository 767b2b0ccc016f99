"""The rows of a description, and their sums."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from orscale_jax.audit.merging import counted, merged
from orscale_jax.audit.state_trees import Rule
from orscale_jax.audit.tables import Cells

HEADINGS = (
    "parameter", "shape", "dtype", "rule", "check", "label", "class", "matrices", "m × n",
    "s", "η ×", "‖W‖", "parameters", "state bytes",
)  # fmt: skip
CSV_HEADINGS = (
    "parameter", "shape", "dtype", "rule", "label", "class", "matrices", "m", "n", "s",
    "learning_rate_multiplier", "parameters", "state_bytes", "check",
)  # fmt: skip
WORD_COLUMNS = 7  # The first columns hold words, the others numbers.


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """One leaf of the parameters, or one of its blocks where these have several sizes.

    Attributes:
      path: The leaf's path, with dots.
      shape: Its shape, or that of the block.
      dtype: Its dtype.
      rule: ``"matrix"`` or ``"adamw"``, for the branches of this library's optimizers;
        with ``optimizer=`` also ``"other"``, another optimizer, and ``"stateless"``, none
        that keeps a state for it: :func:`optax.set_to_zero`, which freezes it, plain
        :func:`optax.sgd`, or none at all outside of :func:`optax.masked`, which passes
        the gradient on as the update.
      matrices: How many matrices it holds; 0 for other rules, as for ``m`` and ``n``.
      m: Rows of each matrix.
      n: Columns of each matrix.
      scale: The factor s of Q; None for other rules.
      norms: Smallest and largest Frobenius norm of its matrices; None if it has no
        matrices, or no values (abstract, empty, or sharded over several processes).
      parameters: The number of its entries.
      state_bytes: Bytes of optimizer state that belong to it; None without an optimizer.
      block: Where in the leaf the block lies, such as ``[:, 768:1024]``; empty for a
        whole leaf.
      batch_shape: The batch shape of its matrices, such as layers × experts.
      check: Reasons to look at this leaf: it is named like a fused projection, a router,
        a table or a head; one side is at least 16 times as long as the other; or a batch
        axis has length 1. Empty if there are none.
      mesh_axes: For each axis of its matrices ``(*batch, m, n)``, the axes of the mesh
        that it is sharded over; empty without a mesh and for other rules.
      layer_class: The class of its layer, such as "attention key", by its name:
        :func:`orscale_jax.diagnostics.layer_classes`.
      label: Its label in :func:`optax.partition`, such as ``"frozen"``; those of nested
        partitions are joined by ``/``. If several groups keep no state, the state does
        not tell which of them has a parameter: ``"frozen or sgd"``. Empty without a
        partition, and without an optimizer.
      multipliers: The smallest and the largest multiplier of its learning rate
        (``learning_rate_multipliers`` of :func:`orscale`); they differ if layers of a
        stack have their own. 1 without an optimizer.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rule: Rule
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
    layer_class: str = "other"
    label: str = ""
    multipliers: tuple[float, float] = (1.0, 1.0)

    @property
    def name(self) -> str:
        """Path and block, as the table shows them."""
        return (self.path or "(the only leaf)") + self.block


@dataclasses.dataclass(frozen=True)
class Total:
    """Sums over rows; ``state_bytes`` is None without an optimizer."""

    leaves: int
    matrices: int
    parameters: int
    state_bytes: int | None


def total_of(rows: Iterable[ParameterRow], shared_bytes: int = 0) -> Total:
    """The sums over some rows, and bytes that belong to none."""
    rows = list(rows)
    state_bytes = [row.state_bytes for row in rows if row.state_bytes is not None]
    known = len(state_bytes) == len(rows)
    return Total(
        leaves=len({row.path for row in rows}),
        matrices=sum(row.matrices for row in rows),
        parameters=sum(row.parameters for row in rows),
        state_bytes=sum(state_bytes) + shared_bytes if known else None,
    )


def merged_rows(rows: Sequence[ParameterRow]) -> list[tuple[str, ParameterRow]]:
    """The rows with names; those that differ only by numbers in their paths as one row.

    Its matrices, parameters and bytes are the sums, its norms the extremes.
    """
    keys = [dataclasses.replace(row, path="", norms=None) for row in rows]
    return [
        (counted(name, len(members)), _sum([rows[index] for index in members]))
        for name, members in merged([row.name for row in rows], keys)
    ]


def _sum(rows: Sequence[ParameterRow]) -> ParameterRow:
    norms = [norm for row in rows for norm in row.norms or ()]
    total = total_of(rows)
    return dataclasses.replace(
        rows[0],
        matrices=total.matrices,
        # NumPy's, so that no NaN is lost.
        norms=(float(np.min(norms)), float(np.max(norms))) if norms else None,
        parameters=total.parameters,
        state_bytes=total.state_bytes,
    )


def row_cells(name: str, row: ParameterRow) -> Cells:
    """The cells of a row, one for each heading."""
    return (
        name,
        str(row.shape),
        str(row.dtype),
        row.rule,
        ", ".join(row.check),
        row.label,
        row.layer_class,
        f"{row.matrices:,}" if row.scale is not None else "",
        f"{row.m} × {row.n}" if row.scale is not None else "",
        f"{row.scale:.4g}" if row.scale is not None else "",
        _range(row.multipliers),
        _range(row.norms or ()),
        f"{row.parameters:,}",
        "" if row.state_bytes is None else f"{row.state_bytes:,}",
    )


def csv_cells(row: ParameterRow) -> tuple[Any, ...]:
    """The cells of a row in a CSV file, one for each heading there."""
    return (
        row.name,
        row.shape,
        row.dtype,
        row.rule,
        row.label,
        row.layer_class,
        row.matrices,
        *(("", "", "") if row.scale is None else (row.m, row.n, f"{row.scale:.7g}")),
        _range(row.multipliers),
        row.parameters,
        row.state_bytes,
        ", ".join(row.check),
    )


def _range(values: Iterable[float]) -> str:
    return " … ".join(dict.fromkeys(f"{value:.4g}" for value in values))


def total_cells(name: str, total: Total) -> Cells:
    """The cells of a sum, one for each heading."""
    leaves = "leaf" if total.leaves == 1 else "leaves"
    return (
        name,
        f"{total.leaves:,} {leaves}" if name != "shared" else "",
        *("", "", "", "", ""),
        f"{total.matrices:,}" if name in ("matrix", "all") else "",
        *("", "", "", ""),
        f"{total.parameters:,}" if name != "shared" else "",
        "" if total.state_bytes is None else f"{total.state_bytes:,}",
    )
