"""What an optimizer will do with each parameter, before it does it."""

import collections
import dataclasses
import functools
import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.typing import DTypeLike

from orscale_jax import _checks, _sharding, _stacking
from orscale_jax._axes import MatrixAxes, MatrixBlocks
from orscale_jax._matrix import (
    PyTree,
    WeightDimensionNumbers,
    dotted,
    is_axes_leaf,
    matrix_axes,
)
from orscale_jax._placement import Sharded, plan
from orscale_jax._precision import compute_dtype

if TYPE_CHECKING:
    import rich.table

_HEADINGS = (
    "parameter", "shape", "dtype", "rule", "matrices", "m × n", "s", "‖W‖", "parameters",
    "state bytes",
)  # fmt: skip
_NAMES = 4  # Of a stack, before it is abridged.
_LEFT = 4  # Columns of words; the others are of numbers.

_Cells: TypeAlias = tuple[str, ...]


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
      shape: ``(m, n)`` of each, with ``m <= n`` where they travel; smaller ones are
        padded.
      matrices: How many a group of devices has.
      devices: How many devices a group has, over which they are distributed.
      each: How many a device takes; of the last ones some are zeros.
      sharers: How many devices share the columns of one matrix.
      bytes_sent: By each device, there and back, and inside the iteration if matrices
        are shared.
      names: Of the leaves, or of their blocks.
    """

    shape: tuple[int, int]
    matrices: int
    devices: int
    each: int
    sharers: int
    bytes_sent: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        m, n = self.shape
        where = f"over {self.devices} devices" if self.devices > 1 else "on each device"
        each = f"{self.sharers} to one" if self.sharers > 1 else f"{self.each} each"
        return (
            f"{self.matrices:,} of {m} × {n} {where}, {each}, "
            f"{self.bytes_sent:,} bytes sent: {_abridged(self.names)}"
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
            Placed(
                shape=journey.shape,
                matrices=journey.matrices,
                devices=journey.owners,
                each=journey.rounds,
                sharers=journey.sharers,
                bytes_sent=journey.bytes_sent,
                names=tuple(
                    rows[index].name
                    for index in dict.fromkeys(part.array for part in journey.parts)
                ),
            )
            for journey in plan(arrays if self.mesh else [], self.mesh, max_bytes)
        ]

    def table(self) -> "rich.table.Table":
        """The table as a ``rich.table.Table``.

        Raises:
          ImportError: If rich is not installed.
        """
        try:
            import rich.table
            import rich.text
        except ImportError as error:
            raise ImportError(
                "Description.table() needs rich: pip install orscale-jax[describe]. "
                "print(description) does without."
            ) from error
        headings, rows, totals = self._cells()
        stacks = rich.text.Text("\n".join(self._stack_lines()))
        table = rich.table.Table(caption=stacks, caption_justify="left")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify=_side(index), overflow="fold")
        for cells in (*rows, *totals):
            if totals and cells is totals[0]:
                table.add_section()
            table.add_row(*map(rich.text.Text, cells))
        return table

    def __str__(self) -> str:
        headings, rows, totals = self._cells()
        columns = zip(headings, *rows, *totals, strict=True)
        widths = [max(map(len, column)) for column in columns]
        rule = tuple("─" * width for width in widths)
        lines = [
            "  ".join(
                f"{cell:{'<' if _side(i) == 'left' else '>'}{width}}"
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ).rstrip()
            for cells in (headings, rule, *rows, rule, *totals)
        ]
        return "\n".join([*lines, "", *self._stack_lines()]).rstrip()

    def __rich__(self) -> "rich.table.Table":
        return self.table()

    def _repr_html_(self) -> str:
        headings, rows, totals = self._cells()
        return "\n".join(
            [
                "<table>",
                f"<thead>{_html_row('th', headings)}</thead>",
                *("<tbody>", *(_html_row("td", cells) for cells in rows), "</tbody>"),
                *("<tfoot>", *(_html_row("td", cells) for cells in totals), "</tfoot>"),
                "</table>",
                f"<p>{'<br>'.join(map(html.escape, self._stack_lines()))}</p>",
            ]
        )

    def _stack_lines(self) -> list[str]:
        if self.mesh:
            axes = " × ".join(f"{size} {name}" for name, size in self.mesh.items())
            return [f"Newton–Schulz on {axes}", *map(str, self.placement())]
        stacks = list(map(str, self.stacks()))
        return ["stacks for Newton–Schulz", *stacks] if stacks else []

    def _cells(self) -> tuple[_Cells, list[_Cells], list[_Cells]]:
        """Headings, rows and totals, without the columns of what is not known."""
        rows = [_row_cells(row) for row in self.rows]
        totals = [_total_cells(name, total) for name, total in self.totals.items()]
        if self.shared_bytes is None:
            totals = [cells for cells in totals if cells[0] != "shared"]
        hidden = {
            "‖W‖": all(row.norms is None for row in self.rows),
            "state bytes": self.shared_bytes is None,
        }
        shown = [not hidden.get(heading, False) for heading in _HEADINGS]

        def visible(cells: _Cells) -> _Cells:
            return tuple(itertools.compress(cells, shown))

        return visible(_HEADINGS), [*map(visible, rows)], [*map(visible, totals)]


def describe(
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    consistent_rms: float | None = 0.2,
    optimizer: optax.GradientTransformation | None = None,
) -> Description:
    r"""Tabulate which parameters are matrices, of what shape, and what each costs.

    The audit before a run: a matrix that went to AdamW, an embedding that did not, an
    expert stack taken for one matrix show here, on abstract parameters too
    (:func:`jax.eval_shape`), before anything is allocated.

    Args:
      params: The parameters, or abstract ones. None leaves and masked ones have no row.
      weight_dimension_numbers: As in :func:`orscale`; what the optimizer is given.
      consistent_rms: As in :func:`orscale`.
      optimizer: The optimizer, to add up its state: its ``init`` is traced, not run. Of
        :func:`orscale`, :func:`muon` and the ablations it is also checked that they have
        the same matrices as the table.

    Returns:
      A :class:`Description`: ``rows``, ``totals``, ``select(regex)``, and tables for
      ``print``, rich and notebooks. s is :math:`0.2 \sqrt{\max(m, n)}`, and ‖W‖ the
      smallest and the largest Frobenius norm among the matrices of a leaf.

    Raises:
      ValueError: If leaves are ambiguous (all of them are listed) or do not fit their
        dimension numbers, or the optimizer has other matrices.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import describe, orscale
      >>> params = {"up": jnp.eye(4, 16), "bias": jnp.zeros(16), "lm_head": jnp.eye(4)}
      >>> description = describe(params, optimizer=orscale(1e-3))
      >>> for row in description.rows:
      ...     print(row.path, row.rule, row.scale, row.state_bytes)
      bias adamw None 128
      lm_head adamw None 128
      up matrix 0.8 269
      >>> description.totals["all"]
      Total(leaves=3, matrices=1, parameters=96, state_bytes=529)
    """
    _checks.number("consistent_rms", consistent_rms, at_least=0, optional=True)
    axes_of = _by_path(matrix_axes(weight_dimension_numbers, params))
    leaf_of = _by_path(params)
    state: list[_StateLeaf] | None = None
    if optimizer is not None:
        state = list(_state_leaves(optimizer, params))
        _refuse_other_matrices(state, axes_of, leaf_of)
    arrays = _arrays_by_owner(state or [])
    rows = [
        row
        for path, leaf in leaf_of.items()
        for row in _rows(path, leaf, axes_of.get(path), arrays[path], consistent_rms)
    ]
    meshes = map(_mesh_shape, leaf_of.values())
    mesh = next((mesh for mesh in meshes if mesh), {})
    if state is None:
        rows = [dataclasses.replace(row, state_bytes=None) for row in rows]
        return Description(tuple(rows), mesh=mesh)
    return Description(tuple(rows), _bytes(arrays[None]), mesh)


def _by_path(tree: PyTree) -> dict[Any, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_axes_leaf)
    return {path: leaf for path, leaf in leaves if not isinstance(leaf, optax.MaskedNode)}


def _rows(
    path: Any,
    leaf: Any,
    axes: MatrixAxes | MatrixBlocks | None,
    state: list[Any],
    consistent_rms: float | None,
) -> list[ParameterRow]:
    """The row of a leaf, or one for each of its parts."""
    common: dict[str, Any] = {"path": dotted(path), "dtype": jnp.result_type(leaf)}
    if axes is None:
        return [
            ParameterRow(
                **common,
                shape=np.shape(leaf),
                rule="adamw",
                matrices=0,
                m=0,
                n=0,
                scale=None,
                norms=None,
                parameters=math.prod(np.shape(leaf)),
                state_bytes=_bytes(state),
            )
        ]

    def row(index: int, label: str) -> ParameterRow:
        part = functools.partial(axes.part, index=index)
        shaped = jax.eval_shape(part, leaf)
        m, n = axes.within.matrix_shape(shaped)
        rms = None if consistent_rms is None else float(consistent_rms)
        return ParameterRow(
            **common,
            block=label,
            shape=shaped.shape if label else leaf.shape,
            rule="matrix",
            matrices=math.prod(axes.within.batch_shape(shaped)),
            batch_shape=axes.within.batch_shape(shaped),
            m=m,
            n=n,
            scale=1.0 if rms is None else rms * max(m, n) ** 0.5,
            norms=_norms(axes.within, part, leaf),
            mesh_axes=_mesh_axes(axes, index, leaf),
            parameters=math.prod(shaped.shape),
            state_bytes=_bytes(jax.eval_shape(part, array) for array in state),
        )

    return [row(index, label) for index, label in enumerate(axes.labels)]


def _mesh_axes(
    axes: MatrixAxes | MatrixBlocks, index: int, leaf: Any
) -> tuple[tuple[str, ...], ...]:
    """As JAX itself finds them where shardings are part of types."""
    mesh = _mesh_shape(leaf)
    if not mesh:
        return ()
    explicit = AbstractMesh(
        tuple(mesh.values()), tuple(mesh), (AxisType.Explicit,) * len(mesh)
    )
    abstract = jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, leaf.sharding.spec)
    )
    found: list[tuple[tuple[str, ...], ...]] = []

    def read(leaf: jax.Array) -> None:
        matrices = axes.within.to_matrices(axes.part(leaf, index))
        found.append(_sharding.axes_of(jax.typeof(matrices).sharding.spec, matrices.ndim))

    with jax.sharding.use_abstract_mesh(explicit):
        jax.eval_shape(read, abstract)
    return found[0]


def _mesh_shape(leaf: Any) -> dict[str, int]:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return {}
    return dict(sharding.mesh.shape) if sharding.mesh.size > 1 else {}


def _norms(
    axes: MatrixAxes, part: Callable[[jax.Array], jax.Array], leaf: Any
) -> tuple[float, float] | None:
    concrete = isinstance(leaf, jax.Array | np.ndarray)
    if not concrete or isinstance(leaf, jax.core.Tracer) or not math.prod(leaf.shape):
        return None
    norms = axes.norms(part(jnp.asarray(leaf, compute_dtype(leaf))))
    return float(norms.min()), float(norms.max())


def _bytes(arrays: Iterable[Any]) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


class _StateLeaf(NamedTuple):
    """An abstract array of an optimizer's state."""

    place: Any
    owner: Any  # The path of the parameter that it belongs to, or None.
    array: Any


def _state_leaves(optimizer: Any, params: PyTree) -> Iterator[_StateLeaf]:
    """The state's arrays; a path that ends in a parameter's belongs to it.

    optax.tree.map_params would tell as well, but calls ``init`` with a placeholder that
    most label functions of :func:`optax.partition` cannot read.
    """
    if not callable(getattr(optimizer, "init", None)):
        _checks.refuse("optimizer", optimizer, "pass an Optax optimizer, or None")
    state = jax.eval_shape(optimizer.init, params)
    leaf_of = _by_path(params)
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        start = next((i for i in range(len(path) + 1) if path[i:] in leaf_of), None)
        owner = None if start is None else path[start:]
        if owner == () and array.shape != np.shape(leaf_of[()]):
            owner = None  # Every path ends in that of a tree that is one leaf.
        yield _StateLeaf(path[:start], owner, array)


def _arrays_by_owner(state: list[_StateLeaf]) -> dict[Any, list[Any]]:
    found = collections.defaultdict(list)
    for leaf in state:
        found[leaf.owner].append(leaf.array)
    return found


def _refuse_other_matrices(
    state: list[_StateLeaf], axes_of: dict[Any, Any], leaf_of: dict[Any, Any]
) -> None:
    """Refuse a state of this library whose matrices are not those of the table."""
    for place, owner, array in state:
        rule = _rule_of(place)
        if owner is None or rule is None:
            continue
        axes = axes_of.get(owner)
        theirs, ours = rule, "adamw" if axes is None else "matrix"
        if axes is not None and theirs == "matrix" and place[-1:] == (_STARTED,):
            theirs = f"matrices of batch shape {array.shape}"
            ours = f"matrices of batch shape {axes.batch_shape(leaf_of[owner])}"
        if theirs != ours:
            raise ValueError(
                f"parameter {dotted(owner)!r} is {ours} here and {theirs} in the "
                "optimizer: pass describe() the weight_dimension_numbers that the "
                "optimizer was built with."
            )


_STARTED = jax.tree_util.GetAttrKey("started")  # Of from_first_nonzero_update.


def _rule_of(place: Any) -> str | None:
    """The group of the innermost partition whose groups are named as in orscale."""
    names = [getattr(entry, "key", None) for entry in place]
    return next((name for name in reversed(names) if name in ("matrix", "adamw")), None)


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


def _row_cells(row: ParameterRow) -> _Cells:
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
    )


def _total_cells(name: str, total: Total) -> _Cells:
    leaves = "leaf" if total.leaves == 1 else "leaves"
    return (
        name,
        f"{total.leaves:,} {leaves}" if name != "shared" else "",
        *("", ""),
        f"{total.matrices:,}" if name in ("matrix", "all") else "",
        *("", "", ""),
        f"{total.parameters:,}" if name != "shared" else "",
        "" if total.state_bytes is None else f"{total.state_bytes:,}",
    )


def _side(index: int) -> Literal["left", "right"]:
    return "left" if index < _LEFT else "right"


def _html_row(tag: str, cells: _Cells) -> str:
    columns = (
        f'<{tag} style="text-align: {_side(index)}">{html.escape(cell)}</{tag}>'
        for index, cell in enumerate(cells)
    )
    return f"<tr>{''.join(columns)}</tr>"
