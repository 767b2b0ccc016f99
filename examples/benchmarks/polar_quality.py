"""What singular values `polar_factor` returns, as a Markdown table.

    python -m examples.benchmarks.polar_quality

The input's singular values fall geometrically from 1 to 1 / condition; a cell is the
smallest and the largest singular value of the result, after the default five steps. The
rows "exact" compose the polynomials in float64.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import polar_factor
from orscale_jax.newton_schulz import coefficients

STEPS = 5
SHAPES = ((1, 1), (16, 16), (64, 256), (256, 256), (1024, 1024), (1024, 4096))
CONDITIONS = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
DTYPES = ("float32", "bfloat16", "float16")


def spectrum(size: int, condition: float) -> np.ndarray:
    return np.geomspace(1, 1 / condition, size)


def orthonormal(shape: tuple[int, int], seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=shape))[0]


def exact(singular_values: np.ndarray) -> np.ndarray:
    """The scalar composition, on the spectrum of norm 1."""
    x = singular_values / np.linalg.norm(singular_values)
    for a, b, c in np.asarray(coefficients.PRESETS["polar_express"])[:STEPS]:
        x = a * x + b * x**3 + c * x**5
    return x


def results(u: np.ndarray, v: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
    """Singular values of the result: exact, then by dtype."""
    x = jnp.asarray((u * values) @ v.T, jnp.float32)
    found = {"exact": exact(values)}
    for dtype in DTYPES:
        q = jax.jit(polar_factor, static_argnames="dtype")(x, dtype=dtype)
        found[dtype] = np.linalg.svd(np.asarray(q, np.float64), compute_uv=False)
    return found


def ranges(shape: tuple[int, int]) -> dict[tuple[str, float], tuple[float, float]]:
    """(lowest, highest) by arithmetic and condition number."""
    size = min(shape)
    u, v = (orthonormal((n, size), seed) for seed, n in enumerate(shape))
    found = {}
    for condition in CONDITIONS:
        by_arithmetic = results(u, v, spectrum(size, condition))
        for arithmetic, values in by_arithmetic.items():
            found[arithmetic, condition] = (float(values.min()), float(values.max()))
    return found


def lines() -> Iterator[str]:
    yield "| shape | dtype | " + " | ".join(f"{c:.0e}" for c in CONDITIONS) + " |"
    yield "|---|---|" + "---|" * len(CONDITIONS)
    for shape in SHAPES:
        found = ranges(shape)
        for arithmetic in ("exact", *DTYPES):
            cells = ["{:.3g}–{:.3f}".format(*found[arithmetic, c]) for c in CONDITIONS]
            size = "×".join(map(str, shape))
            yield f"| {size} | {arithmetic} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
