"""Symmetric products on TPUs, by Pallas: a turn of the grid for each pair of tiles.

The grid is (matrices, pairs of tiles, steps + 1). The steps add up a tile, and the last
one writes it. The turn after that has the tile's mirror image as its output, and writes
the tile transposed. Pallas's pipeline decides when each goes to memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from orscale_jax.newton_schulz.symmetric import (
    Axes,
    Kernel,
    contracted,
    multiply,
    pair,
    pairs,
    tiles_along,
)


def product(x: jax.Array, y: jax.Array, axes: Axes, kernel: Kernel) -> jax.Array:
    """The symmetric product of operands with one batch axis."""
    of_x, of_y = axes
    count, size, summed = len(x), x.shape[of_x], x.shape[-3 - of_x]
    tile, depth = kernel.tile_of(size), min(kernel.depth, summed)
    along, steps = tiles_along(size, tile), tiles_along(summed, depth)

    def operand(of: int, which: int) -> pl.BlockSpec:
        def index(batch: Any, p: Any, step: Any) -> tuple[Any, ...]:
            place = (pair(p, along)[which], jnp.minimum(step, steps - 1))
            return (batch, *(place if of == -2 else place[::-1]))

        sides = (tile, depth) if of == -2 else (depth, tile)
        return pl.BlockSpec((None, *sides), index)

    def mirrored(batch: Any, p: Any, step: Any) -> tuple[Any, ...]:
        row, column = pair(p, along)
        last = step == steps
        return batch, jnp.where(last, column, row), jnp.where(last, row, column)

    body = functools.partial(
        _turn, axes=axes, along=along, steps=steps, summed=summed, depth=depth
    )
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((count, size, size), jnp.float32),
        grid=(count, pairs(along), steps + 1),
        in_specs=[operand(of_x, 0), operand(of_y, 1)],
        out_specs=pl.BlockSpec((None, tile, tile), mirrored),
        scratch_shapes=[pltpu.VMEM((tile, tile), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=count * pairs(along) * 2 * tile * tile * summed,
            bytes_accessed=count
            * (pairs(along) * 2 * tile * summed * x.dtype.itemsize + 4 * size * size),
            transcendentals=0,
        ),
        interpret=kernel.interpret,
        name="symmetric_product",
    )(x, y)


def _turn(
    x_ref: Any,
    y_ref: Any,
    out_ref: Any,
    total: Any,
    *,
    axes: Axes,
    along: int,
    steps: int,
    summed: int,
    depth: int,
) -> None:
    """One step of one tile, or its mirror image."""
    step = pl.program_id(2)
    row, column = pair(pl.program_id(1), along)
    whole = summed // depth  # The steps whose parts are full.

    def existing(ref: Any, of: int) -> jax.Array:
        """A part with zeros beyond its end, where there may be anything, even NaN."""
        at = jax.lax.broadcasted_iota(jnp.int32, ref.shape, contracted(of))
        return jnp.where(at < summed - step * depth, ref[...], jnp.zeros_like(ref))

    @pl.when(step == 0)
    def begin() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(step < whole)
    def add() -> None:
        total[...] += multiply(x_ref[...], y_ref[...], axes)

    @pl.when((step >= whole) & (step < steps))
    def add_the_rest() -> None:
        of_x, of_y = axes
        total[...] += multiply(existing(x_ref, of_x), existing(y_ref, of_y), axes)

    @pl.when(step == steps - 1)
    def write() -> None:
        out_ref[...] = total[...]

    @pl.when((step == steps) & (row != column))
    def mirror() -> None:
        out_ref[...] = total[...].T
