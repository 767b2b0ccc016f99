"""Arrays in blockwise 8-bit integers: codes, and a scale for every 32 of them.

A block is 32 neighbours along one axis; the last one of an axis may be shorter. Blocks
follow from the shape alone, so that no mesh changes them. Codes have the shape of the
array and are sharded like it. Scales have as many axes, one of them divided. A shard of
whole blocks computes their scales by itself. Where shards cut blocks, devices exchange
the largest values of the pieces, and the scales are sharded along another axis.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.sharding import typed_sharding

#: Entries that share a scale, along one axis.
BLOCK = 32
#: The largest code. −128 is left out, so that x and −x have opposite codes.
LARGEST = 127
#: The smallest scale. Its quotient by 127 and the inverse of that are normal floats,
#: which no platform flushes to zero.
SMALLEST = 2.0**-119


def block_axis(axes: MatrixAxes, shape: tuple[int, ...]) -> int:
    """The axis of a leaf of matrices along which its blocks lie.

    The longest axis of the matrices; the leaf's last axis, whose entries are neighbours
    in memory, only if all others are shorter than a block. Never an axis along which
    matrices lie side by side, so that no block has entries of two matrices.
    """
    if axes.sizes:
        inside = [axis for axis in axes.matrix if axis != axes.block_axis]
    else:
        inside = list(axes.matrix)

    def preference(axis: int) -> tuple[bool, int]:
        return axis != len(shape) - 1 and shape[axis] >= BLOCK, shape[axis]

    return max(inside, key=preference)


def scales_of_zeros(codes: jax.Array, axis: int) -> jax.Array:
    """The scales of an array of zeros, sharded as those of these codes."""
    shape = [*codes.shape]
    shape[axis] = _count(codes, axis)
    scales = typed_sharding.full(shape, 0, jnp.bfloat16, codes)
    return typed_sharding.shard_as(scales, codes, _spec_of_scales(codes, axis))


def encode(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Round an array to codes and scales.

    Args:
      x: The array, of dtype float32 or float64.
      axis: The axis along which the blocks lie.

    Returns:
      Codes of dtype int8 in the shape of ``x``, and scales of dtype bfloat16 in the same
      shape but for ``axis``, which is 32 times shorter, rounded up.
    """
    codes, scales = encode_pieces(split(x, axis), x, axis)
    return merge(codes, axis, x), scales


def decode(codes: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The array that codes and scales stand for, in float32 or float64."""
    axis = axis_of(codes.shape, scales.shape)
    return merge(decode_pieces(codes, scales, axis, dtype), axis, codes)


def encode_pieces(
    pieces: jax.Array, like: jax.Array, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Codes of an array that is split as :func:`split` does, and its scales.

    Args:
      pieces: The array, split.
      like: An array of its whole shape and sharding.
      axis: The axis along which the blocks lie.
    """
    largest = largest_magnitude(pieces, axis + 1)
    # Rounding is monotone: the largest of the rounded values is the block's, rounded.
    scales = _of_blocks(_rounded(largest), like, axis)
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
    known = scales > 0
    inverse = jnp.where(known, scales, 1).astype(pieces.dtype)
    inverse = jnp.where(known, LARGEST / inverse, 0)
    inverse = jnp.expand_dims(_of_pieces(inverse, like, axis), axis + 1)
    codes = jnp.round(pieces * inverse)
    return jnp.where(jnp.isnan(codes), 0, codes).astype(jnp.int8), scales


def decode_pieces(
    codes: jax.Array, scales: jax.Array, axis: int, dtype: DTypeLike
) -> jax.Array:
    """The array that codes and scales stand for, split as :func:`split` does."""
    # The barrier keeps XLA for TPUs from moving the reshape, past which it does not fuse:
    # it would store the step of every entry.
    pieces = jax.lax.optimization_barrier(split(codes, axis)).astype(dtype)
    # XLA replaces a division by this multiplication, but not in all programs.
    steps = scales.astype(dtype) * jnp.asarray(1 / LARGEST, dtype)
    return pieces * jnp.expand_dims(_of_pieces(steps, codes, axis), axis + 1)


def split(x: jax.Array, axis: int) -> jax.Array:
    """The array with an axis split in two, the pieces of blocks and their entries."""
    piece = max(1, _piece(x, axis))
    widths = [(0, -x.shape[i] % piece if i == axis else 0) for i in range(x.ndim)]
    padded = jnp.pad(x, widths) if any(after for _, after in widths) else x
    count = padded.shape[axis] // piece
    return typed_sharding.split(padded, axis, max(1, count))


def merge(pieces: jax.Array, axis: int, like: jax.Array) -> jax.Array:
    """The inverse of :func:`split`, shaped and sharded like an array."""
    merged = typed_sharding.merge(pieces, axis)
    if merged.shape != like.shape:
        merged = jax.lax.slice_in_dim(merged, 0, like.shape[axis], axis=axis)
    return typed_sharding.shard_like(merged, like)


def axis_of(shape: tuple[int, ...], of_scales: tuple[int, ...]) -> int:
    """The axis along which the blocks lie, from the shapes of codes and scales."""
    lengths = list(zip(shape, of_scales, strict=True))
    differing = [axis for axis, (length, count) in enumerate(lengths) if length != count]
    return differing[0] if differing else shape.index(1)


def _rounded(largest: jax.Array) -> jax.Array:
    """The scales of pieces with these largest values; infinite for infinite ones."""
    wide = largest.astype(jnp.float32)
    # Not casts to bfloat16 and back, which XLA may leave out.
    scales = jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    return jnp.where(scales < SMALLEST, 0, scales).astype(jnp.bfloat16)


def _count(x: jax.Array, axis: int) -> int:
    """The number of blocks along an axis, at least one."""
    return max(1, -(-x.shape[axis] // BLOCK))


def _piece(x: jax.Array, axis: int) -> int:
    """The length of the pieces of blocks that an axis is split into.

    Whole blocks, unless shards cut them. A lone block that is shorter is one piece.
    """
    length, shards = x.shape[axis], typed_sharding.shards(x, axis)
    if shards == 1:
        return min(length, BLOCK)
    return math.gcd(length // shards, BLOCK)


def _spec_of_scales(x: jax.Array, axis: int) -> list[Any]:
    """The sharding of an array's scales.

    That of the array, if every shard has whole blocks. Otherwise another axis is sharded
    in place of the blocks', the longest that can be.
    """
    spec = typed_sharding.spec(x)
    shards = typed_sharding.shards(x, axis)
    if shards == 1 or x.shape[axis] // shards % BLOCK == 0:
        return spec
    moved, spec[axis] = typed_sharding.names(spec[axis]), None
    for other in sorted(range(x.ndim), key=lambda i: -x.shape[i]):
        both = typed_sharding.shards(x, other) * shards
        if other != axis and x.shape[other] % both == 0:
            spec[other] = (*typed_sharding.names(spec[other]), *moved)
            break
    return spec


def _of_blocks(of_pieces: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The scales of blocks, from those of their pieces."""
    scales = typed_sharding.shard_as(of_pieces, x, _spec_of_scales(x, axis))
    count = _count(x, axis)
    if scales.shape[axis] == count:
        return scales
    missing = count * (BLOCK // _piece(x, axis)) - scales.shape[axis]
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    blocks = typed_sharding.split(jnp.pad(scales, widths), axis, count)
    return largest_magnitude(blocks, axis + 1)


def _of_pieces(scales: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The inverse of :func:`_of_blocks`: the scale of each piece, sharded like them."""
    piece = max(1, _piece(x, axis))
    count = max(1, -(-x.shape[axis] // piece))
    if scales.shape[axis] != count:
        repeated = jnp.repeat(scales, BLOCK // piece, axis=axis)
        scales = jax.lax.slice_in_dim(repeated, 0, count, axis=axis)
    return typed_sharding.shard_like(scales, x)
