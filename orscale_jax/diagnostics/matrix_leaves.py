"""The leaves of matrices of the parameters, as lists, and as batches of matrices."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax.parameters.blocks import LeafAxes, UnequalBlocks
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

    def pick(self, tree: PyTree) -> list[jax.Array]:
        """The leaves of matrices of a tree like the parameters."""
        return [jnp.asarray(leaf) for _, leaf in self.pick_with_paths(tree)]

    def pick_with_paths(self, tree: PyTree) -> list[tuple[Any, Any]]:
        """The leaves of matrices and their paths."""
        leaves = jax.tree_util.tree_leaves_with_path(unbox(tree))
        pairs = zip(self.axes, leaves, strict=True)
        return [with_path for axes, with_path in pairs if axes is not None]

    def put(self, leaves: Iterable[jax.Array], tree: PyTree) -> PyTree:
        """The tree with other leaves of matrices."""
        new = iter(leaves)
        old, structure = jax.tree.flatten(unbox(tree))
        pairs = zip(self.axes, old, strict=True)
        both = [leaf if axes is None else next(new) for axes, leaf in pairs]
        return rebox(jax.tree.unflatten(structure, both), tree)

    def tree_of(self, entries: Iterable[Any], params: PyTree) -> PyTree:
        """A tree like the parameters with an entry per leaf of matrices; else masked.

        Raises:
          ValueError: If the parameters have another number of leaves.
        """
        structure: Any = jax.tree.structure(unbox(params))
        if structure.num_leaves != len(self.axes):
            raise ValueError(
                f"params has {structure.num_leaves} leaves, but the reading is of "
                f"parameters with {len(self.axes)}: pass those that read() was given."
            )
        new = iter(entries)
        masked = (optax.MaskedNode() if axes is None else next(new) for axes in self.axes)
        return jax.tree.unflatten(structure, masked)

    def parts(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The matrices of all leaves, one array of shape (*batch, m, n) per part.

        Singular values need whole matrices, so matrices on Explicit axes are gathered.
        """
        return [
            typed_sharding.gather(part, (part.ndim - 2, part.ndim - 1))
            for axes, leaf in zip(self.of_matrices, leaves, strict=True)
            for part in axes.matrices(leaf.astype(compute_dtype(leaf)))
        ]

    def from_parts(self, scalars: Iterable[jax.Array]) -> list[jax.Array]:
        """Arrays of the leaves' batch shapes, from one array for each of their parts."""
        remaining = iter(scalars)
        return [
            jnp.stack([next(remaining) for _ in axes.labels], axis=axes.place)
            if isinstance(axes, UnequalBlocks)
            else next(remaining)
            for axes in self.of_matrices
        ]


def matrix_leaves(
    weight_dimension_numbers: WeightDimensionNumbers, params: PyTree
) -> MatrixLeaves:
    """Find the leaves of matrices of the parameters."""
    tree = matrix_axes(weight_dimension_numbers, params)
    leaves = jax.tree.leaves(tree, is_leaf=is_axes_leaf)
    axes = (None if isinstance(leaf, optax.MaskedNode) else leaf for leaf in leaves)
    return MatrixLeaves(tuple(axes))


def pick_like(
    argument: str, tree: PyTree, leaves: MatrixLeaves, params: PyTree
) -> list[jax.Array]:
    """The leaves of a tree where the parameters are matrices; others may be anything.

    Raises:
      ValueError: If the tree has another structure than the parameters, or other shapes.
    """
    structure: Any = jax.tree.structure(unbox(params))
    try:
        given = structure.flatten_up_to(unbox(tree))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{argument} must be a tree of the parameters' structure: {error}"
        ) from error
    arrays = [x for axes, x in zip(leaves.axes, given, strict=True) if axes is not None]
    for array, (path, param) in zip(arrays, leaves.pick_with_paths(params), strict=True):
        if not _is_array(array) or np.shape(array) != np.shape(param):
            found = f"shape {np.shape(array)}" if _is_array(array) else repr(array)
            raise ValueError(
                f"{argument} has {found} for parameter {name_and_shape(path, param)}: "
                "pass a tree of arrays like the parameters."
            )
    return list(map(jnp.asarray, arrays))


def _is_array(given: Any) -> bool:
    return isinstance(given, jax.Array | np.ndarray | np.generic | float | int)
