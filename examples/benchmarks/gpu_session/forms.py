"""bfloat16 and float16; the Gram form and the plain iteration; by shape.

The restarts of the Gram form are those that the library takes in float16. In bfloat16 it
takes the plain iteration, since restarts before every step are needed there: the row of
the Gram form shows what that costs and saves. The difference is that from the plain
iteration in float32, relative to its norm.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from examples.benchmarks.contenders import NS_STEPS
from examples.benchmarks.gpu_session import figure
from examples.benchmarks.gpu_session.rates import shares
from examples.benchmarks.gpu_session.stage import Case, Measured, Stage
from examples.benchmarks.shapes import nominal_flops
from examples.benchmarks.timing import Quartiles, seconds_of
from orscale_jax.newton_schulz import restarts
from orscale_jax.newton_schulz.arithmetic import Arithmetic, Start
from orscale_jax.newton_schulz.coefficients import coefficient_table, rows_of
from orscale_jax.newton_schulz.polar import gram_newton_schulz

TIME = "time of five steps"
SHAPES = (
    (2048, 8192), (2048, 11008), (7168, 2048), (768, 3072), (768, 768), (2048, 2048),
    (4096, 4096),
)  # fmt: skip
DTYPES, FORMS = ("bfloat16", "float16"), ("plain", "Gram")


def five_steps(x: jax.Array, dtype: str, form: str) -> jax.Array:
    """Newton–Schulz on matrices of norm 1, in a form of the caller's choice."""
    rows = rows_of(np.asarray(coefficient_table("polar_express", NS_STEPS)), NS_STEPS)
    unit = float(jnp.finfo(jnp.float16).eps) / 2
    before = {
        "plain": tuple(range(1, NS_STEPS)),
        "Gram": restarts.restart_steps(rows, unit),
    }[form]
    start = Start(x.astype(dtype))
    [q] = gram_newton_schulz([start], rows, (before,), (Arithmetic(jnp.dtype(dtype)),))
    return q


def measured(
    shape: tuple[int, int], dtype: str, form: str, largest: int
) -> Iterator[Measured]:
    x = jax.random.normal(jax.random.key(0), shape)
    x /= jnp.linalg.norm(x)
    run = jax.jit(functools.partial(five_steps, dtype=dtype, form=form))
    found = np.asarray(run(x), np.float64)  # Compiles, too.
    seconds = seconds_of(lambda: run(x))
    yield Measured(TIME, "µs", seconds.times(1e6))
    yield from shares(nominal_flops({"x": shape}), seconds, largest)
    in_float32 = jax.jit(functools.partial(five_steps, dtype="float32", form="plain"))
    exact = np.asarray(in_float32(x), np.float64)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    yield Measured("difference", "", Quartiles.of([float(error)]))


def cases(tiny: bool) -> Sequence[Case]:
    shapes = ((8, 24), (8, 8)) if tiny else SHAPES
    return [
        Case(
            "×".join(map(str, shape)),
            f"{dtype}, {form}",
            functools.partial(measured, shape, dtype, form, 32 if tiny else 8192),
        )
        for shape, dtype, form in itertools.product(shapes, DTYPES, FORMS)
        if form == "plain" or restarts.is_cheaper(*shape)
    ]


STAGE = Stage(cases, figure.of_quantity(TIME, "Five steps of Newton–Schulz: quartiles"))
