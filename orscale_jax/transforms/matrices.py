"""The matrices of a tree: maps over them, and arrays with one entry for each of them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from orscale_jax.distributed.horizontal_fusion import (
    Reduction,
    reduce_all,
    slices_of_stacks,
)
from orscale_jax.parameters.axes import MatrixAxes, square_root
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    is_axes_leaf,
    matrix_axes,
    require_matrices,
)
from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree, box_like, unbox

# The groups of a whole optimizer's partition, and so the keys of its state.
MATRIX, ADAMW = "matrix", "adamw"


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Which leaves of a tree hold matrices, and along which axes. Hashable.

    Trees are without boxes, except for ``params`` of :meth:`entries` and :meth:`full`.
    *Entries* are a tree whose leaves of matrices are arrays of the batch shape: they have
    one entry for each matrix, such as its norm. On GPUs small arrays of one shape are
    computed together, since XLA would launch a kernel for each of them.

    Attributes:
      structure: The structure of the tree.
      axes: For each leaf, in order: its axes, or None if it holds no matrix.
    """

    structure: Any
    axes: tuple[MatrixAxes | None, ...]

    @classmethod
    def of(
        cls, weight_dimension_numbers: WeightDimensionNumbers, tree: PyTree
    ) -> "Matrices":
        """The matrices of a tree with other leaves, too.

        Raises:
          ValueError: In the cases of :func:`matrix_axes`.
        """
        return cls._from(matrix_axes(weight_dimension_numbers, tree))

    @classmethod
    def only(
        cls, weight_dimension_numbers: WeightDimensionNumbers, tree: PyTree
    ) -> "Matrices":
        """The matrices of a tree that has no other leaves.

        Raises:
          ValueError: In the cases of :func:`require_matrices`.
        """
        return cls._from(require_matrices(weight_dimension_numbers, tree))

    @classmethod
    def _from(cls, axes_tree: PyTree) -> "Matrices":
        leaves, structure = jax.tree.flatten(axes_tree, is_leaf=is_axes_leaf)
        axes = (leaf if isinstance(leaf, MatrixAxes) else None for leaf in leaves)
        return cls(structure, tuple(axes))

    @property
    def of_leaves(self) -> list[MatrixAxes]:
        """The axes of the leaves of matrices."""
        return [axes for axes in self.axes if axes is not None]

    @property
    def axes_tree(self) -> PyTree:
        """The axes as a tree, masked where there are none."""
        return self.tree_of(self.of_leaves)

    @property
    def mask(self) -> PyTree:
        """A tree of booleans: whether each leaf holds matrices."""
        return self.structure.unflatten(axes is not None for axes in self.axes)

    @property
    def paths(self) -> list[Any]:
        """The paths to the leaves of matrices."""
        numbered = self.structure.unflatten(range(len(self.axes)))
        found = jax.tree.leaves_with_path(numbered)
        return [path for path, place in found if self.axes[place] is not None]

    @property
    def neurons(self) -> "Matrices":
        """The same tree with each output neuron as a matrix."""
        neurons = tuple(axes and axes.neurons for axes in self.axes)
        return dataclasses.replace(self, axes=neurons)

    def leaves(self, tree: PyTree) -> list[Any]:
        """The leaves of matrices."""
        nodes = self.structure.flatten_up_to(tree)
        return [x for x, axes in zip(nodes, self.axes, strict=True) if axes is not None]

    def replace(self, tree: PyTree, leaves: Sequence[Any]) -> PyTree:
        """The tree with other leaves of matrices."""
        nodes = self.structure.flatten_up_to(tree)
        places = (i for i, axes in enumerate(self.axes) if axes is not None)
        for place, leaf in zip(places, leaves, strict=True):
            nodes[place] = leaf
        return self.structure.unflatten(nodes)

    def tree_of(self, leaves: Sequence[Any]) -> PyTree:
        """A tree with these leaves of matrices, masked elsewhere."""
        masked = self.structure.unflatten([optax.MaskedNode()] * len(self.axes))
        return self.replace(masked, leaves)

    def rows(self, *trees: PyTree) -> Iterator[Any]:
        """The axes of each leaf of matrices, and that leaf of each tree."""
        return zip(self.of_leaves, *map(self.leaves, trees), strict=True)

    def map(self, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """``fn(axes, *leaves)`` of the leaves of matrices; others as in the first."""
        return self.replace(trees[0], [fn(*row) for row in self.rows(*trees)])

    def reduce(self, fn: Reduction, tree: PyTree) -> PyTree:
        """Entries ``axes.reduce(fn, leaf)``."""
        parts = [
            axes.part(leaf, index)
            for axes, leaf in self.rows(tree)
            for index in range(len(axes.labels))
        ]
        along = [axes.within.matrix for axes in self.of_leaves for _ in axes.labels]
        entries = self._of_parts(reduce_all(fn, parts, along))
        return self.replace(tree, slices_of_stacks(entries))

    def norms(self, tree: PyTree) -> PyTree:
        """Entries: the Frobenius norm of every matrix, in the leaves' dtypes."""
        squares = self.map(lambda _, leaf: jnp.square(leaf), tree)
        return self.map(lambda _, x: square_root(x), self.reduce(jnp.sum, squares))

    def together(self, entries: PyTree) -> PyTree:
        """The same entries, computed together on GPUs."""
        return self.replace(entries, slices_of_stacks(self.leaves(entries)))

    def broadcast(self, entries: PyTree, tree: PyTree) -> PyTree:
        """Entries in shapes that broadcast against the leaves, sharded as these."""
        return self.map(broadcast, self.together(entries), tree)

    def parts(self, tree: PyTree) -> list[jax.Array]:
        """All matrices, as arrays of shape ``(*batch, m, n)``, one for each part."""
        return [part for axes, leaf in self.rows(tree) for part in axes.matrices(leaf)]

    def join(self, parts: Sequence[jax.Array], tree: PyTree) -> PyTree:
        """The inverse of :meth:`parts`: leaves shaped and sharded as a tree's."""
        left = iter(parts)
        return self.tree_of(
            [
                _joined(axes, [next(left) for _ in axes.labels], leaf)
                for axes, leaf in self.rows(tree)
            ]
        )

    def entries_of_parts(self, entries: Sequence[jax.Array]) -> PyTree:
        """Entries from those of :meth:`parts`, which have the parts' batch shapes."""
        return self.tree_of(self._of_parts(entries))

    def _of_parts(self, entries: Sequence[jax.Array]) -> list[jax.Array]:
        """One array for each leaf of matrices, from one for each part."""
        left = iter(entries)
        return [
            jnp.stack([next(left) for _ in axes.labels], axis=axes.place)
            if axes.cut
            else next(left)
            for axes in self.of_leaves
        ]

    def entries(self, params: PyTree, fn: Callable[..., Any], *trees: PyTree) -> PyTree:
        """Entries ``fn(axes, leaf, *others)``, sharded and boxed as the batch axes.

        ``leaf`` is a parameter, and others are its nodes of further trees. Masked where
        there are no matrices.
        """

        def make(axes: MatrixAxes, node: Any, *others: Any) -> Any:
            leaf = unbox(node)
            if not isinstance(leaf, jax.ShapeDtypeStruct):  # Optax's init takes it, too.
                leaf = jnp.asarray(leaf)
            made = typed_sharding.shard_as(
                fn(axes, leaf, *others), leaf, axes.batch_sharding(leaf)
            )
            return box_like(made, node, axes.of_batch)

        # optax.tree.map_params initializes with a placeholder. One array instead of a
        # tree tells it that these arrays do not have the parameters' shapes.
        if type(params).__name__ == "_ParamsPlaceholder":
            return jnp.ones(())
        return self.tree_of([make(*row) for row in self.rows(params, *trees)])

    def full(
        self, params: PyTree, value: float, dtype: Callable[[jax.Array], DTypeLike]
    ) -> PyTree:
        """Entries that all have one value, sharded and boxed as the batch axes."""

        def at(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
            shape = axes.batch_shape(leaf)
            return typed_sharding.full(shape, value, dtype(leaf), leaf)

        return self.entries(params, at)


def broadcast(axes: MatrixAxes, entries: jax.Array, leaf: jax.Array) -> jax.Array:
    """Entries of a leaf in a shape that broadcasts against it, sharded as it is."""
    x = axes.per_matrix(entries)
    like = zip(x.shape, leaf.shape, typed_sharding.spec(leaf), strict=True)
    sharding = [entry if size == full else None for size, full, entry in like]
    return typed_sharding.shard_as(x, leaf, sharding)


def _joined(axes: MatrixAxes, parts: Sequence[jax.Array], leaf: jax.Array) -> jax.Array:
    """The parts of a leaf, shaped and sharded like it."""
    shapes = jax.eval_shape(
        lambda x: [axes.part(x, index) for index in range(len(parts))], leaf
    )
    pairs = zip(parts, shapes, strict=True)
    joined = axes.join([axes.within.from_matrices(part, like) for part, like in pairs])
    return typed_sharding.shard_like(joined, leaf)
