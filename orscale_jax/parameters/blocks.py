"""Leaves that hold several matrices side by side along one of their axes."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orscale_jax.parameters.axes import MatrixAxes, Parts
from orscale_jax.sharding import typed_sharding


@dataclasses.dataclass(frozen=True)
class MatrixBlocks(Parts):
    """The axes of a leaf whose matrices lie side by side along one of their own axes.

    Attributes:
      whole: The axes of the leaf as if it were not split.
      axis: The axis along which the blocks lie, a row axis or a column axis.
      sizes: The sizes of the blocks along it.
    """

    whole: MatrixAxes
    axis: int
    sizes: tuple[int, ...]

    @property
    def place(self) -> int:
        """The position of the blocks' axis among the batch axes."""
        return sum(axis < self.axis for axis in self.whole.batch)

    def batch_shape(self, leaf: jax.Array) -> tuple[int, ...]:
        """One entry per matrix."""
        return self._with_blocks(self.whole.batch_shape(leaf), len(self.sizes))

    def of_batch(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """See :class:`MatrixAxes`: with None for the axis of the blocks."""
        return self._with_blocks(self.whole.of_batch(entries), None)

    @property
    def neurons(self) -> "LeafAxes":
        """See :class:`MatrixAxes`."""
        return self._of(self.whole.neurons)

    @property
    def of_neurons(self) -> "LeafAxes":
        """See :class:`MatrixAxes`."""
        vectors = self.whole.neurons.batch
        if self.axis in vectors:
            axis = vectors.index(self.axis)
            return matrix_blocks(self.whole.of_neurons, axis, self.sizes)
        # Blocks of the rows: each has its own entries, along one more batch axis.
        new = sum(axis < self.axis for axis in vectors)
        whole = self.whole.of_neurons
        batch, columns = (
            tuple(axis + (axis >= new) for axis in axes)
            for axes in (whole.batch, whole.columns)
        )
        return MatrixAxes(tuple(sorted((*batch, new))), (), columns)

    @property
    def inputs(self) -> "LeafAxes":
        """See :class:`MatrixAxes`."""
        return self._of(self.whole.inputs)

    def _of(self, vectors: MatrixAxes) -> "LeafAxes":
        """Vectors of the whole leaf, divided into blocks if the blocks divide them."""
        cut = self.axis in vectors.matrix
        return matrix_blocks(vectors, self.axis, self.sizes) if cut else vectors

    def _with_blocks(self, batch: Sequence[Any], entry: Any) -> tuple[Any, ...]:
        return (*batch[: self.place], entry, *batch[self.place :])

    def _block_shape(self, leaf: jax.Array, size: int) -> tuple[int, int]:
        m, n = self.whole.matrix_shape(leaf)
        length = max(1, sum(self.sizes))  # Blocks of an empty axis are empty.
        if self.axis in self.whole.rows:
            return m // length * size, n
        return m, n // length * size

    def _is_leaf(self, array: jax.Array) -> bool:
        return np.ndim(array) == len(self.whole.batch) + len(self.whole.matrix)


class EqualBlocks(MatrixBlocks):
    """Blocks of one size: a single part, which has one more batch axis for them."""

    @property
    def within(self) -> MatrixAxes:
        """The axes after the blocks' axis is split in two, the count in front."""
        batch, rows, columns = (
            tuple(axis + (axis >= self.axis) for axis in axes)
            for axes in (self.whole.batch, self.whole.rows, self.whole.columns)
        )
        return MatrixAxes(self._with_blocks(batch, self.axis), rows, columns)

    def batch_sharding(self, leaf: jax.Array) -> tuple[Any, ...]:
        """See :class:`MatrixAxes`."""
        return self.within.batch_sharding(self.part(leaf, 0))

    def part(self, array: jax.Array, index: int) -> jax.Array:
        """See :class:`MatrixAxes`."""
        if not self._is_leaf(array):
            return array
        return typed_sharding.split(array, self.axis, len(self.sizes))

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """See :class:`MatrixAxes`."""
        [array] = parts
        return typed_sharding.merge(array, self.axis)

    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        """See :class:`MatrixAxes`."""
        return self.within.reduce(fn, self.part(leaf, 0))

    def per_matrix(self, scalars: jax.Array) -> jax.Array:
        """See :class:`MatrixAxes`."""
        spread = self.within.per_matrix(scalars)
        shape = list(spread.shape)
        shape[self.axis + 1] = self.sizes[0]
        return typed_sharding.merge(jnp.broadcast_to(spread, shape), self.axis)

    def by_shape(self, fn: Callable[[int, int], float], leaf: jax.Array) -> ArrayLike:
        """See :class:`MatrixAxes`."""
        return fn(*self._block_shape(leaf, self.sizes[0]))


class UnequalBlocks(MatrixBlocks):
    """Blocks of several sizes: each is a part, cut out of the leaf."""

    @property
    def labels(self) -> tuple[str, ...]:
        """See :class:`MatrixAxes`."""
        return tuple(
            f"[{', '.join([':'] * self.axis + [f'{start}:{stop}'])}]"
            for start, stop in self._bounds
        )

    @property
    def within(self) -> MatrixAxes:
        """See :class:`MatrixAxes`."""
        return self.whole

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(itertools.accumulate(self.sizes, initial=0)))

    def part(self, array: jax.Array, index: int) -> jax.Array:
        """See :class:`MatrixAxes`."""
        if not self._is_leaf(array):
            return jax.lax.index_in_dim(array, index, self.place, keepdims=False)
        whole = typed_sharding.gather(array, (self.axis,))
        return jax.lax.slice_in_dim(whole, *self._bounds[index], axis=self.axis)

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """See :class:`MatrixAxes`."""
        return jnp.concatenate(parts, axis=self.axis)

    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        """See :class:`MatrixAxes`."""
        reduced = [
            self.whole.reduce(fn, self.part(leaf, i)) for i in range(len(self.sizes))
        ]
        return jnp.stack(reduced, axis=self.place)

    def per_matrix(self, scalars: jax.Array) -> jax.Array:
        """A vector along the blocks' axis, which broadcasts: the leaf is not cut."""
        spread = jnp.repeat(
            scalars,
            np.asarray(self.sizes),
            axis=self.place,
            total_repeat_length=sum(self.sizes),
        )
        return jnp.expand_dims(
            spread, [axis for axis in self.whole.matrix if axis != self.axis]
        )

    def by_shape(self, fn: Callable[[int, int], float], leaf: jax.Array) -> ArrayLike:
        """See :class:`MatrixAxes`."""
        values = [fn(*self._block_shape(leaf, size)) for size in self.sizes]
        shape = [1] * leaf.ndim
        shape[self.axis] = -1
        return np.repeat(values, self.sizes).reshape(shape)

    def batch_by_shape(
        self, fn: Callable[[int, int], float], leaf: jax.Array
    ) -> ArrayLike:
        """See :class:`MatrixAxes`."""
        values = [fn(*self._block_shape(leaf, size)) for size in self.sizes]
        shape = [1] * (len(self.whole.batch) + 1)
        shape[self.place] = -1
        return np.reshape(values, shape)


# The axes of any leaf of matrices.
LeafAxes: TypeAlias = MatrixAxes | EqualBlocks | UnequalBlocks


def matrix_blocks(
    whole: MatrixAxes, axis: int, sizes: tuple[int, ...]
) -> EqualBlocks | UnequalBlocks:
    """Blocks of the given sizes along an axis of the matrices."""
    cls = EqualBlocks if len(set(sizes)) == 1 else UnequalBlocks
    return cls(whole, axis, sizes)
