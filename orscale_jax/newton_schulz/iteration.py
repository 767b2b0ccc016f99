r"""The polar factor of a matrix by Newton–Schulz iteration.

One step maps :math:`X \mapsto aX + (bA + cA^2)X` with :math:`A = XX^\top`, so that every
singular value is mapped by the odd quintic :math:`p(x) = ax + bx^3 + cx^5` and the
singular vectors do not change. Matrices far from square are iterated by their Gram
matrices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import validate
from orscale_jax.newton_schulz.arithmetic import (
    PRECONDITIONINGS,
    Arithmetic,
    Start,
    normalize,
    precondition,
)
from orscale_jax.newton_schulz.coefficients import Coefficients, coefficient_table
from orscale_jax.newton_schulz.monic import monic_newton_schulz, monic_scales
from orscale_jax.newton_schulz.restarts import Table, is_cheaper, restart_steps

# The steps of one array: yields sums, and receives them as rounded operands.
Products: TypeAlias = Generator[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """The settings of the iteration, already checked; hashable unless some are traced."""

    steps: int | np.int32 | jax.Array  # May be traced.
    table: Table | jax.Array  # Of coefficient_table; may be traced.
    preconditioning: str  # "frobenius" or "aol".
    dtype: np.dtype[Any] | None = None  # Of the products' operands; None: the platform's.
    by_strips: bool = False  # Whether large Gram matrices are computed in strips.
    # Whether the compiler may not see the coefficients: all steps then look the same to
    # it, and it compiles one of them.
    hide_coefficients: bool = False
    # Whether a kernel adds its product to an array, and rounds the sum: then float16
    # takes monic_newton_schulz.
    adds_products: bool = False

    @classmethod
    def of(
        cls,
        steps: int | jax.Array,
        coeffs: Coefficients,
        dtype: DTypeLike | None,
        preconditioning: str,
        *,
        prefix: str = "",
    ) -> Self:
        """Check arguments, whose names in messages begin with a prefix."""
        validate.count(f"{prefix}steps", steps)
        validate.dtype(f"{prefix}dtype", dtype)
        validate.choice(f"{prefix}preconditioning", preconditioning, PRECONDITIONINGS)
        table = coefficient_table(coeffs, steps, prefix=prefix)
        traced = isinstance(steps, jax.core.Tracer)
        steps = jnp.int32(steps) if traced else int(jax.device_get(steps))
        known = None if dtype is None else jnp.dtype(dtype)
        return cls(steps, table, preconditioning, known)

    @property
    def traced(self) -> dict[str, jax.Array]:
        settings = {"steps": self.steps, "table": self.table}
        return {k: v for k, v in settings.items() if isinstance(v, jax.core.Tracer)}

    @property
    def is_static(self) -> bool:
        """Whether steps and coefficients are known while tracing."""
        return isinstance(self.steps, int) and isinstance(self.table, tuple)

    @property
    def rows(self) -> Table:
        """The coefficients of each step: beyond the table, those of its last row."""
        table = self.table
        assert isinstance(table, tuple)
        return tuple(table[min(i, len(table) - 1)] for i in range(int(self.steps)))

    @property
    def restarts(self) -> tuple[int, ...] | None:
        """The steps before which the Gram form restarts; None if steps are traced."""
        if not self.is_static:
            return None
        return restart_steps(self.rows, self.arithmetic().unit)

    def arithmetic(self, columns: Any = None) -> Arithmetic:
        """The arithmetic of the products, for whole matrices or for column shards."""
        return Arithmetic(jnp.dtype(self.dtype), columns, self.by_strips)


def newton_schulz(
    xs: Sequence[jax.Array], settings: NewtonSchulz, columns: Sequence[Any] | None = None
) -> list[jax.Array]:
    """Polar factors of normalized matrices, by the form that takes fewer FLOPs.

    The products of those that are unrolled are interleaved. ``columns`` are, for each
    array, the devices that hold the other columns of its matrices; None for whole ones.
    """
    arithmetics = [settings.arithmetic(of_x) for of_x in columns or [None] * len(xs)]
    pairs = [*zip(xs, arithmetics, strict=True)]
    starts = [precondition(x, settings.preconditioning, of_x) for x, of_x in pairs]
    by_gram = [is_cheaper(*of_x.whole_shape(x)) for x, of_x in pairs]
    qs, unrolled = [start.x for start in starts], {}
    joint: dict[Any, list[int]] = {}
    plain = tuple(range(1, int(settings.steps))) if settings.is_static else ()
    for i, arithmetic in enumerate(arithmetics):
        # A loop would copy the operands that it carries.
        if not settings.is_static or not (arithmetic.narrow or by_gram[i]):
            qs[i] = in_a_loop(starts[i], settings, arithmetic)
            continue
        restarts = settings.restarts or () if by_gram[i] else plain
        scales = None
        if settings.adds_products and arithmetic.dtype == jnp.float16:
            scales = monic_scales(settings.rows, restarts, arithmetic.scale)
        if scales is None:
            unrolled[i] = restarts
        else:
            given = settings.rows, restarts, scales, arithmetic
            shorter = min(arithmetic.whole_shape(xs[i]))
            joint.setdefault((shorter, given), []).append(i)
    for (_, given), members in joint.items():
        factors = monic_newton_schulz([starts[i] for i in members], *given)
        for i, q in zip(members, factors, strict=True):
            qs[i] = q
    if unrolled:
        rows: Any = _of_scaled(settings.rows, arithmetics[0].scale)
        # Also under jit, None is known while tracing, and 0 is not.
        rows = [(a, b, c or None) for a, b, c in rows]
        if settings.hide_coefficients:
            scalar = functools.partial(jnp.asarray, dtype=arithmetics[0].accumulator)
            rows = jax.lax.optimization_barrier(jax.tree.map(scalar, rows))
        factors = gram_newton_schulz(
            [starts[i] for i in unrolled],
            rows,
            tuple(unrolled.values()),
            tuple(arithmetics[i] for i in unrolled),
        )
        for i, q in zip(unrolled, factors, strict=True):
            qs[i] = q
    return [q.astype(x.dtype) for q, x in zip(qs, xs, strict=True)]


def one_by_one(x: jax.Array, settings: NewtonSchulz, columns: Any = None) -> jax.Array:
    """Polar factors of matrices, which need not be normalized, in a loop over them (CPU).

    XLA's batched products are slower than single ones there.
    """
    # A loop over an axis that the array's type says is sharded would gather it.
    if x.ndim == 2 or any(entry is not None for entry in jax.typeof(x).sharding.spec):
        # Norms do not depend on the form of products: one trace serves all.
        plain = dataclasses.replace(settings, by_strips=False).arithmetic(columns)
        [q] = newton_schulz([normalize(x, plain)], settings, [columns])
        return q.astype(x.dtype)

    # In place: the result of `jax.lax.map` would be one more copy of the matrices.
    def replace(i: jax.Array, xs: jax.Array) -> jax.Array:
        q = one_by_one(xs[i], settings, columns)
        return jax.lax.dynamic_update_index_in_dim(xs, q, i, axis=0)

    matrices = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return jax.lax.fori_loop(0, len(matrices), replace, matrices).reshape(x.shape)


def in_a_loop(start: Start, settings: NewtonSchulz, arithmetic: Arithmetic) -> jax.Array:
    """The plain iteration, of any number of steps."""
    table, dtype = settings.table, arithmetic.accumulator
    wide = arithmetic.is_wide(start.x)

    def row(i: ArrayLike) -> Sequence[jax.Array]:
        i = jnp.minimum(i, len(table) - 1)
        if isinstance(table, jax.Array):
            return [*table.astype(dtype)[i]]
        # Scalars alone: a program for one device of a mesh must have no other constants.
        return [
            jax.lax.select_n(i, *(jnp.asarray(value, dtype) for value in column))
            for column in zip(*table, strict=True)
        ]

    # All steps have one trace: the square is left out of all of them or of none.
    cubic = isinstance(table, tuple) and not any(c for _, _, c in table)

    def step(row: Sequence[Any], x: jax.Array, gram: jax.Array) -> jax.Array:
        a, b, c = row
        factor = arithmetic.round(gram)
        polynomial = arithmetic.round(
            _polynomial(factor, b, None if cubic else c, arithmetic)
        )
        left, right = (polynomial, x) if wide else (x, polynomial)
        product = arithmetic.product(left, right)
        return arithmetic.round(a * x.astype(product.dtype) + product)

    first, (x, gram) = 0, start
    if gram is not None or arithmetic.scale != 1:
        [of_scaled] = _of_scaled([row(0)], arithmetic.scale)
        first, x = 1, step(of_scaled, x, arithmetic.gram(x) if gram is None else gram)
    return jax.lax.fori_loop(
        first, settings.steps, lambda i, x: step(row(i), x, arithmetic.gram(x)), x
    )


# Jitted, so that leaves of one shape are traced once.
@functools.partial(jax.jit, static_argnames=("restarts", "arithmetics"))
def gram_newton_schulz(
    starts: Sequence[Start],
    rows: Sequence[Sequence[Any]],
    restarts: Sequence[tuple[int, ...]],
    arithmetics: Sequence[Arithmetic],
) -> list[jax.Array]:
    """Newton–Schulz on preconditioned matrices, one step for each row of coefficients.

    A row whose c is None is cubic: its step computes no square. The products of the
    arrays, all of one dtype, are interleaved: while one runs, the operands of the next
    are fetched.
    """
    products = [
        _gram_products(start, rows, before, arithmetic)
        for start, before, arithmetic in zip(starts, restarts, arithmetics, strict=True)
    ]
    results: list[Any] = [None] * len(products)
    operands: dict[int, Any] = dict.fromkeys(range(len(products)))
    while operands:
        sums = {}
        for i, operand in operands.items():
            try:
                sums[i] = products[i].send(operand)
            except StopIteration as end:
                results[i] = end.value
        rounded = arithmetics[0].round_all([*sums.values()])
        operands = dict(zip(sums, rounded, strict=True))
    return results


def _gram_products(
    start: Start,
    rows: Sequence[Sequence[Any]],
    restarts: Sequence[int],
    arithmetic: Arithmetic,
) -> Products:
    r"""Newton–Schulz on the Gram matrix: fewer products where a matrix is not square.

    For wide :math:`X_0` (m ≤ n) every iterate is :math:`X_k = P_k X_0`, where :math:`P_k`
    is a polynomial in :math:`R_0 = X_0 X_0^\top`. With
    :math:`Z_k = a_kI + b_kR_k + c_kR_k^2`

    .. math:: P_{k+1} = Z_k P_k, \qquad R_{k+1} = R_k Z_k Z_k, \qquad P_0 = I,

    so that only :math:`R_0` and the final :math:`P X_0` cost m²n. A *restart* forms
    :math:`X_k = P X_0` and :math:`R_k = X_k X_k^\top` and continues from there;
    restarting before every step is the plain iteration.

    Rounding limits the segments between restarts, and decides three things. (1) The
    products commute only in exact arithmetic. With :math:`P \gets ZP` an error F of Z
    becomes :math:`F(PX_0)`, as in the plain iteration; with :math:`P \gets PZ` it becomes
    :math:`PFX_0`, larger by up to the gain of P. (2) A product for R may be computed as
    one triangle and mirrored, which moves R no more than rounding does. ZP may not: a
    mirrored entry of ZP is an entry of PZ, which has the larger error. (3) The identity
    is not added: with :math:`P = \alpha I + V`, only V and :math:`bR + cR^2` are rounded.

    The references are those of ``restarts``, and Amsel et al., arXiv:2505.16932, "Fast
    polynomial iteration for rectangular matrices".
    """
    x, gram = start
    wide = arithmetic.is_wide(x)

    # Tall matrices are iterated like their transposes, but not transposed.
    def times(left: jax.Array, right: jax.Array, symmetric: bool = False) -> jax.Array:
        first, second = (left, right) if wide else (right, left)
        return arithmetic.product(first, second, symmetric=symmetric)

    for i, j in itertools.pairwise([0, *restarts, len(rows)]):
        gram = arithmetic.gram(x) if gram is None else gram
        scale: Any = 1.0
        polynomial: Any = None  # P = scale I + polynomial.
        for k, (a, b, c) in enumerate(rows[i:j], i + 1):
            factor = yield gram
            z = _polynomial(factor, b, c, arithmetic)
            if polynomial is None:
                polynomial = z
            else:
                v = yield polynomial
                polynomial = scale * z + a * polynomial + times((yield z), v)
            scale *= a
            if k < j:
                half = a * gram + times(factor, (yield z), symmetric=True)
                gram = a * half + times((yield half), (yield z), symmetric=True)
        product = times((yield polynomial), x)
        x, gram = (yield scale * x.astype(product.dtype) + product), None
    return x


def _polynomial(factor: jax.Array, b: Any, c: Any, arithmetic: Arithmetic) -> jax.Array:
    """The part bA + cA² of a step for the Gram matrix A; no A² where c is None."""
    if c is None:
        return b * factor.astype(arithmetic.accumulator)
    square = arithmetic.product(factor, factor, symmetric=True)
    return b * factor.astype(square.dtype) + c * square


def _of_scaled(rows: Sequence[Sequence[Any]], scale: float) -> Sequence[Sequence[Any]]:
    """The rows for matrices of this norm instead of 1."""
    if scale == 1:
        return rows
    first, *others = rows
    return [[x / scale**p for x, p in zip(first, (1, 3, 5), strict=True)], *others]
