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
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orscale_jax.newton_schulz.arithmetic import (
    Arithmetic,
    Columns,
    Start,
    normalize,
    precondition,
)
from orscale_jax.newton_schulz.platforms import NewtonSchulz, Platform
from orscale_jax.newton_schulz.restarts import (
    Scales,
    Table,
    is_cheaper,
    monic_scales,
    restart_steps,
    segment,
)
from orscale_jax.sharding import typed_sharding

# The steps of one array: yields sums, and receives them as rounded operands.
Products: TypeAlias = Generator[jax.Array, jax.Array, jax.Array]


def newton_schulz(
    xs: Sequence[jax.Array],
    platform: Platform,
    columns: Sequence[Columns | None] | None = None,
) -> list[jax.Array]:
    """Polar factors of matrices, by the form that takes fewer FLOPs.

    They are normalized, except for a platform that normalizes each matrix, which happens
    here. The products of those that are unrolled are interleaved. ``columns`` are, for
    each array, the devices that hold the other columns of its matrices; None for whole
    ones.
    """
    settings = platform.settings
    arithmetics = [platform.arithmetic(of_x) for of_x in columns or [None] * len(xs)]
    qs, unrolled = [*xs], dict[int, tuple[Start, tuple[int, ...]]]()
    for i, (x, arithmetic) in enumerate(zip(xs, arithmetics, strict=True)):
        if platform.normalizes == "matrix":
            # Norms do not depend on the form of products: one trace serves all.
            x = normalize(x, dataclasses.replace(arithmetic, by_strips=False))
        start = precondition(x, settings.preconditioning, arithmetic)
        by_gram = is_cheaper(*arithmetic.whole_shape(x))
        # A loop would copy the operands that it carries.
        if not settings.is_static or not (arithmetic.narrow or by_gram):
            qs[i] = in_a_loop(start, settings, arithmetic)
            continue
        rows, scales = settings.rows, None
        restarts = tuple(range(1, len(rows)))
        if by_gram:
            restarts = restart_steps(rows, arithmetic.unit)
        if platform.adds_products and arithmetic.dtype == jnp.float16:
            scales = monic_scales(rows, restarts, arithmetic.scale)
        if scales is None:
            unrolled[i] = start, restarts
        else:
            qs[i] = monic_newton_schulz(start, rows, restarts, scales, arithmetic)
    if unrolled:
        scaled: Any = _of_scaled(settings.rows, arithmetics[0].scale)
        # Also under jit, None is known while tracing, and 0 is not.
        scaled = [(a, b, c or None) for a, b, c in scaled]
        if platform.hides_coefficients:
            scalar = functools.partial(jnp.asarray, dtype=arithmetics[0].accumulator)
            scaled = jax.lax.optimization_barrier(jax.tree.map(scalar, scaled))
        starts, restarts_of_all = zip(*unrolled.values(), strict=True)
        of_unrolled = tuple(arithmetics[i] for i in unrolled)
        factors = gram_newton_schulz(starts, scaled, restarts_of_all, of_unrolled)
        for i, q in zip(unrolled, factors, strict=True):
            qs[i] = q
    return [q.astype(x.dtype) for q, x in zip(qs, xs, strict=True)]


def one_by_one(
    x: jax.Array, platform: Platform, columns: Columns | None = None
) -> jax.Array:
    """Polar factors of matrices, which need not be normalized, in a loop over them (CPU).

    XLA's batched products are slower than single ones there.
    """
    # A loop over an axis that the array's type says is sharded would gather it.
    if x.ndim == 2 or typed_sharding.is_sharded(x):
        return newton_schulz([x], platform, [columns])[0]

    # In place: the result of `jax.lax.map` would be one more copy of the matrices.
    def replace(i: jax.Array, xs: jax.Array) -> jax.Array:
        [q] = newton_schulz([xs[i]], platform, [columns])
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
        sums = _polynomial(factor, b, None if cubic else c, arithmetic)
        polynomial = arithmetic.round(sums)
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
@functools.partial(jax.jit, static_argnames=("rows", "restarts", "scales", "arithmetic"))
def monic_newton_schulz(
    start: Start,
    rows: Table,
    restarts: tuple[int, ...],
    scales: Scales,
    arithmetic: Arithmetic,
) -> jax.Array:
    r"""Newton–Schulz in float16, for GPUs: one kernel adds each product to an array.

    Where sums of products are float32, a second kernel adds them up and rounds them, and
    takes as long as the product. Here both polynomials of the Gram form are *monic*,

    .. math:: Z = a (I + Y), \qquad P = \alpha (I + W),

    so that every array is another one plus a multiple of a product,
    :math:`C + \beta AB`, with the ``scales`` of :func:`monic_scales`.
    """
    (x, gram), add = start, arithmetic.add_product

    def mix(w: jax.Array, beta: float, y: jax.Array) -> jax.Array:
        sums = w.astype(arithmetic.accumulator) + beta * y.astype(arithmetic.accumulator)
        return arithmetic.round(sums)

    gain = 1 / arithmetic.scale
    segments = itertools.pairwise([0, *restarts, len(rows)])
    for (i, j), (lift, g) in zip(segments, scales, strict=True):
        if lift != 1:
            x, gain = x * np.asarray(lift, x.dtype), gain / lift
        factor = arithmetic.round(g * (arithmetic.gram(x) if gram is None else gram))
        w, omega = segment(factor, g / gain**2, rows[i:j], add, mix)
        # Tall matrices are iterated like their transposes, but not transposed.
        x = add(x, 1 / omega, *((w, x) if arithmetic.is_wide(x) else (x, w.mT)))
        gram = None
        gain *= math.prod(a for a, _, _ in rows[i:j])
    return gain * x.astype(arithmetic.accumulator)


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
