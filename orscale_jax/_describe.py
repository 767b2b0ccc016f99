"""What an optimizer will do with each parameter, before it does it."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from orscale_jax import _audit, _checks, _sharding
from orscale_jax._axes import LeafAxes, MatrixAxes
from orscale_jax._boxes import unbox
from orscale_jax._description import Description, ParameterRow
from orscale_jax._matrix import (
    PyTree,
    WeightDimensionNumbers,
    is_axes_leaf,
    matrix_axes,
)
from orscale_jax._names import dotted, key_name
from orscale_jax._precision import compute_dtype


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
    leaf_of = _by_path(unbox(params))
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
    axes: LeafAxes | None,
    state: list[Any],
    consistent_rms: float | None,
) -> list[ParameterRow]:
    """The row of a leaf, or one for each of its parts."""
    if axes is None:
        return [_adamw_row(path, leaf, state)]
    row = functools.partial(_matrix_row, path, leaf, axes, state, consistent_rms)
    return [row(index) for index in range(len(axes.labels))]


def _adamw_row(path: Any, leaf: Any, state: list[Any]) -> ParameterRow:
    return ParameterRow(
        path=dotted(path),
        shape=np.shape(leaf),
        dtype=jnp.result_type(leaf),
        rule="adamw",
        matrices=0,
        m=0,
        n=0,
        scale=None,
        norms=None,
        parameters=math.prod(np.shape(leaf)),
        state_bytes=_bytes(state),
    )


def _matrix_row(
    path: Any,
    leaf: Any,
    axes: LeafAxes,
    state: list[Any],
    consistent_rms: float | None,
    index: int,
) -> ParameterRow:
    part = functools.partial(axes.part, index=index)
    shaped = jax.eval_shape(part, leaf)
    batch_shape = axes.within.batch_shape(shaped)
    m, n = axes.within.matrix_shape(shaped)
    return ParameterRow(
        path=dotted(path),
        block=axes.labels[index],
        shape=shaped.shape if axes.labels[index] else leaf.shape,
        dtype=jnp.result_type(leaf),
        rule="matrix",
        matrices=math.prod(batch_shape),
        batch_shape=batch_shape,
        m=m,
        n=n,
        scale=1.0 if consistent_rms is None else float(consistent_rms) * max(m, n) ** 0.5,
        norms=_norms(axes.within, part, leaf),
        check=_audit.reasons(
            [key_name(key) for key in path], batch_shape, m, n, axes.within is not axes
        ),
        mesh_axes=_mesh_axes(axes, index, leaf),
        parameters=math.prod(shaped.shape),
        state_bytes=_bytes_of_part(axes, leaf, state, index),
    )


def _mesh_axes(axes: LeafAxes, index: int, leaf: Any) -> tuple[tuple[str, ...], ...]:
    if not _mesh_shape(leaf):
        return ()

    def matrices(leaf: jax.Array) -> jax.Array:
        return axes.within.to_matrices(axes.part(leaf, index))

    spec = _sharding.inferred(matrices, leaf, leaf.sharding.mesh)
    return _sharding.axes_of(spec, len(axes.within.batch) + 2)


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


def _bytes_of_part(axes: LeafAxes, leaf: Any, state: list[Any], index: int) -> int:
    """Of what lies like the leaf or its matrices; the first part has all the rest."""
    divided = (np.shape(leaf), axes.batch_shape(leaf))
    part = functools.partial(axes.part, index=index)
    return _bytes(
        jax.eval_shape(part, array) if array.shape in divided else array
        for array in state
        if array.shape in divided or index == 0
    )


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
    state = unbox(jax.eval_shape(optimizer.init, params))
    leaf_of = _by_path(unbox(params))
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
