"""The matrices in a leaf: along which axes they lie, and the way there and back.

A leaf of any rank is a batch of ``(m, n)`` matrices whose rows and columns may each span
several axes (:class:`MatrixAxes`), or holds blocks side by side along one of them, each a
batch of matrices of its own (:class:`MatrixBlocks`).
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orscale_jax import _sharding


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """The axes of a leaf that is a batch of matrices.

    Attributes:
      batch: Axes that count matrices (layers, experts, ...), in the leaf's order.
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
        """One entry per matrix: ``()`` for a plain matrix."""
        return self.of_batch(leaf.shape)

    def of_batch(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Entries of the axes that count matrices, given one for each axis."""
        return tuple(entries[axis] for axis in self.batch)

    def batch_sharding(self, leaf: jax.Array) -> tuple[Any, ...]:
        """The axes of the mesh for an array of the batch shape."""
        return self.of_batch(_sharding.spec(leaf))

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
                x = _sharding.merge(x, axis)
        return x

    def from_matrices(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_matrices` for a leaf of the shape of ``like``."""
        if not matrices.size:  # Nothing says how long the others of a merged axis were.
            return jnp.zeros(like.shape, matrices.dtype)
        x = matrices
        for axes, start in (
            (self.rows, len(self.batch)),
            (self.columns, len(self.batch + self.rows)),
        ):
            for place, axis in enumerate(axes[:-1], start):
                x = _sharding.split(x, place, like.shape[axis])
        order = self.batch + self.rows + self.columns
        return x.transpose(sorted(range(like.ndim), key=order.__getitem__))

    # What follows is the same for MatrixBlocks, whose leaves may have several parts.

    @property
    def labels(self) -> tuple[str, ...]:
        """One per part: where in the leaf it lies, as NumPy slices; empty for all."""
        return ("",)

    @property
    def within(self) -> "MatrixAxes":
        """The axes of every part."""
        return self

    def part(self, array: jax.Array, index: int) -> jax.Array:
        """A part of an array of the leaf's shape or of the batch shape."""
        return array

    def matrices(self, leaf: jax.Array) -> list[jax.Array]:
        """The matrices of each part, of shape ``(*batch, m, n)``."""
        return [self.to_matrices(leaf)]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The inverse of :meth:`part`."""
        [array] = parts
        return array

    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        """``fn(matrices, axis=...)`` per matrix, of the batch shape."""
        return fn(leaf, axis=self.matrix)

    def norms(self, leaf: jax.Array) -> jax.Array:
        """Frobenius norm of every matrix, of the batch shape, in the leaf's dtype."""
        return _root(self.reduce(jnp.sum, jnp.square(leaf)))

    def per_matrix(self, scalars: jax.Array) -> jax.Array:
        """Scalars of the batch shape, shaped to broadcast against the leaf."""
        return jnp.expand_dims(scalars, self.matrix)

    def by_shape(self, fn: Callable[[int, int], float], leaf: jax.Array) -> ArrayLike:
        """``fn(m, n)``, as it broadcasts against the leaf."""
        return fn(*self.matrix_shape(leaf))


@dataclasses.dataclass(frozen=True)
class MatrixBlocks(abc.ABC):
    """The axes of a leaf whose matrices lie side by side along an axis of theirs.

    Attributes:
      whole: The axes of the leaf as if it were not split.
      axis: The axis along which the blocks lie, one of the rows' or the columns'.
      sizes: Their sizes along it.
    """

    whole: MatrixAxes
    axis: int
    sizes: tuple[int, ...]

    @property
    def place(self) -> int:
        """Where the blocks are counted among the batch axes: where their axis stands."""
        return sum(axis < self.axis for axis in self.whole.batch)

    def batch_shape(self, leaf: jax.Array) -> tuple[int, ...]:
        """One entry per matrix."""
        return self._with_blocks(self.whole.batch_shape(leaf), len(self.sizes))

    def of_batch(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """The same as of :class:`MatrixAxes`, and None for the axis of the blocks."""
        return self._with_blocks(self.whole.of_batch(entries), None)

    def norms(self, leaf: jax.Array) -> jax.Array:
        """As of :class:`MatrixAxes`."""
        return _root(self.reduce(jnp.sum, jnp.square(leaf)))

    def matrices(self, leaf: jax.Array) -> list[jax.Array]:
        """As of :class:`MatrixAxes`."""
        parts = (self.part(leaf, index) for index in range(len(self.labels)))
        return [self.within.to_matrices(part) for part in parts]

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

    @property
    @abc.abstractmethod
    def labels(self) -> tuple[str, ...]: ...

    @property
    @abc.abstractmethod
    def within(self) -> MatrixAxes: ...

    @abc.abstractmethod
    def batch_sharding(self, leaf: jax.Array) -> tuple[Any, ...]: ...

    @abc.abstractmethod
    def part(self, array: jax.Array, index: int) -> jax.Array: ...

    @abc.abstractmethod
    def join(self, parts: Sequence[jax.Array]) -> jax.Array: ...

    @abc.abstractmethod
    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array: ...

    @abc.abstractmethod
    def per_matrix(self, scalars: jax.Array) -> jax.Array: ...

    @abc.abstractmethod
    def by_shape(self, fn: Callable[[int, int], float], leaf: jax.Array) -> ArrayLike: ...


class EqualBlocks(MatrixBlocks):
    """Blocks of one size: one part, in which they are one more batch axis."""

    @property
    def labels(self) -> tuple[str, ...]:
        return ("",)

    @property
    def within(self) -> MatrixAxes:
        """Of the leaf with its axis split in two, the blocks' in front."""
        batch, rows, columns = (
            tuple(axis + (axis >= self.axis) for axis in axes)
            for axes in (self.whole.batch, self.whole.rows, self.whole.columns)
        )
        return MatrixAxes(self._with_blocks(batch, self.axis), rows, columns)

    def batch_sharding(self, leaf: jax.Array) -> tuple[Any, ...]:
        return self.within.batch_sharding(self.part(leaf, 0))

    def part(self, array: jax.Array, index: int) -> jax.Array:
        if not self._is_leaf(array):
            return array
        return _sharding.split(array, self.axis, len(self.sizes))

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        [array] = parts
        return _sharding.merge(array, self.axis)

    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        return self.within.reduce(fn, self.part(leaf, 0))

    def per_matrix(self, scalars: jax.Array) -> jax.Array:
        spread = self.within.per_matrix(scalars)
        shape = list(spread.shape)
        shape[self.axis + 1] = self.sizes[0]
        return _sharding.merge(jnp.broadcast_to(spread, shape), self.axis)

    def by_shape(self, fn: Callable[[int, int], float], leaf: jax.Array) -> ArrayLike:
        return fn(*self._block_shape(leaf, self.sizes[0]))


class UnequalBlocks(MatrixBlocks):
    """Blocks of several sizes: each a part, cut out of the leaf."""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(
            f"[{', '.join([':'] * self.axis + [f'{start}:{stop}'])}]"
            for start, stop in self._bounds
        )

    @property
    def within(self) -> MatrixAxes:
        return self.whole

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(itertools.accumulate(self.sizes, initial=0)))

    def batch_sharding(self, leaf: jax.Array) -> tuple[Any, ...]:
        return self.of_batch(_sharding.spec(leaf))

    def part(self, array: jax.Array, index: int) -> jax.Array:
        if not self._is_leaf(array):
            return jax.lax.index_in_dim(array, index, self.place, keepdims=False)
        whole = _sharding.gather(array, (self.axis,))
        return jax.lax.slice_in_dim(whole, *self._bounds[index], axis=self.axis)

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate(parts, axis=self.axis)

    def reduce(self, fn: Callable[..., jax.Array], leaf: jax.Array) -> jax.Array:
        reduced = [
            self.whole.reduce(fn, self.part(leaf, i)) for i in range(len(self.sizes))
        ]
        return jnp.stack(reduced, axis=self.place)

    def per_matrix(self, scalars: jax.Array) -> jax.Array:
        """A short vector along the blocks: the leaf itself stays in one piece."""
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
        values = [fn(*self._block_shape(leaf, size)) for size in self.sizes]
        shape = [1] * leaf.ndim
        shape[self.axis] = -1
        return np.repeat(values, self.sizes).reshape(shape)


# Of any leaf of matrices.
LeafAxes: TypeAlias = MatrixAxes | MatrixBlocks


def matrix_blocks(whole: MatrixAxes, axis: int, sizes: tuple[int, ...]) -> MatrixBlocks:
    """Blocks of the given sizes along an axis of the matrices."""
    kind = EqualBlocks if len(set(sizes)) == 1 else UnequalBlocks
    return kind(whole, axis, sizes)


@jax.custom_jvp
def _root(x: jax.Array) -> jax.Array:
    """√x. Differentiated where x is 0, it is a norm's, of which 0 is a subgradient."""
    return jnp.sqrt(x)


@_root.defjvp
def _(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    [x], [change] = primals, tangents
    root = _root(x)
    return root, jnp.where(x == 0, 0, change / (2 * jnp.where(x == 0, 1, root)))
