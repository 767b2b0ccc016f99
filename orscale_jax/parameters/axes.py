"""The matrices in a leaf of any rank: conversion to a batch of ``(m, n)``, and back."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orscale_jax.sharding import typed_sharding


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """The axes of a leaf of matrices. Rows and columns may each span several axes.

    *Blocks* are matrices side by side along one of their own axes. Blocks of one size are
    a single *part* of the leaf, which has one more batch axis and is never copied; blocks
    of several sizes are a part each, cut out of the leaf. Without blocks, the leaf is one
    part.
    """

    batch: tuple[int, ...]  # Axes that count matrices (layers, experts), in order.
    rows: tuple[int, ...]  # Of the m rows: the reduction axes of x @ W.
    columns: tuple[int, ...]  # Of the n columns: the output axes.
    block_axis: int = 0  # The one of them along which blocks lie; 0 without blocks.
    sizes: tuple[int, ...] = ()  # Of the blocks along it; empty without blocks.
    stride: int = 0  # Entries of a block before those of the next; 0 for all of them.

    @property
    def matrix(self) -> tuple[int, ...]:
        """The axes of rows and columns, over which norms are taken."""
        return tuple(sorted(self.rows + self.columns))

    def matrix_shape(self, leaf: jax.Array) -> tuple[int, int]:
        """``(m, n)``, of all blocks together."""
        m, n = (math.prod(leaf.shape[i] for i in x) for x in (self.rows, self.columns))
        return m, n

    # Parts.

    @property
    def has_unequal_blocks(self) -> bool:
        return len(set(self.sizes)) > 1

    @property
    def labels(self) -> tuple[str, ...]:
        """The place of each part in the leaf, as NumPy slices; empty for all of it."""
        if not self.has_unequal_blocks:
            return ("",)
        before = [":"] * self.block_axis
        return tuple(f"[{', '.join([*before, f'{a}:{b}'])}]" for a, b in self._bounds)

    @property
    def within(self) -> "MatrixAxes":
        """The axes of every part, which has no blocks."""
        if not self.sizes or self.has_unequal_blocks:
            return MatrixAxes(self.batch, self.rows, self.columns)
        # The blocks' axis is split in two, the count in front.
        batch, rows, columns = (
            tuple(axis + (axis >= self.block_axis) for axis in axes)
            for axes in (self.batch, self.rows, self.columns)
        )
        return MatrixAxes(self._with_blocks(batch, self.block_axis), rows, columns)

    def part(self, array: jax.Array, index: int) -> jax.Array:
        """A part of an array of the leaf's shape or of the batch shape."""
        is_leaf = np.ndim(array) == len(self.batch) + len(self.matrix)
        if not self.has_unequal_blocks:
            if not self.sizes or not is_leaf:
                return array
            axis, count, split = self.block_axis, len(self.sizes), typed_sharding.split
            if not self.stride:
                return split(array, axis, count)
            # Of (turns, blocks, stride), the blocks in front and the others together.
            turns = split(array, axis, self.sizes[0] // self.stride)
            turns = jnp.moveaxis(split(turns, axis + 1, count), axis + 1, axis)
            return typed_sharding.merge(turns, axis + 1)
        if not is_leaf:
            return jax.lax.index_in_dim(array, index, self.block_position, keepdims=False)
        whole = typed_sharding.gather(array, (self.block_axis,))
        return jax.lax.slice_in_dim(whole, *self._bounds[index], axis=self.block_axis)

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The inverse of :meth:`part`, for all parts."""
        if parts[0].ndim == len(self.within.batch):  # One entry for each matrix.
            unequal = self.has_unequal_blocks
            return jnp.stack(parts, self.block_position) if unequal else parts[0]
        if self.has_unequal_blocks:
            return jnp.concatenate(parts, axis=self.block_axis)
        [array] = parts
        if self.stride:
            axis, turns = self.block_axis, self.sizes[0] // self.stride
            array = typed_sharding.split(array, self.block_axis + 1, turns)
            array = typed_sharding.merge(jnp.moveaxis(array, axis + 1, axis), axis + 1)
        return typed_sharding.merge(array, self.block_axis) if self.sizes else array

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(itertools.accumulate(self.sizes, initial=0)))

    # The matrices of a part.

    def batches(self, leaf: jax.Array) -> list[jax.Array]:
        """The matrices of each part, of shape ``(*batch, m, n)``."""
        parts = (self.part(leaf, index) for index in range(len(self.labels)))
        return [self.within.to_matrices(part) for part in parts]

    def to_matrices(self, part: jax.Array) -> jax.Array:
        """A part as ``(*batch, m, n)``. Batch axes are kept apart, never merged."""
        x = part.transpose(self.batch + self.rows + self.columns)
        for axes, place in ((self.columns, -1), (self.rows, -2)):
            end = x.ndim + place
            for axis in reversed(range(end - len(axes) + 1, end)):
                x = typed_sharding.merge(x, axis)
        return x

    def from_matrices(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_matrices` for a part of the shape of ``like``."""
        if not matrices.size:  # An empty merged axis hides the lengths of its parts.
            return jnp.zeros(like.shape, matrices.dtype)
        x, start = matrices, len(self.batch)
        for axes in (self.rows, self.columns):
            for place, axis in enumerate(axes[:-1], start):
                x = typed_sharding.split(x, place, like.shape[axis])
            start += len(axes)
        order = self.batch + self.rows + self.columns
        return x.transpose(sorted(range(like.ndim), key=order.__getitem__))

    # Arrays of the batch shape, with one entry for each matrix.

    @property
    def block_position(self) -> int:
        """The position of the blocks among the batch axes."""
        return sum(axis < self.block_axis for axis in self.batch)

    def _with_blocks(self, batch: Sequence[Any], entry: Any) -> tuple[Any, ...]:
        of_blocks = (entry,) if self.sizes else ()
        return (*batch[: self.block_position], *of_blocks, *batch[self.block_position :])

    def of_batch(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """The entries for the batch axes, given one for each axis; None for blocks."""
        return self._with_blocks([entries[axis] for axis in self.batch], None)

    def batch_shape(self, leaf: jax.Array) -> tuple[int, ...]:
        """The shape of one entry per matrix: ``()`` for a plain matrix."""
        batch = [leaf.shape[axis] for axis in self.batch]
        return self._with_blocks(batch, len(self.sizes))

    def batch_sharding(self, leaf: jax.Array) -> tuple[Any, ...]:
        """The sharding of an array with one entry per matrix."""
        if self.sizes and not self.has_unequal_blocks:
            return self.within.batch_sharding(self.part(leaf, 0))
        return self.of_batch(typed_sharding.spec(leaf))

    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        """``fn(matrices, axis=...)`` per matrix, of the batch shape."""
        along = self.within.matrix
        indices = range(len(self.labels))
        return self.join([fn(self.part(leaf, i), axis=along) for i in indices])

    def norms(self, leaf: jax.Array) -> jax.Array:
        """Frobenius norm of every matrix, of the batch shape, in the leaf's dtype."""
        return square_root(self.reduce(jnp.sum, jnp.square(leaf)))

    def expand(self, scalars: jax.Array) -> jax.Array:
        """Scalars of the batch shape, shaped to broadcast against the leaf."""
        if not self.sizes:
            return jnp.expand_dims(scalars, self.matrix)
        # Of unequal blocks, a vector along the blocks' axis: the leaf is not cut.
        if self.has_unequal_blocks:
            sizes, total = np.asarray(self.sizes), sum(self.sizes)
            spread = jnp.repeat(
                scalars, sizes, self.block_position, total_repeat_length=total
            )
            others = [axis for axis in self.matrix if axis != self.block_axis]
            return jnp.expand_dims(spread, others)
        spread = self.within.expand(scalars)
        shape = list(spread.shape)
        shape[self.block_axis + 1] = self.sizes[0]
        return self.join([jnp.broadcast_to(spread, shape)])

    def by_shape(self, fn: Callable[[int, int], float], leaf: jax.Array) -> ArrayLike:
        """``fn(m, n)``, in a shape that broadcasts against the leaf."""
        values = self.batch_by_shape(fn, leaf)
        if not self.has_unequal_blocks:
            return values
        shape = [1] * leaf.ndim
        shape[self.block_axis] = -1
        return np.repeat(np.ravel(values), self.sizes).reshape(shape)

    def batch_by_shape(
        self, fn: Callable[[int, int], float], leaf: jax.Array
    ) -> ArrayLike:
        """``fn(m, n)``, in a shape that broadcasts against the batch shape."""
        m, n = self.matrix_shape(leaf)
        if not self.sizes:
            return fn(m, n)
        length = max(1, sum(self.sizes))  # Blocks of an empty axis are empty.
        if self.block_axis in self.rows:
            values = [fn(m // length * size, n) for size in self.sizes]
        else:
            values = [fn(m, n // length * size) for size in self.sizes]
        if not self.has_unequal_blocks:
            return values[0]
        shape = [1] * (len(self.batch) + 1)
        shape[self.block_position] = -1
        return np.reshape(values, shape)

    # Vectors of the matrices.

    @property
    def neurons(self) -> "MatrixAxes":
        """The axes that make each output neuron (a column) a separate matrix."""
        return self._counting(self.columns)

    @property
    def inputs(self) -> "MatrixAxes":
        """The axes that make each input (a row) a separate matrix."""
        return self._counting(self.rows)

    def _counting(self, counted: tuple[int, ...]) -> "MatrixAxes":
        """Rows or columns as batch axes; blocks remain if they divide the others."""
        batch = tuple(sorted(self.batch + counted))
        rows, columns = (() if x == counted else x for x in (self.rows, self.columns))
        if self.block_axis in counted:
            return MatrixAxes(batch, rows, columns)
        blocks = self.block_axis, self.sizes, self.stride
        return MatrixAxes(batch, rows, columns, *blocks)

    @property
    def of_neurons(self) -> "MatrixAxes":
        """The axes of an array with one entry per output neuron: a matrix of one row."""
        neurons = self.neurons
        order = list(neurons.batch)
        if neurons.sizes:  # Blocks of the rows have entries of their own.
            order.insert(neurons.block_position, -1)
        columns = tuple(order.index(axis) for axis in self.columns)
        batch = tuple(i for i in range(len(order)) if i not in columns)
        if self.sizes and not neurons.sizes:
            block_axis = order.index(self.block_axis)
            return MatrixAxes(batch, (), columns, block_axis, self.sizes, self.stride)
        return MatrixAxes(batch, (), columns)


@jax.custom_jvp
def square_root(x: jax.Array) -> jax.Array:
    """The root of x, for norms: its derivative at 0 is the subgradient 0."""
    return jnp.sqrt(x)


@square_root.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    [x], [change] = primals, tangents
    root = square_root(x)
    return root, jnp.where(x == 0, 0, change / (2 * jnp.where(x == 0, 1, root)))
