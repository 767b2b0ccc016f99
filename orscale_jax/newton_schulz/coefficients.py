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
``docs/newton_schulz.md`` lists both for every number of steps.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax.newton_schulz import polar_express

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


def _polar_express() -> np.ndarray:
    """The table published for bfloat16 (arXiv:2505.16932), and its continuation."""
    lower, safety = 1e-3, 1.02
    table = polar_express.polar_express_coefficients(
        lower, steps=5, safety_factor=safety, cushion=0.02
    )
    for row in table:
        lower = float(polar_express.evaluate(row, lower))
    # The table is made for x / (1.02 norm(x)): its first row is to divide by 1.02.
    table[0] = polar_express.divide_argument(table[0], safety)
    # After one more step the interval is so narrow that the optimum is the limit.
    return np.stack(
        [*table, polar_express.optimal_quintic(lower, 2 - lower), polar_express.PADE]
    )


PRESETS = {
    "polar_express": _polar_express(),
    "jordan": _JORDAN,
    "dion": _DION,
    "deepseek_v4": _DEEPSEEK_V4,
}
_NO_PREFIX = ("deepseek_v4",)  # Fewer than its steps would be "jordan".


def coefficient_table(
    coeffs: Coefficients, steps: int | jax.Array | None = None, *, prefix: str = ""
) -> np.ndarray | jax.Array:
    """Look up or check a table of coefficients.

    Args:
      coeffs: A preset, one ``(a, b, c)``, or one per step.
      steps: The number of steps, already checked. None: that of the table.
      prefix: What comes before "coeffs" and "steps" in the names of the arguments.

    Returns:
      Shape (rows, 3): one ``(a, b, c)`` per step.

    Raises:
      ValueError: If the preset is unknown, the numbers are not such a table, or the steps
        are fewer than those of a preset that has no prefix.
    """
    argument = f"{prefix}coeffs"
    remedy = (
        f"pass a preset ({', '.join(sorted(PRESETS))}), one (a, b, c), or a sequence of "
        "them, one per step, all finite"
    )
    _checks.not_rounded(argument, coeffs)
    table: np.ndarray | jax.Array
    if isinstance(coeffs, jax.core.Tracer):
        table = jnp.atleast_2d(coeffs)
    else:
        rows = PRESETS.get(coeffs) if isinstance(coeffs, str) else coeffs
        try:
            given = np.asarray(rows)
            table = np.atleast_2d(given.astype(np.float64))
        except (TypeError, ValueError):
            _checks.refuse(argument, coeffs, remedy)
        if not _checks.is_real(given.dtype) or not np.isfinite(table).all():
            _checks.refuse(argument, coeffs, remedy)
    if table.ndim != 2 or table.shape[0] == 0 or table.shape[1] != 3:
        _checks.refuse(argument, coeffs, remedy)
    if isinstance(coeffs, str) and coeffs in _NO_PREFIX:
        _require_all_rows(f"{prefix}steps", steps, coeffs, len(table))
    return table


def _require_all_rows(
    argument: str, steps: int | jax.Array | None, preset: str, rows: int
) -> None:
    """Refuse a number of steps, unless it is traced, that ends before a table does."""
    if steps is None or isinstance(steps, jax.core.Tracer):
        return
    if int(jax.device_get(steps)) < rows:
        remedy = f"{preset!r} is a sequence of {rows} steps: pass {argument}={rows}"
        _checks.refuse(argument, steps, f"{remedy} or more")


def rows_of(table: np.ndarray, steps: int) -> tuple[tuple[float, ...], ...]:
    """The rows of all steps, known while tracing."""
    rows = np.asarray(table, np.float64)[np.minimum(range(steps), len(table) - 1)]
    return tuple(map(tuple, rows.tolist()))


def row_at(
    table: np.ndarray | jax.Array, dtype: DTypeLike
) -> Callable[[ArrayLike], Sequence[jax.Array]]:
    """Return a function from a step, which may be traced, to its coefficients."""

    def row(i: ArrayLike) -> Sequence[jax.Array]:
        i = jnp.minimum(i, len(table) - 1)
        if isinstance(table, jax.Array):
            return [*table.astype(dtype)[i]]
        # Scalars alone: a program for one device of a mesh must have no other constants.
        return [
            jax.lax.select_n(i, *(jnp.asarray(value, dtype) for value in column))
            for column in table.T.tolist()
        ]

    return row
