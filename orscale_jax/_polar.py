r"""The polar factor of a matrix by Newton–Schulz iteration.

One step maps :math:`X \mapsto aX + (bA + cA^2)X` with :math:`A = XX^\top`, so that every
singular value moves by the odd quintic :math:`p(x) = ax + bx^3 + cx^5` while the
singular vectors stay. The tables below say which polynomials are composed.

Stability margins: let each of a step's three products, :math:`A`, :math:`A^2` and
:math:`(bA + cA^2)X`, err by a relative :math:`\delta`, with the worst sign for every
product of every step. A table's margin is the largest :math:`\delta` for which singular
values that start in [0, 1] stay bounded (by 10; beyond it they explode). Where the errors
are the roundings of :func:`_newton_schulz` instead (A, the polynomial, the result), the
margin is a little smaller: it has to exceed the unit roundoff of the dtype.
``docs/newton_schulz.md`` lists both for every number of steps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import (
    _checks,
    _gram,
    _polar_express as _express,
    _preconditioning,
    _sharding,
)
from orscale_jax._columns import Columns
from orscale_jax._precision import Arithmetic
from orscale_jax._preconditioning import Start

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


def _polar_express_table() -> np.ndarray:
    """The table published for bfloat16 (arXiv:2505.16932), and how it goes on."""
    lower, safety = 1e-3, 1.02
    table = _express.polar_express_coefficients(
        lower, steps=5, safety_factor=safety, cushion=0.02
    )
    for row in table:
        lower = float(_express.evaluate(row, lower))
    # It is made for x / (1.02 norm(x)); its first row can divide on the way.
    table[0] = _express.divide_argument(table[0], safety)
    # One step on, the interval has all but closed, and the optimum is its limit.
    return np.stack([*table, _express.optimal_quintic(lower, 2 - lower), _express.PADE])


PRESETS = {"polar_express": _polar_express_table(), "jordan": _JORDAN, "dion": _DION}


def coefficient_table(
    coeffs: Coefficients, *, argument: str = "coeffs"
) -> np.ndarray | jax.Array:
    """The table that ``coeffs`` names or holds.

    Args:
      coeffs: A preset, one ``(a, b, c)``, or one per step.
      argument: What the caller's caller calls ``coeffs``.

    Returns:
      Shape (rows, 3): one ``(a, b, c)`` per step. Step ``i`` takes row ``i``; beyond the
      table every step takes its last row.

    Raises:
      ValueError: If the preset is unknown or the numbers are not such a table.
    """
    remedy = (
        f"pass a preset ({', '.join(sorted(PRESETS))}), one (a, b, c), or a sequence of "
        "them, one per step, all finite"
    )
    table: np.ndarray | jax.Array
    if isinstance(coeffs, jax.core.Tracer):
        table = jnp.atleast_2d(coeffs)
    else:
        rows = PRESETS.get(coeffs) if isinstance(coeffs, str) else coeffs
        try:
            table = np.atleast_2d(np.asarray(rows, dtype=np.float64))
        except (TypeError, ValueError):
            _checks.refuse(argument, coeffs, remedy)
        if not np.isfinite(table).all():
            _checks.refuse(argument, coeffs, remedy)
    if table.ndim != 2 or table.shape[0] == 0 or table.shape[1] != 3:
        _checks.refuse(argument, coeffs, remedy)
    return table


def polar_factor(
    x: ArrayLike,
    *,
    steps: int | jax.Array = 5,
    coeffs: Coefficients = "polar_express",
    dtype: DTypeLike | None = None,
    preconditioning: str = "frobenius",
) -> jax.Array:
    r"""Approximate polar factor :math:`UV^\top` of :math:`x = U \Sigma V^\top`.

    Newton–Schulz iteration on :math:`x / \|x\|_F`. The norm is taken in float32 (float64
    where ``x`` or ``dtype`` is float64) and of scaled entries, so that the
    result does not depend on the scale of ``x`` and nothing overflows or underflows.
    Products accumulate in float32 and are rounded to ``dtype`` once each. A zero matrix
    gives zero; a matrix with a NaN or an infinity gives NaN.

    Where one side is more than 1.5 times the other, and steps and coefficients are known
    while tracing, the iteration runs on the Gram matrix (Zhang et al. 2026), as far as
    the dtype's rounding allows; ``docs/speed.md`` has more.

    Presets, with the range that five steps bring normalised singular values from
    [1e-3, 1] to, and the relative error that each product may have without any of them
    exploding (the module's docstring defines it, ``docs/newton_schulz.md`` has more):

    - ``"polar_express"``: [0.846, 1.142], margin 0.81 %; the greedy optimal sequence of
      Amsel et al. (arXiv:2505.16932), bounded below by 1e-3 and made safe by 1.02. Fewer
      steps take its prefix; more steps continue the construction and only bring singular
      values nearer to 1.
    - ``"jordan"``: [0.47, 1.21], margin 1.62 %; (3.4445, −4.7750, 2.0315) at every step
      (Jordan et al. 2024). More steps stay in a band around 1 and do not converge.
    - ``"dion"``: [0.47, 1.15], margin 1.42 %, 0.80 % where many steps follow; the
      five-row table of the modded-nanogpt speedrun and of Dion (arXiv:2504.05295).
      Beyond row 5 its last row repeats: a band around 1, without convergence.

    Here bfloat16 rounds three times a step, by at most 0.39 %, and every preset bears at
    least 0.74 % at any number of steps. Products that *accumulate* in
    bfloat16 err by more than the margins. For another lower bound, or more safety, see
    :func:`orscale_jax.polar_express_coefficients`.

    Args:
      x: Shape (..., m, n), real floating point. Leading axes are a batch.
      steps: Number of steps, at least 1. May be traced.
      coeffs: A preset, one ``(a, b, c)`` for all steps, or one per step. Where ``steps``
        is smaller than the table its prefix is taken; where it is larger, the last row
        repeats.
      dtype: Of the products' operands. ``None``: bfloat16 on GPU and TPU, float32 on
        CPU, decided by the platform that the program is compiled for.
      preconditioning: ``"frobenius"``, or ``"aol"`` for another direction in fewer
        steps: each of the min(m, n) vectors on the shorter side (the rows of square
        matrices) is divided by its own :math:`(\sum_j |A_{ij}|)^{1/2}`, A their Gram
        matrix. The result is that of the scaled matrix, not of x (Boissin et al. 2025,
        arXiv:2512.04632). Pass a table for four steps with it;
        ``docs/newton_schulz.md`` has one, and what it costs in quality.

    Returns:
      Shape (..., m, n), of the dtype of ``x``.

    Raises:
      ValueError: If ``x`` is not a batch of real matrices, or an argument is not valid.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import polar_factor
      >>> q = polar_factor(jnp.diag(jnp.array([3.0, 0.5])), steps=8)
      >>> bool(jnp.allclose(q, jnp.eye(2), atol=1e-5))
      True

    References:
      Amsel et al. 2025, arXiv:2505.16932; Jordan et al. 2024,
      https://kellerjordan.github.io/posts/muon/; Ahn et al. 2025, arXiv:2504.05295;
      Boissin et al. 2025, arXiv:2512.04632; Zhang et al. 2026, *Gram Newton-Schulz*,
      https://dao-lab.ai/blog/2026/gram-newton-schulz.
    """
    x = jnp.asarray(x)
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"polar_factor takes real matrices of shape (..., m, n), got x of shape "
            f"{x.shape} and dtype {x.dtype}."
        )
    _checks.count("steps", steps)
    _checks.dtype("dtype", dtype)
    _preconditioning.check("preconditioning", preconditioning)
    arguments: dict[str, Any] = {
        "steps": steps,
        "table": coefficient_table(coeffs),
        "preconditioning": preconditioning,
    }
    on_cpu, elsewhere = (
        default if dtype is None else dtype for default in (jnp.float32, jnp.bfloat16)
    )
    return jax.lax.platform_dependent(
        x,
        cpu=functools.partial(polar_on_cpu, dtype=on_cpu, **arguments),
        default=functools.partial(polar_of, dtype=elsewhere, **arguments),
    )


def polar_of(
    x: jax.Array,
    *,
    dtype: DTypeLike,
    columns: Columns | None = None,
    in_one_pass: bool = True,
    **arguments: Any,
) -> jax.Array:
    """:func:`polar_factor` of checked arguments, for a platform that is known."""
    arithmetic = Arithmetic(jnp.dtype(dtype), columns)
    normalized = _preconditioning.normalize(x, arithmetic, in_one_pass=in_one_pass)
    [q] = polars_of([normalized], dtype=dtype, columns=[columns], **arguments)
    return q.astype(x.dtype)


def polar_on_cpu(x: jax.Array, **arguments: Any) -> jax.Array:
    """:func:`polar_of`, where XLA's batched products are slower than single ones."""
    of_one = functools.partial(polar_of, in_one_pass=False, by_blocks=True, **arguments)
    return _one_by_one(of_one)(x)


def polars_on_cpu(
    xs: Sequence[jax.Array],
    *,
    columns: Sequence[Columns | None] | None = None,
    **arguments: Any,
) -> list[jax.Array]:
    """:func:`polars_of`, of matrices that are not normalized."""
    return [
        polar_on_cpu(x, columns=of_x, **arguments)
        for x, of_x in zip(xs, columns or [None] * len(xs), strict=True)
    ]


def polars_of(
    xs: Sequence[jax.Array],
    *,
    table: np.ndarray | jax.Array,
    steps: int | jax.Array,
    preconditioning: str,
    dtype: DTypeLike,
    columns: Sequence[Columns | None] | None = None,
    by_blocks: bool = False,
    opaque: bool = False,
) -> list[jax.Array]:
    """Polar factors of normalized matrices, by the form that takes fewer FLOPs.

    Args:
      xs: Arrays of matrices, which take their steps in turns.
      table: Of :func:`coefficient_table`.
      steps: As for :func:`polar_factor`.
      preconditioning: As for :func:`polar_factor`.
      dtype: Of the products' operands.
      columns: Of each array, the devices that have the other columns of its matrices, if
        any do.
      by_blocks: Whether Gram matrices are made by blocks.
      opaque: Whether to hide the coefficients from the compiler, to which all steps are
        the same then. It compiles the same but once.
    """
    arithmetic = Arithmetic(jnp.dtype(dtype), None, by_blocks)
    of_each = [
        dataclasses.replace(arithmetic, columns=of_x)
        for of_x in columns or [None] * len(xs)
    ]
    starts = [
        _preconditioning.start(x, preconditioning, of_x)
        for x, of_x in zip(xs, of_each, strict=True)
    ]
    # Restarts are placed while tracing, for steps and coefficients that are known then.
    known = isinstance(table, np.ndarray) and isinstance(steps, int | np.integer)
    pay = [_gram.pays(*of_x.whole_shape(x)) for x, of_x in zip(xs, of_each, strict=True)]
    # A loop would copy the operands that it carries.
    unrolled = [i for i, pays in enumerate(pay) if known and (pays or arithmetic.narrow)]
    found = {
        i: _newton_schulz(start, table, steps, of_each[i])
        for i, start in enumerate(starts)
        if i not in unrolled
    }
    if unrolled:
        table, steps = np.asarray(table), int(steps)
        few = _gram.restarts(table, steps, arithmetic.unit)
        restarts = tuple(few if pay[i] else tuple(range(1, steps)) for i in unrolled)
        rows: _gram.Rows = _gram.rows_of(table, steps)
        if opaque:
            scalar = functools.partial(jnp.asarray, dtype=arithmetic.accumulator)
            rows = jax.lax.optimization_barrier(jax.tree.map(scalar, rows))
        chosen = [starts[i] for i in unrolled]
        theirs = tuple(of_each[i] for i in unrolled)
        qs = _gram.gram_newton_schulz(chosen, rows, restarts, theirs)
        found.update(zip(unrolled, qs, strict=True))
    return [found[i].astype(x.dtype) for i, x in enumerate(xs)]


def _one_by_one(fn: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def mapped(x: jax.Array) -> jax.Array:
        if x.ndim == 2 or _sharding.is_sharded(x):
            return fn(x)
        matrices = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        return jax.lax.map(fn, matrices).reshape(x.shape)

    return mapped


def _newton_schulz(
    start: Start,
    table: np.ndarray | jax.Array,
    steps: int | jax.Array,
    arithmetic: Arithmetic,
) -> jax.Array:
    rounded, einsum = arithmetic.round, arithmetic.einsum
    row = _row_of(table, arithmetic.accumulator)
    wide = arithmetic.is_wide(start.x)

    def step(i: ArrayLike, x: jax.Array, gram: jax.Array) -> jax.Array:
        a, b, c = row(i)
        factor = rounded(gram)
        square = arithmetic.symmetric(factor, factor)
        polynomial = rounded(b * factor.astype(square.dtype) + c * square)
        left, right = (polynomial, x) if wide else (x, polynomial)
        product = einsum("...ij,...jk->...ik", left, right)
        return rounded(a * x.astype(product.dtype) + product)

    first, x = 0, start.x
    if start.gram is not None:
        first, x = 1, step(0, x, start.gram)
    return jax.lax.fori_loop(first, steps, lambda i, x: step(i, x, arithmetic.gram(x)), x)


def _row_of(
    table: np.ndarray | jax.Array, dtype: DTypeLike
) -> Callable[[ArrayLike], Sequence[jax.Array]]:
    """The coefficients of a step; beyond the table its last row."""

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
