"""Matrices of one shape from many leaves, through Newton–Schulz as one stack.

An accelerator runs few large kernels faster than many small ones, which also compile once
for all layers. The price is a copy into the stack and one out of it, and its memory,
which is capped. A CPU takes the matrices of a stack one after another, and gains what the
compiler does not see twice. It compiles a kernel for each place that a leaf has in its
stack, which caps their number.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import _sharding

Fn: TypeAlias = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]

MAX_BYTES = 2**28
MAX_LENGTH_CPU = 32
MAX_BYTES_TPU = 2**24
AT_ONCE_CPU = 2**20
AT_ONCE = 2**26  # A larger stack goes through Newton–Schulz in parts.
AT_ONCE_TPU = 2**24  # Operands of this size are fetched to the core's own memory.


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


def plan(
    kinds: Sequence[Kind], max_bytes: int, max_length: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Which arrays share a stack.

    They are stacked along a new axis. No axis is merged with another, over which an array
    may be sharded: layers of experts go together with layers of experts alone.

    Args:
      kinds: Of the arrays.
      max_bytes: What a stack may have. An array that has more is on its own.
      max_length: How many arrays it may have; None for any number.

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
        fitting = min(fitting, max_length or fitting)
        parts = np.array_split(members, math.ceil(len(members) / fitting))
        stacks += [tuple(part.tolist()) for part in parts]
    return tuple(sorted(stacks))


def map_stacks(
    fn: Fn,
    matrices: Sequence[jax.Array],
    max_bytes: int,
    max_length: int | None = None,
) -> list[jax.Array]:
    """``fn`` of arrays of matrices, by way of stacks.

    Args:
      fn: Keeps the shapes ``(*batch, m, n)`` of the arrays that it is given, and treats
        each matrix alone and like its transpose.
      matrices: Arrays of shape ``(*batch, m, n)``.
      max_bytes: As for :func:`plan`.
      max_length: As for :func:`plan`.

    Returns:
      The results, in the order of ``matrices``.
    """
    stacks = plan([Kind.of(x) for x in matrices], max_bytes, max_length)
    results = fn([_stacked([matrices[i] for i in members]) for members in stacks])
    found: dict[int, jax.Array] = {}
    for members, result in zip(stacks, results, strict=True):
        qs = [result] if len(members) == 1 else result
        for i, q in zip(members, qs, strict=True):
            found[i] = q if q.shape == matrices[i].shape else q.mT
    return [found[i] for i in range(len(matrices))]


def in_turns(
    fn: Callable[..., Sequence[jax.Array]],
    max_bytes: int,
    together: int,
    xs: Sequence[jax.Array],
    **of_each: Sequence[Any],
) -> list[jax.Array]:
    """``fn`` of arrays, a few parts of them at a time.

    Only axes that count matrices are divided, into parts of one length and a rest. An
    axis that types say is sharded is not: its devices have a part each.

    Args:
      fn: As for :func:`map_stacks`.
      max_bytes: What a part may have.
      together: How many parts ``fn`` is given at once.
      xs: Arrays of shape ``(*batch, m, n)``.
      of_each: Further arguments of ``fn``, with an entry for each array.
    """

    def of_parts(indices: Sequence[int], parts: Sequence[jax.Array]) -> Any:
        return fn(parts, **{k: [v[i] for i in indices] for k, v in of_each.items()})

    found: list[list[jax.Array]] = [[] for _ in xs]
    parts = []
    for i, x in enumerate(xs):
        length = _length(x, max_bytes)
        if len(x) > together * length:
            alike = functools.partial(_of_one, of_parts, i)
            found[i] = [_in_loop(alike, max_bytes, together, x)]
        else:
            parts += [(i, x[at : at + length]) for at in range(0, len(x), length)]
    for at in range(0, len(parts), together):
        turn = parts[at : at + together]
        indices = [i for i, _ in turn]
        results = of_parts(indices, [part for _, part in turn])
        for i, q in zip(indices, results, strict=True):
            found[i].append(q)
    return [qs[0] if len(qs) == 1 else jnp.concatenate(qs) for qs in found]


def _of_one(of_parts: Callable[..., Any], index: int, parts: Sequence[jax.Array]) -> Any:
    return of_parts([index] * len(parts), parts)


def _length(x: jax.Array, max_bytes: int) -> int:
    """How many of the first axis are a part: all if it counts no matrices, 0 if none."""
    each = x.size // len(x) * x.dtype.itemsize
    if x.ndim == 2 or _sharding.is_sharded(x) or len(x) * each <= max_bytes:
        return len(x)
    return max_bytes // each if x.ndim > 3 else max(1, max_bytes // each)


def _in_loop(fn: Fn, max_bytes: int, together: int, x: jax.Array) -> jax.Array:
    length = _length(x, max_bytes)
    if not length:
        return jax.lax.map(lambda y: in_turns(fn, max_bytes, together, [y])[0], x)
    turns = math.ceil(len(x) / (length * together))
    length = math.ceil(len(x) / (turns * together))
    whole = len(x) // (length * together) * (length * together)

    def turn(i: jax.Array, x: jax.Array) -> jax.Array:
        starts = [(i * together + k) * length for k in range(together)]
        parts = [jax.lax.dynamic_slice_in_dim(x, start, length) for start in starts]
        for start, q in zip(starts, fn(parts), strict=True):
            x = jax.lax.dynamic_update_slice_in_dim(x, q, start, axis=0)
        return x

    results = jax.lax.fori_loop(0, whole // (length * together), turn, x[:whole])
    if whole == len(x):
        return results
    return jnp.concatenate([results, *in_turns(fn, max_bytes, together, [x[whole:]])])


def _stacked(alike: Sequence[jax.Array]) -> jax.Array:
    if len(alike) == 1:
        return alike[0]
    return jnp.stack([x if _is_wide(x) else x.mT for x in alike])


def _is_wide(x: jax.Array) -> bool:
    return x.shape[-2] <= x.shape[-1]
