"""Maps over the leaves of matrices, and arrays with one entry for each matrix."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from orscale_jax.distributed.reductions import Reduction, reduce_all
from orscale_jax.parameters.axes import square_root
from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    is_axes_leaf,
    require_matrices,
)
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.fusion import in_stacks
from orscale_jax.trees.boxes import PyTree, box_like, on_bare_arrays, unbox
from orscale_jax.trees.names import name_and_shape


def map_matrices(fn: Callable[..., Any], axes_tree: PyTree, *trees: PyTree) -> PyTree:
    """Apply ``fn(axes, *leaves)`` to the leaves of matrices; keep the others."""

    def at(axes: Any, *leaves: Any) -> Any:
        if isinstance(axes, optax.MaskedNode):
            return leaves[0]
        # NumPy's arrays may have dtypes that JAX's do not.
        return fn(axes, *map(jnp.asarray, leaves))

    return jax.tree.map(at, axes_tree, *trees, is_leaf=is_axes_leaf)


@dataclasses.dataclass(frozen=True, eq=False)
class _Unreduced:
    """An array, and the axes along which it is to be reduced; a leaf to JAX."""

    array: jax.Array
    axes: tuple[int, ...]


def reduce_matrices(fn: Reduction, axes_tree: PyTree, tree: PyTree) -> PyTree:
    """``axes.reduce(fn, leaf)`` of the leaves of matrices; GPUs finish them together."""

    def split(axes: LeafAxes, leaf: jax.Array) -> Any:
        if len(axes.labels) > 1:
            return axes.reduce(fn, leaf)
        return _Unreduced(axes.part(leaf, 0), axes.within.matrix)

    leaves, structure = jax.tree.flatten(map_matrices(split, axes_tree, tree))
    found = [leaf for leaf in leaves if isinstance(leaf, _Unreduced)]
    reduced = reduce_all(fn, [x.array for x in found], [x.axes for x in found])
    results = iter(reduced)
    done = (next(results) if isinstance(x, _Unreduced) else x for x in leaves)
    return jax.tree.unflatten(structure, done)


def matrix_norms(axes_tree: PyTree, tree: PyTree) -> PyTree:
    """Frobenius norm of every matrix, of the batch shapes, in the leaves' dtypes."""
    squares = map_matrices(lambda _, leaf: jnp.square(leaf), axes_tree, tree)
    sums = in_stacks(reduce_matrices(jnp.sum, axes_tree, squares))
    return map_matrices(lambda _, x: square_root(x), axes_tree, sums)


def per_matrix_stage(
    fn: Callable[[LeafAxes, jax.Array], jax.Array],
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    """A stateless transformation that applies ``fn(axes, leaf)`` to the matrices."""

    def init(params: PyTree) -> optax.EmptyState:
        require_matrices(weight_dimension_numbers, params)
        return optax.EmptyState()

    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.EmptyState]:
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        return map_matrices(fn, axes_tree, updates), state

    return on_bare_arrays(optax.GradientTransformation(init, update))


def spread(axes: LeafAxes, scalars: jax.Array, leaf: jax.Array) -> jax.Array:
    """Reshape one scalar per matrix to broadcast against a leaf, sharded as the leaf."""
    spread = axes.per_matrix(scalars)
    like = zip(spread.shape, leaf.shape, typed_sharding.spec(leaf), strict=True)
    entries = [entry if size == full else None for size, full, entry in like]
    return typed_sharding.shard_as(spread, leaf, entries)


def full_per_matrix(
    weight_dimension_numbers: WeightDimensionNumbers,
    params: PyTree,
    value: float,
    dtype: Callable[[jax.Array], DTypeLike],
) -> PyTree:
    """Arrays with one ``value`` per matrix, sharded and boxed as the batch axes are."""

    def full(axes: LeafAxes, leaf: jax.Array) -> jax.Array:
        return jnp.full(axes.batch_shape(leaf), value, dtype(leaf))

    return init_per_matrix(weight_dimension_numbers, params, full)


def require_per_matrix(entries: PyTree, axes_tree: PyTree, tree: PyTree) -> None:
    """Refuse arrays of a state that JAX would broadcast to one entry per matrix.

    Raises:
      ValueError: If an array does not have the batch shape of its leaf.
    """

    def check(path: Any, axes: Any, leaf: Any, array: Any) -> None:
        if isinstance(axes, optax.MaskedNode):
            return
        wanted = axes.batch_shape(leaf)
        if np.shape(array) != wanted:
            raise ValueError(
                f"the state has an array of shape {np.shape(array)} for parameter "
                f"{name_and_shape(path, leaf)} instead of {wanted}: pass the state of "
                "these parameters, or start anew with init."
            )

    jax.tree_util.tree_map_with_path(
        check, axes_tree, tree, entries, is_leaf=is_axes_leaf
    )


def init_per_matrix(
    weight_dimension_numbers: WeightDimensionNumbers,
    params: PyTree,
    fn: Callable[[LeafAxes, jax.Array], jax.Array],
) -> PyTree:
    """Arrays ``fn(axes, leaf)`` of the batch shape, sharded and boxed as its axes are."""

    def make(axes: Any, node: Any) -> Any:
        if isinstance(axes, optax.MaskedNode):
            return axes
        leaf = jnp.asarray(unbox(node))
        made = typed_sharding.shard_as(fn(axes, leaf), leaf, axes.batch_sharding(leaf))
        return box_like(made, node, axes.of_batch)

    # optax.tree.map_params initializes with a placeholder. One array instead of a tree
    # tells it that these arrays do not have the parameters' shapes.
    if type(params).__name__ == "_ParamsPlaceholder":
        return jnp.ones(())
    axes_tree = require_matrices(weight_dimension_numbers, params)
    return jax.tree.map(make, axes_tree, params, is_leaf=is_axes_leaf)
