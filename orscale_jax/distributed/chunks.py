"""Newton–Schulz of large stacks in chunks, which bounds its memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from orscale_jax.distributed.collectives import ColumnGroup
from orscale_jax.sharding import typed_sharding

# Arrays to their polar factors, given for each the devices that hold the other columns of
# its matrices, or None. A function, since fori_loop and map call it.
PolarOfArrays: TypeAlias = Callable[
    [Sequence[jax.Array], Sequence[ColumnGroup | None]], Sequence[jax.Array]
]


def map_chunks(
    polar: PolarOfArrays,
    xs: Sequence[jax.Array],
    columns: Sequence[ColumnGroup | None],
    chunk_bytes: int,
    interleave: int,
) -> list[jax.Array]:
    """Apply ``polar`` to a few chunks of arrays at a time.

    Only batch axes are divided, except those that are sharded by their types: each device
    already holds a part of these.

    Args:
      polar: The function of one turn's chunks.
      xs: Arrays of shape ``(*batch, m, n)``.
      columns: For each array, the devices that hold the other columns, or None.
      chunk_bytes: The largest chunk.
      interleave: The number of chunks that ``polar`` is given at once.
    """
    qs: list[list[jax.Array]] = [[] for _ in xs]
    chunks = []
    for i, x in enumerate(xs):
        length = _chunk_length(x, chunk_bytes)
        if len(x) > interleave * length:
            qs[i] = [_loop(polar, x, length, chunk_bytes, interleave)]
        else:
            chunks += [(i, x[at : at + length]) for at in range(0, len(x), length)]
    for at in range(0, len(chunks), interleave):
        turn = chunks[at : at + interleave]
        results = polar([chunk for _, chunk in turn], [columns[i] for i, _ in turn])
        for (i, _), q in zip(turn, results, strict=True):
            qs[i].append(q)
    return [some[0] if len(some) == 1 else jnp.concatenate(some) for some in qs]


def _chunk_length(x: jax.Array, chunk_bytes: int) -> int:
    """The length of a chunk along the first axis.

    The whole length if that axis may not be divided, and 0 if one entry exceeds the limit
    and has batch axes itself.
    """
    each = x.size // len(x) * x.dtype.itemsize
    if x.ndim == 2 or typed_sharding.is_sharded(x) or len(x) * each <= chunk_bytes:
        return len(x)
    return chunk_bytes // each if x.ndim > 3 else max(1, chunk_bytes // each)


def _loop(
    polar: PolarOfArrays, x: jax.Array, length: int, chunk_bytes: int, interleave: int
) -> jax.Array:
    """``polar`` of one array: in a loop over equal chunks, then of the remainder."""

    def in_chunks(x: jax.Array) -> jax.Array:
        return map_chunks(polar, [x], [None], chunk_bytes, interleave)[0]

    if not length:
        return jax.lax.map(in_chunks, x)
    turns = math.ceil(len(x) / (length * interleave))
    length = math.ceil(len(x) / (turns * interleave))
    whole = len(x) // (length * interleave) * (length * interleave)

    def turn(i: jax.Array, x: jax.Array) -> jax.Array:
        starts: list[Any] = [(i * interleave + k) * length for k in range(interleave)]
        chunks = [jax.lax.dynamic_slice_in_dim(x, start, length) for start in starts]
        results = polar(chunks, [None] * interleave)
        for start, q in zip(starts, results, strict=True):
            x = jax.lax.dynamic_update_slice_in_dim(x, q, start, axis=0)
        return x

    results = jax.lax.fori_loop(0, whole // (length * interleave), turn, x[:whole])
    if whole == len(x):
        return results
    return jnp.concatenate([results, in_chunks(x[whole:])])
