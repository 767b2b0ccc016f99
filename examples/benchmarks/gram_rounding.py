"""Restarts and errors of the Gram form in float16 and bfloat16, as Markdown tables.

    python -m examples.benchmarks.gram_rounding           # half a minute on a free core
    python -m examples.benchmarks.gram_rounding --quick   # without the errors

Errors are those of a NumPy emulation: operands are rounded, sums are float32. Every
product of two float16 or bfloat16 numbers is exact in float32. float16 has a small range,
so X is multiplied by a power of two near √min(m, n), at most 2⁷, and the argument of the
first row is divided by it.

"Error" is the largest distance in the spectral norm, over all matrices, to the exact
composition on the singular values: once of the X that was rounded to the dtype, once of
the X before. "Above" is by how much the largest singular value exceeds that of the exact
composition on [0, 1]. "Gaussian" is the error of a Gaussian X, that of rounding it
included, in the Frobenius norm and relative to the result.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
import scipy.linalg

from examples.benchmarks import polar_margins
from orscale_jax.newton_schulz import coefficients, restarts

UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
SHAPES = ((2048, 8192), (2048, 11008), (7168, 2048))
STEPS = {"deepseek_v4": (10,)}  # Of the others:
_STEPS = (5, 6, 8, 10)
BOUNDS = (1e-3, 1.2e-3, 1.5e-3, 2e-3, 3e-3)
PLANS = (
    ("bfloat16", (1, 2, 3, 4)),
    ("float16", (1, 2, 3, 4)),
    ("float16", (2, 4)),
    ("float16", (2,)),
    ("float16", ()),
)


# Restarts and operations.


def relative_operations(m: int, n: int, steps: int, count: int) -> float:
    """The operations with so many restarts, relative to the plain iteration's."""
    plain = steps - 1
    chosen = count if restarts.is_cheaper(m, n) else plain
    return restarts.flops(m, n, steps, chosen) / restarts.flops(m, n, steps, plain)


def named(before: Sequence[int], steps: int) -> str:
    return "every" if len(before) == steps - 1 else ", ".join(map(str, before)) or "none"


def restart_lines() -> Iterator[str]:
    shapes = " | ".join(f"{m}×{n}" for m, n in SHAPES)
    yield f"| preset | steps | operands | restarts before steps | {shapes} |"
    yield "|---|--:|---|---|" + "--:|" * len(SHAPES)
    for name, table in coefficients.PRESETS.items():
        for steps, dtype in itertools.product(STEPS.get(name, _STEPS), UNITS):
            rows = coefficients.rows_of(np.asarray(table), steps)
            before = restarts.restart_steps(rows, UNITS[dtype])
            operations = " | ".join(
                f"{relative_operations(m, n, steps, len(before)):.2f}" for m, n in SHAPES
            )
            heads = f"| `{name}` | {steps} | {dtype} | {named(before, steps)}"
            yield f"{heads} | {operations} |"


# Tables with fewer restarts.


def span(rows: np.ndarray, lower: float) -> tuple[float, float]:
    """The range to which the rows bring [lower, 1]."""
    x = compose(rows, np.geomspace(lower, 1, 100_001))
    return float(x.min()), float(x.max())


def highest_lower_end() -> float:
    """To which any table brings 1e-3 at most, if it restarts before step 2 alone.

    Two quintics leave at least the ratio U/ℓ of the two that are optimal. Steps 3 to 5
    have a gain of at least that of ℓ; the rule bounds their gain times U.
    """
    ends = 1e-3, 1.0
    for _ in range(2):
        row = coefficients.optimal_quintic(*ends)
        lower = float(coefficients.evaluate(row, ends[0]))
        ends = lower, 2 - lower
    gain_times_u = restarts._MAX_OVERSHOOT / (0.5 * UNITS["float16"])
    return gain_times_u * ends[0] / ends[1]


def bound_lines() -> Iterator[str]:
    """Five steps of the default's construction for other lower bounds."""
    heads = (
        "bound",
        "restarts before steps",
        "[1e-3, 1] to",
        "[bound, 1] to",
        "margin, %",
    )
    yield "| " + " | ".join(heads) + " |"
    yield "|--:|---|---|---|--:|"
    for bound in BOUNDS:
        rows = coefficients.polar_express_coefficients(bound)
        rows[0] = coefficients.divide_argument(rows[0], 1.02)
        before = restarts.restart_steps(coefficients.rows_of(rows, 5), UNITS["float16"])
        spans = ["[{:.3f}, {:.3f}]".format(*span(rows, x)) for x in (1e-3, bound)]
        margin = 100 * polar_margins.margin(rows, 5)
        cells = [f"{bound:g}", named(before, 5), *spans, f"{margin:.2f}"]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    highest = highest_lower_end()
    yield f"Restarting before step 2 alone, 1e-3 reaches at most {highest:.3f}."


# Errors.


def matrices(m: int, n: int) -> np.ndarray:
    """Wide matrices of norm 1 with adversarial spectra, in bases of two kinds."""
    rng = np.random.default_rng(0)
    spectra = [
        np.r_[np.full(7, 0.377), np.zeros(m - 7)],
        np.eye(m)[0],
        np.r_[1, np.full(m - 1, 1e-4)],
        np.r_[np.ones(m // 8), np.zeros(m - m // 8)],
        np.r_[np.ones(m // 4), np.full(m // 4, 1e-2), np.full(m // 2, 1e-4)],
        np.r_[np.full(4, 0.5), np.full(m - 4, 1e-3)],
        np.geomspace(1, 1e-4, m),
        10 ** rng.uniform(-6, 0, m),
        np.ones(m),
    ]
    random = [np.linalg.qr(rng.normal(size=(k, m)))[0] for k in (m, n)]
    # Entries of one size: rounding errors do not average out.
    hadamard = [scipy.linalg.hadamard(k)[:, :m] / np.sqrt(k) for k in (m, n)]
    found = [
        (u * sigma / np.linalg.norm(sigma)) @ v.T
        for sigma, (u, v) in itertools.product(spectra, (random, hadamard))
    ]
    x = rng.normal(size=(m, n))
    return np.stack([*found, x / np.linalg.norm(x)])


def compose(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    for row in rows:
        x = coefficients.evaluate(row, x)
    return x


class Exact:
    """The composition in float64, on the singular values of some matrices."""

    def __init__(self, xs: np.ndarray) -> None:
        self.u, self.sigma, self.vt = np.linalg.svd(xs, full_matrices=False)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return (self.u * compose(rows, self.sigma)[..., None, :]) @ self.vt


def largest_singular_value(xs: np.ndarray) -> float:
    """The largest singular value in a batch of matrices, computed in float64."""
    xs = xs.astype(np.float64)
    return float(np.sqrt(np.linalg.eigvalsh(xs @ xs.mT).max()))


def power_of_two(x: np.ndarray, dtype: str) -> float:
    if dtype != "float16":
        return 1.0
    return 2.0 ** min(7, round(np.log2(min(x.shape[-2:])) / 2))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(jnp.dtype(dtype)).astype(np.float32)


def segment(x: np.ndarray, rows: np.ndarray, dtype: str) -> np.ndarray:
    """The steps between two restarts, on wide matrices: a twin of ``gram._segment``."""
    gram, scale, p = x @ x.mT, np.float32(1), np.zeros(1, np.float32)
    for k, (a, b, c) in enumerate(rows.astype(np.float32)):
        r = rounded(gram, dtype)
        z = b * r + c * (r @ r)
        z_rounded = rounded(z, dtype)
        # P = scale I + p, of which the identity's part is not rounded.
        p = scale * z + a * p + (z_rounded @ rounded(p, dtype) if k else 0)
        scale *= a
        if k + 1 < len(rows):
            half = a * gram + r @ z_rounded
            gram = a * half + rounded(half, dtype) @ z_rounded
    return rounded(scale * x + rounded(p, dtype) @ x, dtype)


def iterate(
    x: np.ndarray, rows: np.ndarray, before: Sequence[int], dtype: str
) -> np.ndarray:
    power = power_of_two(x, dtype)
    rows = np.vstack([coefficients.divide_argument(rows[0], power), rows[1:]])
    x = rounded(power * x, dtype)
    for i, j in itertools.pairwise((0, *before, len(rows))):
        x = segment(x, rows[i:j], dtype)
    return x


def error_lines(m: int, n: int, names: Sequence[str]) -> Iterator[str]:
    heads = ("error", "with that of X", "above", "Gaussian")
    yield "| preset | operands | restarts | " + " | ".join(heads) + " |"
    yield "|---|---|---|" + "--:|" * len(heads)
    xs = matrices(m, n)
    exact, of_rounded = Exact(xs), {}
    for dtype in UNITS:
        power = power_of_two(xs, dtype)
        of_rounded[dtype] = Exact(rounded(power * xs, dtype) / np.float64(power))
    for name in names:
        rows = np.array(coefficients.rows_of(np.asarray(coefficients.PRESETS[name]), 5))
        top, of_x = compose(rows, np.linspace(0, 1, 10_001)).max(), exact(rows)
        for dtype, before in PLANS:
            q = iterate(xs, rows, before, dtype)
            errors = [
                largest_singular_value(q - e) for e in (of_rounded[dtype](rows), of_x)
            ]
            above = max(largest_singular_value(q) / top - 1, 0)
            relative = np.linalg.norm((q - of_x)[-1]) / np.linalg.norm(of_x[-1])
            row = f"| `{name}` | {dtype} | {named(before, 5)} | "
            row += " | ".join(f"{error:.3f}" for error in errors)
            yield f"{row} | {100 * above:.1f} % | {100 * relative:.2f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out the errors")
    tables = [restart_lines(), bound_lines()]
    if not parser.parse_args().quick:
        tables.append(error_lines(256, 1024, ("polar_express", "jordan", "dion")))
    for table in tables:
        print(*table, "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
