"""`polar_factor` and `orscale` against float64.

An error is the norm of the difference from an oracle in NumPy, relative to the oracle's
norm (to 1 where that is zero); of steps, that of the change of the weights. Beside it
stands what rounding alone makes of it: the error of the plain iteration in NumPy, with
operands rounded to the same dtype. The Gram form, which `polar_factor` takes of wide
matrices in float16 and float32, has larger errors.

A matrix with NaN or infinity has to give NaN everywhere: there the error is the share of
other entries. Quartiles are over matrices.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from examples.benchmarks.contenders import last_two_axes, step_of
from examples.benchmarks.gpu_session.session import Case, Measured
from examples.benchmarks.timing import Quartiles
from orscale_jax import orscale, polar_factor
from orscale_jax.newton_schulz.coefficients import PRESETS
from orscale_jax.transforms.stages import CONSISTENT_RMS, WEIGHT_DECAY
from orscale_jax.transforms.trust_ratio import EPS, R_MAX, R_MIN

Shape = tuple[int, int]
DTYPES = ("bfloat16", "float16", "float32")
ERROR, RATE, MATRICES = "error", 1e-2, 4
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
    "one NaN": lambda x: np.where(np.arange(x.size).reshape(x.shape), x, np.nan),
    "one infinity": lambda x: np.where(np.arange(x.size).reshape(x.shape), x, np.inf),
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
FIRST = ("random", "condition 1e3", "rank 1", "one NaN", "three steps")


def newton_schulz(x: np.ndarray, dtype: DTypeLike = np.float64) -> np.ndarray:
    """Five steps of the plain iteration on matrices; zeros give zeros.

    Operands of products are rounded to ``dtype``. Sums are in float64 for float64, and in
    float32 for narrower types.
    """
    wide = np.float64 if dtype == np.float64 else np.float32

    def rounded(y: np.ndarray) -> np.ndarray:
        return y.astype(dtype).astype(wide)

    norm = np.linalg.norm(x, axis=(-2, -1), keepdims=True)
    x = rounded(x / np.where(norm == 0, 1.0, norm))
    for a, b, c in np.asarray(PRESETS["polar_express"])[:5].tolist():
        gram = rounded(x @ x.mT)
        x = rounded(a * x + rounded(b * gram + c * gram @ gram) @ x)
    return x


def stepped(weight: np.ndarray, grads: Iterable[np.ndarray], rate: float) -> np.ndarray:
    """What Algorithm 1 with the defaults of `orscale` makes of one matrix."""
    momentum, c = np.zeros_like(weight), None
    for g in grads:
        momentum = 0.95 * momentum + g
        lookahead = 0.95 * momentum + g
        if c is None and not lookahead.any():
            continue  # Before its first direction a matrix does not decay.
        s = CONSISTENT_RMS * max(weight.shape) ** 0.5
        d = WEIGHT_DECAY * weight + s * newton_schulz(lookahead)
        norm = np.linalg.norm(weight)
        if c is None:
            c = norm / (np.linalg.norm(d) + EPS)
        ratio = norm / (np.linalg.norm(c * d) + EPS)
        weight = weight - rate * np.clip(ratio, R_MIN, R_MAX) * d
    return weight


def errors(found: np.ndarray, wanted: np.ndarray) -> Quartiles:
    """Of matrices."""
    if np.isnan(wanted).all():
        return Quartiles.of(np.mean(~np.isnan(found), axis=(1, 2)))
    differences, norms = (
        np.linalg.norm(x, axis=(1, 2)) for x in (found - wanted, wanted)
    )
    return Quartiles.of(differences / np.where(norms == 0, 1.0, norms))


@functools.lru_cache(maxsize=1)  # Of all dtypes, which follow each other.
def _expected(
    kind: str, shape: Shape
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Inputs, what the oracle makes of them, and polar factors where the rank is full."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(MATRICES):
        if kind in CHANGES:
            made.append(CHANGES[kind](rng.normal(size=shape)))
        else:
            k = min(shape)
            u, v = (np.linalg.qr(rng.normal(size=(side, k)))[0] for side in shape)
            made.append(u * SPECTRA[kind](k) @ v.T)
    xs = np.stack(made).astype(np.float32)
    wide = xs.astype(np.float64)
    if not np.isfinite(xs).all():
        return xs, np.full_like(wide, np.nan), None
    if kind not in FULL_RANK:
        return xs, newton_schulz(wide), None
    u, _, vt = np.linalg.svd(wide, full_matrices=False)
    return xs, newton_schulz(wide), u @ vt


_polar = jax.jit(polar_factor, static_argnames="dtype")


def _of_factor(kind: str, shape: Shape, dtype: str) -> Iterator[Measured]:
    xs, wanted, exact = _expected(kind, shape)
    found = np.asarray(_polar(xs, dtype=dtype), np.float64)
    yield Measured(ERROR, "", errors(found, wanted))
    if np.isnan(wanted).any():
        return
    rounded = newton_schulz(xs.astype(np.float64), jnp.dtype(dtype))
    yield Measured("error of rounding", "", errors(rounded, wanted))
    if exact is not None:
        yield Measured("distance from the polar factor", "", errors(found, exact))


@functools.partial(jax.jit, static_argnames="dtype")
def _after_steps(params: jax.Array, grads: jax.Array, dtype: str) -> jax.Array:
    optimizer = orscale(RATE, ns_dtype=dtype, weight_dimension_numbers=last_two_axes)
    step, held = step_of(optimizer), (params, optimizer.init(params))
    return jax.lax.scan(lambda held, g: (step(*held, g), None), held, grads)[0][0]


def _of_steps(kind: str, shape: Shape, dtype: str) -> Iterator[Measured]:
    size = (1 + len(GRADIENTS[kind]), MATRICES, *shape)
    normal = np.random.default_rng(1).normal(size=size).astype(np.float32)
    factors = np.array(GRADIENTS[kind], np.float32)[:, None, None, None]
    weights, grads = np.float32(0.02) * normal[0], factors * normal[1:]
    after = _after_steps(weights, grads, dtype)
    before, found, wide = (np.asarray(x, np.float64) for x in (weights, after, grads))
    wanted = np.full_like(before, np.nan)
    if np.isfinite(wide).all():
        pairs = zip(before, wide.swapaxes(0, 1), strict=True)
        wanted = np.stack([stepped(w, g, RATE) for w, g in pairs])
    yield Measured(ERROR, "", errors(found - before, wanted - before))


def groups(tiny: bool) -> Sequence[Sequence[Case]]:
    wide, square = ((8, 24), (8, 8)) if tiny else ((512, 1280), (512, 512))
    kinds = [(_of_factor, kind, wide) for kind in (*SPECTRA, *CHANGES)]
    kinds += [(_of_factor, kind, square) for kind in ("condition 1e3", "random")]
    kinds += [(_of_steps, kind, wide) for kind in GRADIENTS]

    def cases(wanted: bool) -> list[Case]:
        return [
            Case(f"{kind}, {shape[0]}×{shape[1]}", dtype, ERROR,
                 functools.partial(measure, kind, shape, dtype))
            for measure, kind, shape in kinds
            if (kind in FIRST and shape == wide) == wanted
            for dtype in DTYPES
        ]  # fmt: skip

    return cases(True), cases(False)
