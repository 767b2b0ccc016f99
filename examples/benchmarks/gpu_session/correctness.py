"""`polar_factor` and `orscale` against the oracle.

An error is the norm of the difference from the float64 oracle, relative to the oracle's
norm (to 1 where that is zero); of steps, that of the change of the weights. Beside it
stands what rounding alone makes of it: the error of the plain iteration in NumPy, with
operands rounded to the same dtype. The Gram form, which `polar_factor` takes of wide
matrices in float16 and float32, has larger errors.

A matrix with NaN or infinity has to give NaN everywhere: there the error is the share of
other entries. Quartiles are over matrices.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.benchmarks.contenders import last_two_axes, step_of
from examples.benchmarks.gpu_session import figure, oracle
from examples.benchmarks.gpu_session.stage import Case, Measured, Stage
from examples.benchmarks.timing import Quartiles
from orscale_jax import orscale, polar_factor

Shape = tuple[int, int]
DTYPES = ("bfloat16", "float16", "float32")
ERROR, ROUNDING, RATE = "error", "error of rounding", 1e-2
_MATRICES = 4

# Singular values, by how many there are.
SPECTRA: Mapping[str, Callable[[int], np.ndarray]] = {
    "equal singular values": np.ones,
    "condition 10": lambda k: np.geomspace(1, 1e-1, k),
    "condition 1e3": lambda k: np.geomspace(1, 1e-3, k),
    "condition 1e6": lambda k: np.geomspace(1, 1e-6, k),
    "one large singular value": lambda k: np.where(np.arange(k) == 0, 1, 1e-3),
    "two levels": lambda k: np.where(np.arange(k) % 2 == 0, 1, 1e-2),
    "an eighth of full rank": lambda k: np.where(np.arange(k) < k // 8, 1.0, 0.0),
    "rank 1": lambda k: np.where(np.arange(k) == 0, 1.0, 0.0),
}
# What becomes of random matrices.
CHANGES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "random": lambda x: x,
    "random × 1e-30": lambda x: x * 1e-30,
    "random × 1e30": lambda x: x * 1e30,
    "a hundredth not zero": lambda x: np.where(np.abs(x) > 2.576, x, 0),
    "zero": np.zeros_like,
    "one NaN": lambda x: _with_first(x, np.nan),
    "one infinity": lambda x: _with_first(x, np.inf),
}
FULL_RANK = (*list(SPECTRA)[:6], *list(CHANGES)[:3])
# Factors of the three gradients that steps are taken with.
GRADIENTS = {
    "three steps": (1.0, 1.0, 1.0),
    "three steps, gradients × 1e-30": (1e-30,) * 3,
    "three steps, gradients × 1e30": (1e30,) * 3,
    "three steps, first gradient zero": (0.0, 1.0, 1.0),
    "three steps without gradients": (0.0, 0.0, 0.0),
    "three steps, last gradient NaN": (1.0, 1.0, np.nan),
}


class Expected(NamedTuple):
    """Inputs, the oracle's answers, and polar factors where the rank is full."""

    xs: np.ndarray
    qs: np.ndarray
    polar: np.ndarray | None


def inputs(kind: str, shape: Shape) -> np.ndarray:
    """Matrices of one kind in float32."""
    rng = np.random.default_rng(0)
    made = [_made(kind, shape, rng) for _ in range(_MATRICES)]
    return np.stack(made).astype(np.float32)


def _made(kind: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    if kind in CHANGES:
        return CHANGES[kind](rng.normal(size=shape))
    size = min(shape)
    u, v = (np.linalg.qr(rng.normal(size=(side, size)))[0] for side in shape)
    return u * SPECTRA[kind](size) @ v.T


def _with_first(x: np.ndarray, value: float) -> np.ndarray:
    x = x.copy()
    x[0, 0] = value
    return x


@functools.lru_cache(maxsize=1)  # Of all dtypes, which follow each other.
def expected(kind: str, shape: Shape) -> Expected:
    xs = inputs(kind, shape)
    wide = xs.astype(np.float64)
    if not np.isfinite(xs).all():
        return Expected(xs, np.full_like(wide, np.nan), None)
    exact = np.stack([*map(oracle.exact_polar, wide)]) if kind in FULL_RANK else None
    return Expected(xs, np.stack([*map(oracle.newton_schulz, wide)]), exact)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    if np.isnan(wanted).all():
        return float(np.mean(~np.isnan(found)))
    return float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) or 1.0))


def errors(found: np.ndarray, wanted: np.ndarray) -> Quartiles:
    return Quartiles.of(map(error, found, wanted))


_polar = jax.jit(polar_factor, static_argnames="dtype")


def of_factor(kind: str, shape: Shape, dtype: str) -> Iterator[Measured]:
    xs, wanted, exact = expected(kind, shape)
    found = np.asarray(_polar(xs, dtype=dtype), np.float64)
    yield Measured(ERROR, "", errors(found, wanted))
    if np.isnan(wanted).any():
        return
    rounded = [oracle.newton_schulz(x, jnp.dtype(dtype)) for x in xs.astype(np.float64)]
    yield Measured(ROUNDING, "", errors(np.stack(rounded), wanted))
    if exact is not None:
        yield Measured("distance from the polar factor", "", errors(found, exact))


@functools.cache
def _stepping(
    dtype: str,
) -> tuple[optax.GradientTransformation, Callable[..., tuple]]:
    optimizer = orscale(RATE, ns_dtype=dtype, weight_dimension_numbers=last_two_axes)
    return optimizer, jax.jit(step_of(optimizer))


def of_steps(kind: str, shape: Shape, dtype: str) -> Iterator[Measured]:
    rng = np.random.default_rng(1)
    factors = np.array(GRADIENTS[kind], np.float32)
    size = (1 + len(factors), _MATRICES, *shape)
    normal = rng.normal(size=size).astype(np.float32)
    weights = 0.02 * normal[0]
    grads = factors[:, None, None, None] * normal[1:]
    optimizer, step = _stepping(dtype)
    params = jnp.asarray(weights)
    state = optimizer.init(params)
    for g in grads:
        params, state = step(params, state, g)
    before, found = (np.asarray(x, np.float64) for x in (weights, params))
    of_each = grads.swapaxes(0, 1).astype(np.float64)
    if np.isfinite(of_each).all():
        pairs = zip(before, of_each, strict=True)
        wanted = np.stack([oracle.orscale(w, g, RATE) for w, g in pairs])
    else:
        wanted = np.full_like(before, np.nan)
    yield Measured(ERROR, "", errors(found - before, wanted - before))


def cases(tiny: bool) -> Sequence[Case]:
    wide, square = ((8, 24), (8, 8)) if tiny else ((512, 1280), (512, 512))
    kinds = [(of_factor, kind, wide) for kind in (*SPECTRA, *CHANGES)]
    kinds += [(of_factor, kind, square) for kind in ("condition 1e3", "random")]
    kinds += [(of_steps, kind, wide) for kind in GRADIENTS]
    return [
        Case(
            f"{kind}, {shape[0]}×{shape[1]}",
            dtype,
            functools.partial(measure, kind, shape, dtype),
        )
        for (measure, kind, shape), dtype in itertools.product(kinds, DTYPES)
    ]


STAGE = Stage(cases, figure.of_quantity(ERROR, "Errors against float64: quartiles"))
