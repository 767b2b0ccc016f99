"""Matrices of one shape from many leaves, through Newton–Schulz as one stack.

An accelerator runs few large kernels faster than many small ones, which also compile once
for all layers. The price is a copy into the stack and one out of it, and its memory,
which is capped. A CPU gains nothing where one matrix fills its caches, and pays for the
copies: its cap is smaller.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import _sharding

MAX_BYTES = 2**28
MAX_BYTES_CPU = 2**20
AT_ONCE = 2**26  # A larger stack goes through Newton–Schulz in parts.


class Kind(NamedTuple):
    """What two arrays of matrices have to share to go into one stack.

    Attributes:
      shape: ``(*batch, m, n)`` with ``m <= n``: tall matrices are transposed.
      dtype: Of the entries.
      sharding: Of the batch axes, where types carry it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: tuple[Any, ...] = ()

    @classmethod
    def of(cls, x: jax.Array) -> "Kind":
        """The kind of an array of shape ``(*batch, m, n)``."""
        batch = tuple(_sharding.spec(x)[:-2])
        return cls((*x.shape[:-2], *sorted(x.shape[-2:])), x.dtype, batch)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan(kinds: Sequence[Kind], max_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Which arrays share a stack.

    They are stacked along a new axis. No axis is merged with another, over which an array
    may be sharded: layers of experts go together with layers of experts alone.

    Args:
      kinds: Of the arrays.
      max_bytes: What a stack may have. An array that has more is on its own.

    Returns:
      The arrays' indices, one tuple per stack and each index once, in order. Stacks of
      one kind differ in length by at most one.
    """
    alike: dict[Kind, list[int]] = {}
    for index, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(index)
    stacks = []
    for kind, members in alike.items():
        fitting = max(1, max_bytes // max(1, kind.nbytes))
        parts = np.array_split(members, math.ceil(len(members) / fitting))
        stacks += [tuple(part.tolist()) for part in parts]
    return tuple(sorted(stacks))


def map_stacks(
    fn: Callable[[jax.Array], jax.Array], matrices: Sequence[jax.Array], max_bytes: int
) -> list[jax.Array]:
    """``fn`` of every array of matrices, by way of stacks.

    Args:
      fn: Keeps the shape ``(*batch, m, n)`` and treats each matrix alone and like its
        transpose.
      matrices: Arrays of shape ``(*batch, m, n)``.
      max_bytes: As for :func:`plan`.

    Returns:
      The results, in the order of ``matrices``.
    """
    found: dict[int, jax.Array] = {}
    for members in plan([Kind.of(x) for x in matrices], max_bytes):
        alike = [matrices[index] for index in members]
        found.update(zip(members, _through_one(fn, alike), strict=True))
    return [found[index] for index in range(len(matrices))]


def in_chunks(
    fn: Callable[[jax.Array], jax.Array], max_bytes: int, x: jax.Array
) -> jax.Array:
    """``fn`` of an array that may have more than ``max_bytes``, in parts that have not.

    Only axes that count matrices are divided, into parts of one length and a rest. An
    axis that types say is sharded is not: its devices have a part each.
    """
    count = len(x)
    if x.ndim == 2 or count == 0 or _sharding.is_sharded(x):
        return fn(x)
    each = max(1, x.size // count * x.dtype.itemsize)
    if count * each <= max_bytes:
        return fn(x)
    if each > max_bytes:
        return jax.lax.map(functools.partial(in_chunks, fn, max_bytes), x)
    parts = math.ceil(count / (max_bytes // each))
    length = math.ceil(count / parts)
    whole = count // length * length
    chunks = x[:whole].reshape(-1, length, *x.shape[1:])
    results = jax.lax.map(fn, chunks).reshape(whole, *x.shape[1:])
    return results if whole == count else jnp.concatenate([results, fn(x[whole:])])


def _through_one(
    fn: Callable[[jax.Array], jax.Array], alike: list[jax.Array]
) -> Sequence[jax.Array]:
    if len(alike) == 1:
        return [fn(alike[0])]
    results = fn(jnp.stack([x if _is_wide(x) else x.mT for x in alike]))
    return [q if _is_wide(x) else q.mT for q, x in zip(results, alike, strict=True)]


def _is_wide(x: jax.Array) -> bool:
    return x.shape[-2] <= x.shape[-1]
