"""Symmetric products by Pallas against XLA's: whether they pay on this machine.

    python -m examples.benchmarks.symmetric                      # on a GPU or TPU
    python -m examples.benchmarks.symmetric --compile-only h100  # needs no GPU
    python -m examples.benchmarks.symmetric --compile-only v5e   # needs no TPU

Each row is a product, or the whole polar factor, of bfloat16 matrices: first by XLA, then
by the kernel, in turns on the same operands. Times are medians. A factor has products
that are not symmetric, too, which XLA computes either way. The kernel pays where every
factor is faster by ``--margin``.

Where it compiles only, FLOPs are those that the compiler sees: none of a kernel's.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import SingleDeviceSharding

from examples.benchmarks import hlo_cost, topologies
from examples.benchmarks.contenders import last_two_axes
from orscale_jax import orthogonalize
from orscale_jax.distributed.platforms import PLATFORMS
from orscale_jax.newton_schulz.symmetric import (
    SUBSCRIPTS,
    Axes,
    Kernel,
    pairs,
    symmetric_product,
    tiles_along,
)

Shape: TypeAlias = tuple[int, ...]
Function: TypeAlias = Callable[[jax.Array], jax.Array]

SHAPES: tuple[Shape, ...] = (
    (768, 3072),
    (3072, 768),
    (2048, 8192),
    (8192, 2048),
    (2048, 2048),
    (1000, 3000),
    (8, 768, 3072),
    (16, 2048, 1408),
)
WIDE: dict[str, Axes] = {"XXᵀ": (-2, -2)}
TALL: dict[str, Axes] = {"XᵀX": (-1, -1)}
SQUARE: dict[str, Axes] = {"XXᵀ": (-2, -2), "AA": (-2, -1)}
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to do."""

    compile_only: Literal["h100", "v5e", "v5p"] | None = None
    """A device to compile for, which need not be there; nothing is timed then."""
    turns: int = 20
    """How often each program is timed."""
    calls: int = 10
    """Calls in one turn; the device is waited for after the last."""
    margin: float = 0.02
    """The share of its time by which a factor has to be faster."""


class Row(NamedTuple):
    """One computation by XLA, and by the kernel.

    Attributes:
      shape: The shape of the operand.
      name: What is computed.
      tiles: The share of the tiles that the kernel computes, for a product.
      by_xla: Computes it without the kernel.
      by_kernel: Computes it with the kernel.
    """

    shape: Shape
    name: str
    tiles: float | None
    by_xla: Function
    by_kernel: Function

    @property
    def head(self) -> list[str]:
        tiles = "" if self.tiles is None else f"{100 * self.tiles:.0f} %"
        return ["×".join(map(str, self.shape)), self.name, tiles]


def rows_of(shape: Shape, kernel: Kernel) -> Iterator[Row]:
    """The symmetric products of matrices of a shape, and their polar factor."""
    m, n = shape[-2:]
    along = tiles_along(min(m, n), kernel.tile_of(min(m, n)))
    for name, axes in (SQUARE if m == n else WIDE if m < n else TALL).items():
        yield Row(
            shape,
            name,
            pairs(along) / along**2,
            functools.partial(by_einsum, axes=axes),
            functools.partial(by_kernel, axes=axes, kernel=kernel),
        )
    by_name = {
        name: functools.partial(factor, ns_products=name) for name in ("xla", "pallas")
    }
    yield Row(shape, "factor", None, by_name["xla"], by_name["pallas"])


def by_einsum(x: jax.Array, axes: Axes) -> jax.Array:
    return jnp.einsum(SUBSCRIPTS[axes], x, x, preferred_element_type=jnp.float32)


def by_kernel(x: jax.Array, axes: Axes, kernel: Kernel) -> jax.Array:
    return symmetric_product(x, x, axes, kernel)


def factor(x: jax.Array, ns_products: str) -> jax.Array:
    """Polar factors, as the optimizers compute them."""
    stage = orthogonalize(ns_products=ns_products, weight_dimension_numbers=last_two_axes)
    q, _ = stage.update({"x": x}, stage.init({"x": x}))
    return q["x"]


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def print_head(figures: list[str]) -> None:
    head = ["shape", "computed", "tiles", *figures]
    print(line(head))
    print(line(["---"] * 2 + ["--:"] * (len(head) - 2)))


def in_turns(row: Row, options: Options) -> list[float]:
    """Median seconds of a call, by XLA and by the kernel, after one call to compile."""
    x = jax.random.normal(jax.random.key(0), row.shape, jnp.bfloat16)
    functions = [jax.jit(row.by_xla), jax.jit(row.by_kernel)]
    for function in functions:
        jax.block_until_ready(function(x))
    times: list[list[float]] = [[], []]
    for _ in range(options.turns):
        for function, found in zip(functions, times, strict=True):
            start = time.perf_counter()
            for _ in range(options.calls):
                result = function(x)
            jax.block_until_ready(result)
            found.append((time.perf_counter() - start) / options.calls)
    return [statistics.median(found) for found in times]


def time_all(kernel: Kernel, options: Options) -> None:
    """Print the times, and whether the kernel pays."""
    print_head(["XLA, ms", "kernel, ms", "XLA over kernel"])
    ratios = []
    for shape in SHAPES:
        for row in rows_of(shape, kernel):
            by_xla, by_kernel = in_turns(row, options)
            figures = [f"{1e3 * by_xla:.4g}", f"{1e3 * by_kernel:.4g}"]
            print(line([*row.head, *figures, f"{by_xla / by_kernel:.2f}"]), flush=True)
            if row.name == "factor":
                ratios.append(by_xla / by_kernel)
    print(verdict(ratios, options.margin))


def verdict(ratios: list[float], margin: float) -> str:
    """One line that says whether the kernel pays, from the factors' times by XLA over
    those by the kernel."""
    found = f"the factors' times by XLA are {min(ratios):.2f} to {max(ratios):.2f} times "
    found += "those with the kernel"
    least = 1 / (1 - margin)
    if min(ratios) >= least:
        return f'It pays: {found}. Pass ns_products="pallas".'
    if max(ratios) < least:
        return f'It does not pay: {found}. Keep ns_products="xla".'
    return f"It pays for some shapes: {found}. Time your own model with both."


def compile_all(kernel: Kernel, device: jax.Device, compiler_options: dict) -> None:
    """Print what the compiler says of the programs."""
    kinds = ("XLA", "kernel")
    figures = ("GFLOP", "temporaries, MiB", "kernels")
    print_head([f"{kind}: {figure}" for figure in figures for kind in kinds])
    for shape in SHAPES:
        x = jax.ShapeDtypeStruct(
            shape, jnp.bfloat16, sharding=SingleDeviceSharding(device)
        )
        for row in rows_of(shape, kernel):
            compiled = [
                jax.jit(function).lower(x).compile(compiler_options=compiler_options)
                for function in (row.by_xla, row.by_kernel)
            ]
            print(line([*row.head, *figures_of(compiled)]), flush=True)


def figures_of(programs: list[jax.stages.Compiled]) -> list[str]:
    """FLOPs, temporaries and kernels, each of all programs."""
    costs = [hlo_cost.of(program.as_text() or "") for program in programs]
    memory: list[Any] = [program.memory_analysis() for program in programs]
    return [
        *(f"{cost.flops / 1e9:.4g}" for cost in costs),
        *(f"{found.temp_size_in_bytes / 2**20:.4g}" for found in memory),
        *(f"{cost.kernels}" for cost in costs),
    ]


def platform_kernel(platform: str) -> Kernel:
    """The kernel of a platform.

    Raises:
      SystemExit: If it has none.
    """
    kernel = PLATFORMS[platform].kernel
    if kernel is None:
        raise SystemExit(
            f"There is no GPU and no TPU here: JAX runs on the {platform.upper()}, which "
            "has no such kernel. Nothing was timed. To compile for a device without "
            "having one, pass --compile-only h100, v5e or v5p."
        )
    return kernel


def main(options: Options) -> None:
    target = options.compile_only
    if target is None:
        time_all(platform_kernel(jax.default_backend()), options)
    elif target == "h100":
        [device] = topologies.h100s(1)
        gpu_options = topologies.GPU_COMPILER_OPTIONS
        compile_all(platform_kernel("gpu"), device, gpu_options)
    else:
        device = topologies.tpus(TOPOLOGIES[target])[0]
        compile_all(platform_kernel("tpu"), device, {})


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    if options.compile_only is not None:
        # Its own backend is the CPU's: no accelerator is looked for.
        jax.config.update("jax_platforms", "cpu")
    main(options)
