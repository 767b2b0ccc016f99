"""Arrays in blockwise 8-bit integers: codes, and a scale for every 32 of them.

A block is 32 neighbours along one axis; the last one of an axis may be shorter. Blocks
follow from the shape alone, so that no mesh changes them. Codes have the shape of the
array. Scales have as many axes, one of them divided: both can be sharded like the array.
A shard of whole blocks computes their scales by itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from orscale_jax.parameters.blocks import LeafAxes, MatrixBlocks
from orscale_jax.sharding import typed_sharding

#: Entries that share a scale, along one axis.
BLOCK = 32
#: The largest code. −128 is left out, so that x and −x have opposite codes.
LARGEST = 127
#: The smallest scale. Its quotient by 127 and the inverse of that are normal floats,
#: which no platform flushes to zero.
SMALLEST = 2.0**-119


def block_axis(axes: LeafAxes, shape: tuple[int, ...]) -> int:
    """The axis of a leaf of matrices along which its blocks lie.

    The longest axis of the matrices; the leaf's last axis, whose entries are neighbours
    in memory, only if all others are shorter than a block. Never an axis along which
    matrices lie side by side, so that no block has entries of two matrices.
    """
    if isinstance(axes, MatrixBlocks):
        inside = [axis for axis in axes.whole.matrix if axis != axes.axis]
    else:
        inside = list(axes.matrix)

    def preference(axis: int) -> tuple[bool, int]:
        return axis != len(shape) - 1 and shape[axis] >= BLOCK, shape[axis]

    return max(inside, key=preference)


def scales_of_zeros(codes: jax.Array, axis: int) -> jax.Array:
    """The scales of an array of zeros, sharded as those of these codes."""
    blocks = _split(codes, axis)
    shape, entries = list(blocks.shape), typed_sharding.spec(blocks)
    del shape[axis + 1], entries[axis + 1]
    return typed_sharding.shard_as(jnp.zeros(shape, jnp.bfloat16), codes, entries)


def encode(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Round an array to codes and scales.

    Args:
      x: The array, of dtype float32 or float64.
      axis: The axis along which the blocks lie.

    Returns:
      Codes of dtype int8 in the shape of ``x``, and scales of dtype bfloat16 in the same
      shape but for ``axis``, which is 32 times shorter, rounded up.
    """
    blocks = _split(x, axis)
    largest = jnp.max(jnp.abs(blocks), axis=axis + 1, keepdims=True, initial=0)
    scales = _scales(largest)
    known = scales > 0
    # A division of every entry becomes this product in XLA, without the factor 127: its
    # reciprocal would be subnormal for the largest scales.
    codes = jnp.round(blocks * (LARGEST / jnp.where(known, scales, 1)))
    codes = jnp.where(known, codes, 0).astype(jnp.int8)
    return _merge(codes, axis, x), jnp.squeeze(scales, axis + 1).astype(jnp.bfloat16)


def decode(codes: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The array that codes and scales stand for, in float32 or float64."""
    axis = axis_of(codes.shape, scales.shape)
    blocks = _split(codes, axis)
    entries: list[Any] = typed_sharding.spec(blocks)
    entries[axis + 1] = None
    scales = jnp.expand_dims(scales, axis + 1).astype(dtype)
    scales = typed_sharding.shard_as(scales, blocks, entries)
    # XLA replaces a division by this multiplication, but not in all programs.
    parts = blocks.astype(dtype) * jnp.asarray(1 / LARGEST, dtype)
    return _merge(parts * scales, axis, codes)


def axis_of(shape: tuple[int, ...], of_scales: tuple[int, ...]) -> int:
    """The axis along which the blocks lie, from the shapes of codes and scales."""
    lengths = list(zip(shape, of_scales, strict=True))
    differing = [axis for axis, (length, count) in enumerate(lengths) if length != count]
    return differing[0] if differing else shape.index(1)


def _scales(largest: jax.Array) -> jax.Array:
    """The scales of blocks with these largest values, in the same dtype."""
    wide = largest.astype(jnp.float32)
    # Not casts to bfloat16 and back, which XLA may leave out.
    scales = jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    scales = jnp.where(scales < SMALLEST, 0, scales)
    return jnp.where(jnp.isfinite(scales), scales, jnp.nan).astype(largest.dtype)


def _split(x: jax.Array, axis: int) -> jax.Array:
    """The array with an axis split in two, the blocks and their entries."""
    length = x.shape[axis]
    count = max(1, -(-length // BLOCK))
    if count > 1 and length % BLOCK:
        whole = typed_sharding.gather(x, (axis,))
        widths = [(0, -length % BLOCK if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(whole, widths)
    return typed_sharding.split(x, axis, count)


def _merge(blocks: jax.Array, axis: int, like: jax.Array) -> jax.Array:
    """The inverse of :func:`_split`, shaped and sharded like an array."""
    merged = typed_sharding.merge(blocks, axis)
    if merged.shape != like.shape:
        merged = jax.lax.slice_in_dim(merged, 0, like.shape[axis], axis=axis)
    return typed_sharding.shard_like(merged, like)
