"""How far arithmetic may err before Newton–Schulz explodes, as a Markdown table.

    python -m tests.polar_margins

A singular value takes the step x → (a + bg + cs) x. What errs, each by a relative δ of
the worst sign:

- "products": g = x²(1 + δ₁), s = g²(1 + δ₂), and (bg + cs)x times (1 + δ₃);
- "roundings", those of `polar_factor`: g, bg + cs, the result;
- "result": the result alone.

The values that can be reached from [0, 1] fill an interval [0, U] at every step, since
zero stays zero; U is the largest value of |a'x + b'x³ + c'x⁵| on the interval before,
where a', b', c' are a, b, c at one of the corners of the errors. So U needs no grid.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from orscale_jax.newton_schulz import coefficients
from orscale_jax.newton_schulz.coefficients import polar_express_coefficients
from tests import oracle

BOUND = 10.0  # Beyond it every table explodes.
ERRORS = ("products", "roundings", "result")
STEPS = (3, 4, 5, 6, 8, 10, 20)
TABLES = {
    **{f"`{name}`": np.array(rows) for name, rows in coefficients.PRESETS.items()},
    "`safety_factor=1.05`": polar_express_coefficients(safety_factor=1.05),
}
_CORNERS = np.array(list(itertools.product([-1, 1], repeat=3)))


def corner_factors(errors: str, delta: float) -> np.ndarray:
    """What becomes of (a, b, c) at each corner, as factors of shape (8, 3)."""
    first, second, third = (1 + delta * _CORNERS).T
    exact = np.ones(len(_CORNERS))
    if errors == "products":
        factors = (exact, first * third, first**2 * second * third)
    elif errors == "roundings":
        factors = (third, first * second * third, first**2 * second * third)
    else:
        factors = (third, third, third)
    return np.stack(factors, axis=1)


def largest_reached(
    table: np.ndarray, steps: int, delta: float, errors: str = "products"
) -> float:
    """The upper end U of what singular values of [0, 1] can become; inf above BOUND."""
    upper = 1.0
    for row in np.array(oracle.rows_of(table, steps)):
        a, b, c = (row * corner_factors(errors, delta)).T
        discriminant = np.maximum(9 * b**2 - 20 * a * c, 0)
        squares = (-3 * b + np.outer([-1, 1], np.sqrt(discriminant))) / (10 * c)
        x = np.minimum(np.sqrt(np.maximum(squares, 0)), upper)
        x = np.vstack([x, np.full_like(a, upper)])
        upper = np.abs(x * (a + x**2 * (b + x**2 * c))).max()
        if upper > BOUND:
            return np.inf
    return float(upper)


def margin(table: np.ndarray, steps: int, errors: str = "products") -> float:
    """The largest relative error with which all singular values stay within BOUND."""
    low, high = 0.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        if largest_reached(table, steps, middle, errors) <= BOUND:
            low = middle
        else:
            high = middle
    return low


def lines() -> Iterator[str]:
    yield "| table | errors of | " + " | ".join(f"{k}" for k in STEPS) + " |"
    yield "| --- | --- |" + " --: |" * len(STEPS)
    for (name, table), errors in itertools.product(TABLES.items(), ERRORS):
        percent = [100 * margin(table, k, errors) for k in STEPS]
        margins = [f"{value:#.3g}".rstrip(".") for value in percent]
        yield f"| {name} | {errors} | " + " | ".join(margins) + " |"


if __name__ == "__main__":
    print("\n".join(lines()))
