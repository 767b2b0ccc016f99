r"""Coefficients of Newton–Schulz: one odd quintic for each step.

One step maps every singular value by :math:`p(x) = ax + bx^3 + cx^5`. A table has one
row ``(a, b, c)`` for each step; beyond the table, every step takes its last row. To add
a preset, add its line to ``PRESETS``.

Stability margins: let each of a step's three products, :math:`A = XX^\top`, :math:`A^2`
and :math:`(bA + cA^2)X`, have a relative error :math:`\delta`, with the worst sign for
every product of every step. A table's margin is the largest :math:`\delta` for which
singular values that start in [0, 1] stay bounded (by 10; beyond it they explode). Where
the errors are roundings of the operands instead (A, the polynomial, the result), the
margin is a little smaller: it has to exceed the unit roundoff of the dtype.
``python -m tests.polar_margins`` prints both by number of steps.

Greedy optimal quintics (the Polar Express construction): the polynomial nearest to 1 on
an interval misses it by the same amount four times, with alternating signs: at both ends
and at its two interior extremes (Chebyshev). The next such polynomial is that for the
image of :math:`p`, :math:`[\ell, 2 - \ell]`, and so on. Everything is float64 NumPy and
runs once, when a table is built.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.newton_schulz.restarts import Table

Coefficients: TypeAlias = str | Sequence[float] | Sequence[Sequence[float]] | ArrayLike

# Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
_JORDAN = ((3.4445, -4.7750, 2.0315),)

# You Jiacheng's table of the modded-nanogpt speedrun (March 2025), also used by Dion
# (Ahn et al. 2025, arXiv:2504.05295); optax.contrib.muon calls it "dion".
_DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# DeepSeek-AI 2026, DeepSeek-V4, section 2.4: Jordan's rows bring singular values into a
# band around 1, where they stay, and the last two to 1.
_DEEPSEEK_V4 = _JORDAN * 8 + ((2.0, -1.5, 0.5),) * 2

# The limit of the optimal quintics as the interval closes on 1: it keeps 1 fixed, with
# two vanishing derivatives.
PADE = np.array([15 / 8, -10 / 8, 3 / 8])
# Relative half width of an interval whose optimum is the limit, to the last digit.
_NARROWEST = 1e-8
_EXCHANGES = 60  # Convergence is quadratic; 5 have been enough.
# Below this bound, 2 - lower rounds away too much of lower.
_SMALLEST_BOUND = 1e-12


def coefficient_table(
    coeffs: Coefficients, steps: int | jax.Array, prefix: str
) -> Table | jax.Array:
    """Look up or check a table of coefficients, for steps that are already checked.

    Returns one ``(a, b, c)`` per step, or an array of shape (rows, 3) where it is traced.
    ``prefix`` is what comes before "coeffs" and "steps" in the names of the arguments.

    Raises:
      ValueError: If the preset is unknown, the numbers are not such a table, or the steps
        are fewer than those of a preset that has no prefix.
    """
    argument = f"{prefix}coeffs"
    validate.not_rounded(argument, coeffs)
    table: Any
    if isinstance(coeffs, jax.core.Tracer):
        table, fits = jnp.atleast_2d(coeffs), True
    else:
        try:
            rows = np.asarray(PRESETS[coeffs] if isinstance(coeffs, str) else coeffs)
            table = np.atleast_2d(rows.astype(np.float64))
            fits = validate.is_real(rows.dtype) and bool(np.isfinite(table).all())
        except (KeyError, TypeError, ValueError):
            fits = False
    if not fits or table.ndim != 2 or table.shape[0] == 0 or table.shape[1] != 3:
        remedy = (
            f"pass a preset ({', '.join(sorted(PRESETS))}), one (a, b, c), or a sequence "
            "of them, one per step, all finite"
        )
        validate.refuse(argument, coeffs, remedy)
    if isinstance(table, jax.Array):
        return table
    if isinstance(coeffs, str) and coeffs in _NO_PREFIX:
        traced = isinstance(steps, jax.core.Tracer)
        if not traced and int(jax.device_get(steps)) < len(table):
            remedy = f"{coeffs!r} is a sequence of {len(table)} steps"
            remedy += f": pass {prefix}steps={len(table)} or more"
            validate.refuse(f"{prefix}steps", steps, remedy)
    return tuple(map(tuple, table.tolist()))


def polar_express_coefficients(
    lower_bound: float = 1e-3,
    steps: int = 5,
    *,
    safety_factor: float = 1.02,
    cushion: float = 0.02,
) -> np.ndarray:
    r"""Newton–Schulz coefficients for singular values in ``[lower_bound, 1]``.

    Each row is an odd polynomial of degree five. It is the one nearest to 1 on the
    interval :math:`[\ell, u]` that is the image of the rows before it, and its own image
    is :math:`[p(\ell), 2 - p(\ell)]`. Such a sequence is optimal among all compositions
    of as many odd polynomials of degree five. The defaults give the table that its
    authors publish for use in bfloat16, from which the preset ``"polar_express"`` is
    made. The optimum itself has no safety factor.

    Two things guard it against rounding, at some cost in accuracy. The safety factor
    :math:`s` divides the argument of every row but the last,
    :math:`(a/s, b/s^3, c/s^5)`: singular values that rounding lifts above :math:`u` stay
    in the range that the row was made for. The cushion takes a row for
    :math:`[\max(\ell, \mathit{cushion} \cdot u), u]` instead; where that leaves out part
    of the interval, the row is rescaled by :math:`2 / (p(\ell) + p(u))`, so that the
    image is centred at 1 again.

    Args:
      lower_bound: The smallest singular value to bring to 1, relative to the Frobenius
        norm; in [1e-12, 1). Smaller singular values grow as fast as the larger ones
        allow.
      steps: Number of rows, at least 1.
      safety_factor: A number of at least 1. For small bounds it alone determines the
        stability margin, which is about 0.8 % for 1.02 and 2 % for 1.05. A factor of 1
        means no safety: with the other defaults, 20 steps then tolerate relative errors
        of 2.6e-6, and with a bound of 1e-5 not even the errors of float32.
      cushion: A number in [0, 1), relative to the upper end of the interval. 0 means no
        cushion.

    Returns:
      One ``(a, b, c)`` per step, of shape (steps, 3) and dtype float64, for ``coeffs``
      of :func:`orscale_jax.polar_factor` and ``ns_coeffs`` of the optimizers.

    Raises:
      ValueError: If an argument is not valid.

    Example:
      >>> import jax
      >>> from orscale_jax import polar_express_coefficients, polar_factor
      >>> table = polar_express_coefficients(1e-2, 4, safety_factor=1.05)
      >>> x = jax.random.normal(jax.random.key(0), (16, 64))
      >>> q = polar_factor(x, steps=4, coeffs=table)
      >>> bool(jax.numpy.allclose(q @ q.T, jax.numpy.eye(16), atol=0.06))
      True

    References:
      Amsel, Persson, Musco, Gower, *The Polar Express: Optimal Matrix Sign Methods and
      Their Application to the Muon Algorithm*, 2025, https://arxiv.org/abs/2505.16932.
    """
    validate.number("lower_bound", lower_bound, at_least=_SMALLEST_BOUND, below=1)
    validate.count("steps", steps)
    validate.number("safety_factor", safety_factor, at_least=1)
    validate.number("cushion", cushion, at_least=0, below=1)
    lower, upper = float(lower_bound), 1.0
    cushion = float(cushion)
    rows = []
    for step in range(1, int(steps) + 1):
        row = optimal_quintic(max(lower, cushion * upper), upper)
        if lower < cushion * upper:
            row = row * 2 / (evaluate(row, lower) + evaluate(row, upper))
        if step < steps:
            row = divide_argument(row, float(safety_factor))
        rows.append(row)
        lower = float(evaluate(row, lower))
        upper = 2 - lower
    return np.stack(rows)


def evaluate(row: np.ndarray, x: np.ndarray | float) -> np.ndarray:
    a, b, c = row
    square = np.square(x)
    return x * (a + square * (b + square * c))


def divide_argument(row: np.ndarray, by: float) -> np.ndarray:
    """The row of ``p(x / by)``."""
    return row / by ** np.array([1, 3, 5])


def optimal_quintic(lower: float, upper: float) -> np.ndarray:
    """The odd quintic nearest to 1 on ``[lower, upper]``, shape (3,).

    Remez exchange: solve for the polynomial that misses 1 by ±e at four points, move the
    inner two to its extremes, repeat. With the interval's middle at 1 and its half width
    h, the polynomial is π + f π + g x(x² − 1)/h + k x(x² − 1)²/h² with the Padé step π.
    In powers of x a narrow interval would lose all digits: on it, f, g, k and the error
    of π are of order h³.
    """
    middle, half = (lower + upper) / 2, (upper - lower) / (lower + upper)
    if half < _NARROWEST:
        return divide_argument(PADE, middle)
    inner = np.array([-0.5, 0.5])
    error = np.inf
    for _ in range(_EXCHANGES):
        offset = half * np.array([-1, *inner, 1])  # x - 1
        x = np.array([lower / middle, *(1 + offset[1:-1]), upper / middle])
        slope = offset * (x + 1) / half  # (x² - 1) / h
        missed = offset**3 * (3 * x**2 + 9 * x + 8) / 8  # π - 1
        system = np.stack([1 + missed, x * slope, x * slope**2, [1, -1, 1, -1]], axis=1)
        f, g, k, new_error = np.linalg.solve(system, -missed)
        if abs(new_error - error) <= 1e-15 * abs(new_error):
            break
        error = new_error
        # The derivative is a quadratic in y = (x² − 1)/h; its zeros, as (x − 1)/h.
        c = 2 * g / half
        a, b = 15 / 8 * (1 + f) * half**2 + 5 * k, 3 * g + 4 * k / half
        y = (np.array([-1, 1]) * np.sqrt(b**2 - 4 * a * c) - b) / (2 * a)
        inner = y / (1 + np.sqrt(1 + half * y))
    first, second = g / half, k / half**2
    row = (1 + f) * PADE + [second - first, first - 2 * second, second]
    return divide_argument(row, middle)


def _polar_express() -> np.ndarray:
    """The table published for bfloat16 (arXiv:2505.16932), and its continuation."""
    lower, safety = 1e-3, 1.02
    table = polar_express_coefficients(lower, steps=5, safety_factor=safety, cushion=0.02)
    for row in table:
        lower = float(evaluate(row, lower))
    # The table is made for x / (1.02 norm(x)): its first row is to divide by 1.02.
    table[0] = divide_argument(table[0], safety)
    # After one more step the interval is so narrow that the optimum is the limit.
    return np.stack([*table, optimal_quintic(lower, 2 - lower), PADE])


PRESETS = {
    "polar_express": _polar_express(),
    "jordan": _JORDAN,
    "dion": _DION,
    "deepseek_v4": _DEEPSEEK_V4,
}
_NO_PREFIX = ("deepseek_v4",)  # Fewer than its steps would be "jordan".
