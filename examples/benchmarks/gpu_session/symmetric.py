"""Symmetric products in strips and whole.

In strips, a third of the FLOPs is saved and the part below the diagonal is copied from
the part above it, as on CPUs. GPUs multiply whole matrices. The share is that of the
FLOPs of the whole product: it may exceed 100 % in strips.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from examples.benchmarks.gpu_session import figure
from examples.benchmarks.gpu_session.rates import shares
from examples.benchmarks.gpu_session.stage import Case, Measured, Stage
from examples.benchmarks.timing import seconds_of
from orscale_jax.newton_schulz.arithmetic import Arithmetic

TIME = "time of a product"
# Of X in XXᵀ. That of a square X costs as much as the square of a Gram matrix.
SHAPES = ((768, 768), (768, 3072), (2048, 2048), (2048, 8192), (4096, 4096), (8192, 8192))
DTYPES, WAYS = ("bfloat16", "float16"), ("whole", "in strips")


def measured(
    shape: tuple[int, int], dtype: str, way: str, largest: int
) -> Iterator[Measured]:
    arithmetic = Arithmetic(jnp.dtype(dtype), by_strips=way == "in strips")
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    # Rounded, as every product of the iteration is.
    gram = jax.jit(lambda x: arithmetic.gram(x).astype(dtype))
    jax.block_until_ready(gram(x))
    seconds = seconds_of(lambda: gram(x))
    yield Measured(TIME, "µs", seconds.times(1e6))
    rows, columns = shape
    yield from shares(2.0 * rows**2 * columns, seconds, largest)


def cases(tiny: bool) -> Sequence[Case]:
    return [
        Case(
            f"XXᵀ of {shape[0]}×{shape[1]}",
            f"{dtype}, {way}",
            functools.partial(measured, shape, dtype, way, 32 if tiny else 8192),
        )
        for shape, dtype, way in itertools.product(
            ((384, 384),) if tiny else SHAPES, DTYPES, WAYS
        )
    ]


STAGE = Stage(cases, figure.of_quantity(TIME, "Symmetric products: quartiles"))
