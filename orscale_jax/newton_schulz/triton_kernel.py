"""Symmetric products on GPUs, by Pallas and Triton: a program for each pair of tiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from orscale_jax.newton_schulz.symmetric import (
    Axes,
    Kernel,
    contracted,
    multiply,
    pair,
    pairs,
    tiles_along,
)

# Two groups of four warps, as Hopper's matrix units take; three loads under way.
_WARPS = 8
_STAGES = 3


def product(x: jax.Array, y: jax.Array, axes: Axes, kernel: Kernel) -> jax.Array:
    """The symmetric product of operands with one batch axis."""
    count, size = len(x), x.shape[axes[0]]
    tile = kernel.tile_of(size)

    def matrix(rows: int, columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, columns), lambda batch, _: (batch, 0, 0))

    return pl.pallas_call(
        functools.partial(_tile, axes=axes, tile=tile, depth=kernel.depth),
        out_shape=jax.ShapeDtypeStruct((count, size, size), jnp.float32),
        grid=(count, pairs(tiles_along(size, tile))),
        in_specs=[matrix(*x.shape[-2:]), matrix(*y.shape[-2:])],
        out_specs=matrix(size, size),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=kernel.interpret,
        name="symmetric_product",
    )(x, y)


def _tile(
    x_ref: Any, y_ref: Any, out_ref: Any, axes: Axes, tile: int, depth: int
) -> None:
    """One tile of the product, and its mirror image."""
    of_x, of_y = axes
    row, column = pair(pl.program_id(1), tiles_along(out_ref.shape[0], tile))
    steps = tiles_along(x_ref.shape[contracted(of_x)], depth)

    def part(ref: Any, of: int, at: jax.Array, step: jax.Array) -> jax.Array:
        place = (at, step) if of == -2 else (step, at)
        sides = (tile, depth) if of == -2 else (depth, tile)
        window, inside = _window(ref, place, sides)
        other = None if inside is None else 0.0
        return plgpu.load(window, mask=inside, other=other)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        left = part(x_ref, of_x, row, step)
        return total + multiply(left, part(y_ref, of_y, column, step), axes)

    total = jnp.zeros((tile, tile), jnp.float32)
    total = jax.lax.fori_loop(np.int32(0), np.int32(steps), add, total)
    _store(out_ref, (row, column), total)

    # On the diagonal two stores to one place would race.
    @pl.when(row != column)
    def mirror() -> None:
        _store(out_ref, (column, row), total.T)


def _store(ref: Any, place: tuple[jax.Array, jax.Array], tile: jax.Array) -> None:
    window, inside = _window(ref, place, tile.shape)
    plgpu.store(window, tile, mask=inside)


def _window(
    ref: Any, place: tuple[jax.Array, jax.Array], sides: tuple[int, ...]
) -> tuple[Any, jax.Array | None]:
    """A tile of a matrix, and which of its entries exist; None for all."""
    starts = [at * side for at, side in zip(place, sides, strict=True)]
    inside = None
    for axis, (start, side) in enumerate(zip(starts, sides, strict=True)):
        if ref.shape[axis] % side:
            places = start + jax.lax.broadcasted_iota(start.dtype, sides, axis)
            exists = places < ref.shape[axis]
            inside = exists if inside is None else inside & exists
    return ref.at[tuple(pl.ds(*each) for each in zip(starts, sides, strict=True))], inside
