"""The leaves of matrices in a tree, as a list, and trees with one entry per matrix."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax.parameters.blocks import LeafAxes, MatrixBlocks
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    is_axes_leaf,
    matrix_axes,
)
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.trees.boxes import PyTree, rebox, unbox
from orscale_jax.trees.names import name_and_shape


@dataclasses.dataclass(frozen=True)
class MatrixLeaves:
    """Which leaves of a tree hold matrices. Hashable.

    Attributes:
      axes: For each leaf of the tree without boxes, in order: its axes, or None.
    """

    axes: tuple[LeafAxes | None, ...]

    @property
    def of_matrices(self) -> list[LeafAxes]:
        """The axes of the leaves of matrices."""
        return [axes for axes in self.axes if axes is not None]

    def tree(self, params: PyTree) -> PyTree:
        """The axes as a tree like the parameters, masked where there are none.

        Raises:
          ValueError: If the parameters have another number of leaves.
        """
        structure: Any = jax.tree.structure(unbox(params))
        if structure.num_leaves != len(self.axes):
            raise ValueError(
                f"params has {structure.num_leaves} leaves, but the reading is of "
                f"parameters with {len(self.axes)}: pass those that read() was given."
            )
        masked = (optax.MaskedNode() if axes is None else axes for axes in self.axes)
        return jax.tree.unflatten(structure, masked)

    def pick(self, tree: PyTree) -> list[jax.Array]:
        """The leaves of matrices of a tree like the parameters."""
        pairs = zip(self.axes, jax.tree.leaves(unbox(tree)), strict=True)
        return [jnp.asarray(leaf) for axes, leaf in pairs if axes is not None]

    def put(self, leaves: Sequence[jax.Array], tree: PyTree) -> PyTree:
        """The tree with other leaves of matrices."""
        new = iter(leaves)
        old, structure = jax.tree.flatten(unbox(tree))
        pairs = zip(self.axes, old, strict=True)
        both = [leaf if axes is None else next(new) for axes, leaf in pairs]
        return rebox(jax.tree.unflatten(structure, both), tree)

    def parts(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The matrices of all leaves, one array of shape (*batch, m, n) per part.

        Singular values need whole matrices, so matrices on Explicit axes are gathered.
        """
        return [
            typed_sharding.gather(part, (part.ndim - 2, part.ndim - 1))
            for axes, leaf in zip(self.of_matrices, leaves, strict=True)
            for part in axes.matrices(leaf.astype(compute_dtype(leaf)))
        ]

    def from_parts(self, scalars: Sequence[jax.Array]) -> list[jax.Array]:
        """One entry per matrix: arrays of the leaves' batch shapes, from the parts'."""
        remaining = iter(scalars)
        return [
            _stacked(axes, [next(remaining) for _ in axes.labels])
            for axes in self.of_matrices
        ]


def matrix_leaves(
    weight_dimension_numbers: WeightDimensionNumbers, params: PyTree
) -> tuple[PyTree, MatrixLeaves]:
    """The tree of axes, and the leaves of matrices."""
    tree = matrix_axes(weight_dimension_numbers, params)
    leaves = jax.tree.leaves(tree, is_leaf=is_axes_leaf)
    axes = (None if isinstance(leaf, optax.MaskedNode) else leaf for leaf in leaves)
    return tree, MatrixLeaves(tuple(axes))


def tree_of(axes_tree: PyTree, leaves: Sequence[Any]) -> PyTree:
    """The entries of the leaves of matrices as a tree, masked where others are."""
    new = iter(leaves)
    return jax.tree.map(
        lambda axes: axes if isinstance(axes, optax.MaskedNode) else next(new),
        axes_tree,
        is_leaf=is_axes_leaf,
    )


def require_like(
    argument: str, axes_tree: PyTree, tree: PyTree, params: PyTree
) -> list[Any]:
    """The leaves of a tree where the parameters are matrices; others may be anything.

    Raises:
      ValueError: If the tree has another structure than the parameters, or other shapes.
    """
    entries = []

    def note(path: Any, axes: Any, given: Any, param: Any) -> None:
        if not isinstance(axes, optax.MaskedNode):
            entries.append((path, given, param))

    try:
        jax.tree_util.tree_map_with_path(
            note, axes_tree, unbox(tree), unbox(params), is_leaf=is_axes_leaf
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{argument} must be a tree of the parameters' structure: {error}"
        ) from error
    for path, given, param in entries:
        if not _is_array(given) or np.shape(given) != np.shape(param):
            found = f"shape {np.shape(given)}" if _is_array(given) else repr(given)
            raise ValueError(
                f"{argument} has {found} for parameter {name_and_shape(path, param)}: "
                "pass a tree of arrays like the parameters."
            )
    return [jnp.asarray(given) for _, given, _ in entries]


def per_matrix(
    axes_tree: PyTree, fn: Callable[[LeafAxes, Any], Any], *trees: PyTree
) -> PyTree:
    """``fn(axes, *leaves)`` of the leaves of matrices; masked elsewhere."""

    def at(axes: Any, *leaves: Any) -> Any:
        return axes if isinstance(axes, optax.MaskedNode) else fn(axes, *leaves)

    return jax.tree.map(at, axes_tree, *map(unbox, trees), is_leaf=is_axes_leaf)


def masked_like(tree: PyTree, field: PyTree) -> PyTree:
    """A field, masked wherever another tree with entries per matrix is masked."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return jax.tree.map(
        lambda leaf, entry: leaf if is_masked(leaf) else entry,
        unbox(tree),
        unbox(field),
        is_leaf=is_masked,
    )


def _is_array(given: Any) -> bool:
    return isinstance(given, jax.Array | np.ndarray | np.generic | float | int)


def _stacked(axes: LeafAxes, parts: list[jax.Array]) -> jax.Array:
    if len(parts) == 1 or not isinstance(axes, MatrixBlocks):
        [array] = parts
        return array
    return jnp.stack(parts, axis=axes.place)
