"""The matrices in a leaf of any rank: conversion to a batch of ``(m, n)``, and back.

Rows and columns may each span several axes. Leaves that hold several matrices side by
side have :class:`orscale_jax.parameters.blocks.MatrixBlocks`, with the same methods.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from orscale_jax.sharding import typed_sharding


class Parts(abc.ABC):
    """The axes of a leaf of matrices, which may lie in several parts."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The place of each part in the leaf, as NumPy slices; empty for all of it."""
        return ("",)

    @property
    @abc.abstractmethod
    def within(self) -> "MatrixAxes":
        """The axes of every part."""

    @abc.abstractmethod
    def part(self, array: jax.Array, index: int) -> jax.Array:
        """A part of an array of the leaf's shape or of the batch shape."""

    @abc.abstractmethod
    def of_batch(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """The entries for the batch axes, given one entry for each axis of the leaf."""

    @abc.abstractmethod
    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        """``fn(matrices, axis=...)`` per matrix, of the batch shape."""

    @abc.abstractmethod
    def by_shape(self, fn: Callable[[int, int], float], leaf: jax.Array) -> ArrayLike:
        """``fn(m, n)``, in a shape that broadcasts against the leaf."""

    def batch_by_shape(
        self, fn: Callable[[int, int], float], leaf: jax.Array
    ) -> ArrayLike:
        """``fn(m, n)``, in a shape that broadcasts against the batch shape."""
        return self.by_shape(fn, leaf)

    def batch_sharding(self, leaf: jax.Array) -> tuple[Any, ...]:
        """The sharding of an array with one entry per matrix."""
        return self.of_batch(typed_sharding.spec(leaf))

    def matrices(self, leaf: jax.Array) -> list[jax.Array]:
        """The matrices of each part, of shape ``(*batch, m, n)``."""
        parts = (self.part(leaf, index) for index in range(len(self.labels)))
        return [self.within.to_matrices(part) for part in parts]

    def norms(self, leaf: jax.Array) -> jax.Array:
        """Frobenius norm of every matrix, of the batch shape, in the leaf's dtype."""
        return square_root(self.reduce(jnp.sum, jnp.square(leaf)))


@dataclasses.dataclass(frozen=True)
class MatrixAxes(Parts):
    """The axes of a leaf that is a batch of matrices.

    Attributes:
      batch: The batch axes, which count matrices (layers, experts), in the leaf's order.
      rows: Axes that make up the ``m`` rows (the reduction axes of ``x @ W``).
      columns: Axes that make up the ``n`` columns (the output axes).
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def matrix(self) -> tuple[int, ...]:
        """The axes of one matrix, over which norms are taken."""
        return tuple(sorted(self.rows + self.columns))

    def batch_shape(self, leaf: jax.Array) -> tuple[int, ...]:
        """The shape of one entry per matrix: ``()`` for a plain matrix."""
        return self.of_batch(leaf.shape)

    def of_batch(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """See :class:`Parts`."""
        return tuple(entries[axis] for axis in self.batch)

    def matrix_shape(self, leaf: jax.Array) -> tuple[int, int]:
        """``(m, n)``."""
        rows, columns = (
            math.prod(leaf.shape[axis] for axis in axes)
            for axes in (self.rows, self.columns)
        )
        return rows, columns

    def to_matrices(self, leaf: jax.Array) -> jax.Array:
        """The leaf as ``(*batch, m, n)``. Batch axes are kept apart, never merged."""
        x = leaf.transpose(self.batch + self.rows + self.columns)
        for axes, place in ((self.columns, -1), (self.rows, -2)):
            end = x.ndim + place
            for axis in reversed(range(end - len(axes) + 1, end)):
                x = typed_sharding.merge(x, axis)
        return x

    def from_matrices(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_matrices` for a leaf of the shape of ``like``."""
        if not matrices.size:  # An empty merged axis hides the lengths of its parts.
            return jnp.zeros(like.shape, matrices.dtype)
        x = matrices
        for axes, start in (
            (self.rows, len(self.batch)),
            (self.columns, len(self.batch + self.rows)),
        ):
            for place, axis in enumerate(axes[:-1], start):
                x = typed_sharding.split(x, place, like.shape[axis])
        order = self.batch + self.rows + self.columns
        return x.transpose(sorted(range(like.ndim), key=order.__getitem__))

    @property
    def within(self) -> "MatrixAxes":
        """See :class:`Parts`."""
        return self

    def part(self, array: jax.Array, index: int) -> jax.Array:
        """See :class:`Parts`."""
        return array

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The inverse of :meth:`part`."""
        [array] = parts
        return array

    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        """See :class:`Parts`."""
        return fn(leaf, axis=self.matrix)

    def per_matrix(self, scalars: jax.Array) -> jax.Array:
        """Scalars of the batch shape, shaped to broadcast against the leaf."""
        return jnp.expand_dims(scalars, self.matrix)

    def by_shape(self, fn: Callable[[int, int], float], leaf: jax.Array) -> ArrayLike:
        """See :class:`Parts`."""
        return fn(*self.matrix_shape(leaf))

    @property
    def neurons(self) -> "MatrixAxes":
        """The axes that make each output neuron (a column) a separate matrix."""
        return MatrixAxes(tuple(sorted(self.batch + self.columns)), self.rows, ())

    @property
    def of_neurons(self) -> "MatrixAxes":
        """The axes of an array with one entry per output neuron: a matrix of one row."""
        place = {axis: place for place, axis in enumerate(self.neurons.batch)}
        batch, columns = (
            tuple(place[axis] for axis in axes) for axes in (self.batch, self.columns)
        )
        return MatrixAxes(batch, (), columns)

    @property
    def inputs(self) -> "MatrixAxes":
        """The axes that make each input (a row) a separate matrix."""
        return MatrixAxes(tuple(sorted(self.batch + self.rows)), (), self.columns)


@jax.custom_jvp
def square_root(x: jax.Array) -> jax.Array:
    """The root of x, for norms: its derivative at 0 is the subgradient 0."""
    return jnp.sqrt(x)


@square_root.defjvp
def _(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    [x], [change] = primals, tangents
    root = square_root(x)
    return root, jnp.where(x == 0, 0, change / (2 * jnp.where(x == 0, 1, root)))
