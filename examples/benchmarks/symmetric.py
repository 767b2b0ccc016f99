"""Symmetric products with half of the operations, by a kernel for Hopper, and its counts.

    python -m examples.benchmarks.symmetric

The package does not use :func:`symmetric_product`, because no card has timed it. The
program counts what XLA's product and the kernel do on an H100. On a Hopper card it also
runs both and prints their times.

- *Tiles* are those that are computed, of all tiles of the matrices. For XLA's product we
  assume tiles of 128×256, which cuBLAS prefers for large matrices.
- *Waves* are the tiles for each of the 132 multiprocessors.
- *MB* counts operands and result once. *Loaded* counts the operands of each tile, which
  come from the L2 cache or from memory.
- *Modelled* times follow the model of :mod:`examples.benchmarks.hlo_cost`, which knows no
  waves. *In whole waves*, an incomplete wave takes as long as a complete one.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from examples.benchmarks.hlo_cost import Kernel
from examples.benchmarks.timing import Quartiles, seconds_of
from orscale_jax.newton_schulz.arithmetic import Arithmetic

# Multiprocessors of an H100, and the bytes of shared memory that each has.
SMS, SHARED = 132, 232_448
# A row of 64 numbers of 16 bits has the 128 bytes of the widest swizzle.
BLOCK = 64
ALPHA, TIMES = 0.5, 16  # A call that is timed takes so many products.
FLOAT16 = Arithmetic(jnp.dtype("float16"))
# X of (batch, m, k): of Gram matrices XXᵀ, or where X is square of sums C + αAB.
PRODUCTS = {
    "GPT-2": [(24, 768, 3072), (24, 768, 768), (12, 768, 768)],
    "1024 rows": [(8, 1024, 1024)],
    "2048 rows": [(1, 2048, 2048)],
    "4096 rows": [(1, 4096, 4096)],
    "4 blocks of 1.1B": [(12, 2048, 5632), (8, 2048, 2048)],
    "64 experts": [(64, 1408, 1408)],
}


def place(index: Any, n: int) -> tuple[Any, Any]:
    """The row and the column of a tile, of n(n + 1)/2 on and below the diagonal.

    Rows r and n - 1 - r have n + 1 tiles together, so that no root is needed.
    """
    r, at = index // (n + 1), index % (n + 1)
    is_long = at < n - r
    return jnp.where(is_long, n - 1 - r, r), jnp.where(is_long, at, at - (n - r))


def tile_of(size: int) -> int:
    """The side of the tiles: larger ones load less, if they need no padding."""
    return 192 if size % 192 == 0 else 128


def symmetric_product(
    c: jax.Array | None, alpha: float, a: jax.Array, b: jax.Array, tile: int | None = None
) -> jax.Array:
    """C + αABᵀ, where C and ABᵀ are symmetric.

    Operands and result have 16 bits, and sums are float32. The result is symmetric to the
    bit. Tiles above the diagonal are neither computed nor read of C. Operands whose sizes
    tiles do not divide are copied and padded.

    Args:
      c: ``(batch, m, m)``, or None for zeros.
      alpha: The factor.
      a, b: ``(batch, m, k)``.
      tile: The side of tiles, 64, 128 or 192.
    """
    batch, m, k = a.shape
    tile = tile or tile_of(m)
    more, more_k = -m % tile, -k % BLOCK
    if more or more_k:
        a, b = (jnp.pad(x, ((0, 0), (0, more), (0, more_k))) for x in (a, b))
        c = c if c is None else jnp.pad(c, ((0, 0), (0, more), (0, more)))
        return symmetric_product(c, alpha, a, b, tile)[:, :m, :m]
    groups, n = tile // BLOCK, m // tile  # A warpgroup computes 64 rows of a tile.
    triangle = n * (n + 1) // 2
    swizzled = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))

    def body(a_all: Any, b_all: Any, *others: Any) -> None:
        *c_all, out_all = others

        def pipeline(multiply: Callable, context: Callable) -> Any:
            spec = plgpu.BlockSpec((tile, BLOCK), lambda i: (0, i), transforms=swizzled)
            # Each stage takes 256 bytes for a row of the tile, and so do the blocks.
            return plgpu.emit_pipeline_warp_specialized(
                multiply, grid=(k // BLOCK,), in_specs=[spec, spec], memory_registers=40,
                max_concurrent_steps=SHARED // (256 * tile) - 1, compute_context=context,
                wg_axis="wg", num_compute_wgs=groups,
            )  # fmt: skip

        def compute(index: Any, stages: Any, blocks: Any, arrived: Any) -> None:
            wg, matrix = jax.lax.axis_index("wg"), index // triangle
            i, j = place(index % triangle, n)
            block, mirrored, out = blocks.at[wg, 0], blocks.at[wg, 1], out_all.at[matrix]

            def multiply(_: Any, a: Any, b: Any, sums: Any) -> Any:
                plgpu.wgmma(sums, a.at[pl.ds(wg * BLOCK, BLOCK)], b.T)
                plgpu.wgmma_wait(0)
                return sums

            def hold(sums: Any, *where: Any) -> None:
                sums = alpha * sums
                for c in c_all:
                    plgpu.copy_gmem_to_smem(c.at[matrix, *where], block, arrived.at[wg])
                    plgpu.barrier_wait(arrived.at[wg])
                    sums += block[...].astype(jnp.float32)
                found = sums.astype(a.dtype)
                block[...] = found
                mirrored.T[...] = plgpu.layout_cast(found, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()

            def store(sums: Any, row: Any, column: Any) -> None:
                rows, columns = (pl.ds(x * BLOCK, BLOCK) for x in (row, column))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(row >= column)(lambda: hold(sums, rows, columns))

                @pl.when(row > column)
                def _() -> None:
                    plgpu.copy_smem_to_gmem(block, out.at[rows, columns])
                    plgpu.copy_smem_to_gmem(mirrored, out.at[columns, rows])

            def store_all(evaluate: Callable, held: Any) -> None:
                evaluate(held)
                sums, row = held[...], i * groups + wg
                for at in range(groups):
                    part = sums[:, at * BLOCK : (at + 1) * BLOCK]
                    store(part, row, j * groups + at)

                @pl.when(i == j)  # Then the last block that is held lies on the diagonal.
                def _() -> None:
                    rows = pl.ds(row * BLOCK, BLOCK)
                    # An entry and its mirror image differ by rounding alone.
                    block[...] = jnp.maximum(block[...], mirrored[...])
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(block, out.at[rows, rows])

            def context(evaluate: Callable) -> None:
                sums = plgpu.WGMMAAccumulatorRef((BLOCK, tile), jnp.float32)
                pl.run_scoped(functools.partial(store_all, evaluate), sums)

            of_a, of_b = (
                x.at[matrix, pl.ds(at * tile, tile)] for x, at in ((a_all, i), (b_all, j))
            )
            pipeline(multiply, context)(of_a, of_b, allocations=stages)

        def every(**scratch: Any) -> None:
            plgpu.nd_loop((batch * triangle,), collective_axes="sm")(
                lambda info: compute(*info.index, **scratch)
            )

        of_pipeline = pipeline(lambda *_: None, lambda *_: None)
        pl.run_scoped(
            every,
            stages=of_pipeline.get_allocations(a_all.at[0], b_all.at[0]),
            # Of each warpgroup: a block, and its transpose.
            blocks=plgpu.SMEM((groups, 2, BLOCK, BLOCK), a.dtype, transforms=swizzled),
            arrived=plgpu.Barrier(num_barriers=groups),
            collective_axes="wg",
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    body.__name__ = f"symmetric_{m}x{k}"
    semantics = plgpu.LoweringSemantics.Warpgroup
    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((batch, m, m), a.dtype),
        grid=(min(SMS, batch * triangle),), grid_names=("sm",),
        num_threads=groups + 1, thread_name="wg",  # One of them fetches.
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )(a, b, *([] if c is None else [c]))  # fmt: skip


def by_xla(c: jax.Array | None, alpha: float, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product as the package computes it."""
    if c is None:
        return FLOAT16.round(FLOAT16.gram(a))
    return FLOAT16.add_product(c, alpha, a, b)


FORMS = {"XLA": by_xla, "kernel": symmetric_product}


def counts(form: str, batch: int, m: int, k: int) -> Iterator[str]:
    """Cells of the table, by the model of an H100."""
    height, width = (128, 256) if form == "XLA" else (tile_of(m),) * 2
    every = tiles = batch * math.ceil(m / height) * math.ceil(m / width)
    if form == "kernel":
        tiles = (every + batch * math.ceil(m / height)) // 2
    flops, waves = 2 * height * width * k, tiles / SMS
    computed = 2 * batch * m * m * k * tiles // every
    nbytes = 2 * batch * m * (4 * m if m == k else k + m)
    yield f"{tiles} of {every}"
    yield f"{waves:.2f}"
    yield f"{computed / 1e9:.1f}"
    yield f"{nbytes / 1e6:.1f}"
    yield f"{2 * tiles * (height + width) * k / 1e6:.0f}"
    for number in (computed, math.ceil(waves) * SMS * flops):
        yield f"{1e6 * Kernel('', '', '', 1, nbytes, number).seconds:.1f}"


def several(form: str, held: Any) -> Any:
    """The last of several products; C, A and B are held, and a first result."""

    def one(_: Any, held: Any) -> Any:
        # The barrier keeps XLA from computing the product only once.
        (c, a, b), _ = jax.lax.optimization_barrier(held)
        return (c, a, b), FORMS[form](c, ALPHA, a, b)

    return jax.lax.fori_loop(0, TIMES, one, held)[1]


def seconds(form: str, *shape: int) -> Quartiles:
    """The time of one of several products inside a call, on JAX's first device."""
    x = jax.random.normal(jax.random.key(0), shape, jnp.float16) / 32
    given = (x + x.mT, x @ x.mT, x @ x.mT) if shape[1] == shape[2] else (None, x, x)
    held = given, FORMS[form](given[0], ALPHA, *given[1:])
    call = jax.jit(functools.partial(several, form))
    jax.block_until_ready(call(held))
    return seconds_of(lambda: call(held)).times(1 / TIMES)


def on_hopper() -> bool:
    """Whether JAX's first device can run the kernel."""
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def main() -> None:
    """Prints the table."""
    heading = ["product", "by", "tiles", "waves", "GFLOP", "MB", "loaded, MB"]
    heading += ["modelled, µs", "in whole waves, µs"] + ["timed, µs"] * on_hopper()
    print(f"| {' | '.join(heading)} |")
    print("| --- | --- |" + " --: |" * (len(heading) - 2))
    for name, shapes in PRODUCTS.items():
        for shape in shapes:
            for form in FORMS:
                what = f"{name}, {'×'.join(map(str, shape))}"
                cells = [what, form, *counts(form, *shape)]
                if on_hopper():
                    cells.append(f"{1e6 * seconds(form, *shape).median:.1f}")
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
