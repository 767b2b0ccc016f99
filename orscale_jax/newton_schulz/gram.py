r"""Newton–Schulz on the Gram matrix: fewer products where matrices are far from square.

For wide :math:`X_0` (m ≤ n) every iterate is :math:`X_k = P_k X_0`, where :math:`P_k` is
a polynomial in :math:`R_0 = X_0 X_0^\top`. With :math:`Z_k = a_kI + b_kR_k + c_kR_k^2`

.. math:: P_{k+1} = Z_k P_k, \qquad R_{k+1} = R_k Z_k Z_k, \qquad P_0 = I,

so that only :math:`R_0` and the final :math:`P X_0` cost m²n. A *restart* forms
:math:`X_k = P X_0` and :math:`R_k = X_k X_k^\top` and continues from there; restarting
before every step is the plain iteration.

Rounding limits the segments between restarts, and decides three things. (1) The products
commute only in exact arithmetic. With :math:`P \gets ZP` an error F of Z becomes
:math:`F(PX_0)`, as in the plain iteration; with :math:`P \gets PZ` it becomes
:math:`PFX_0`, larger by up to the gain of P. (2) A product for R may be computed as one
triangle and mirrored, which moves R no more than rounding does. ZP may not: a mirrored
entry of ZP is an entry of PZ, which has the larger error. (3) The identity is not added:
with :math:`P = \alpha I + V`, only V and :math:`bR + cR^2` are rounded.

References:
  Zhang, Amsel, Chen, Dao, *Gram Newton-Schulz*, 2026,
  https://dao-lab.ai/blog/2026/gram-newton-schulz; Amsel et al., *Dion3*, 2026, section 4
  and appendix B (restarts, negative eigenvalues, drift, the identity kept apart); Amsel
  et al., arXiv:2505.16932, "Fast polynomial iteration for rectangular matrices".
"""

import functools
import itertools
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import jax

from orscale_jax.newton_schulz.arithmetic import Arithmetic
from orscale_jax.newton_schulz.preconditioning import Start

Rows: TypeAlias = Sequence[Sequence[Any]]
# The steps of one array: yields sums, and receives them as rounded operands.
Chain: TypeAlias = Generator[jax.Array, jax.Array, jax.Array]


# Jitted, so that leaves of one shape are traced once.
@functools.partial(jax.jit, static_argnames=("restarts", "arithmetics"))
def gram_newton_schulz(
    starts: Sequence[Start],
    rows: Rows,
    restarts: Sequence[tuple[int, ...]],
    arithmetics: Sequence[Arithmetic],
) -> list[jax.Array]:
    """Newton–Schulz on preconditioned matrices, one step for each row of coefficients.

    The products of the arrays, all of one dtype, are interleaved: while one runs, the
    operands of the next are fetched.
    """
    chains = [
        _chain(start, rows, before, arithmetic)
        for start, before, arithmetic in zip(starts, restarts, arithmetics, strict=True)
    ]
    results: list[Any] = [None] * len(chains)
    operands: dict[int, Any] = dict.fromkeys(range(len(chains)))
    while operands:
        wide = {}
        for i, operand in operands.items():
            try:
                wide[i] = chains[i].send(operand)
            except StopIteration as end:
                results[i] = end.value
        rounded = arithmetics[0].round_all([*wide.values()]) if wide else []
        operands = dict(zip(wide, rounded, strict=True))
    return results


def _chain(
    start: Start, rows: Rows, restarts: Sequence[int], arithmetic: Arithmetic
) -> Chain:
    for i, j in itertools.pairwise([0, *restarts, len(rows)]):
        start = Start((yield from _segment(start, rows[i:j], arithmetic)))
    return start.x


def _segment(start: Start, rows: Rows, arithmetic: Arithmetic) -> Chain:
    x = start.x
    wide = arithmetic.is_wide(x)

    # Tall matrices are iterated like their transposes, but not transposed.
    def in_order(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (left, right) if wide else (right, left)

    def times(left: jax.Array, right: jax.Array) -> jax.Array:
        return arithmetic.product(*in_order(left, right))

    def symmetric(left: jax.Array, right: jax.Array) -> jax.Array:
        return arithmetic.symmetric(*in_order(left, right))

    gram = arithmetic.gram(x) if start.gram is None else start.gram
    scale: Any = 1.0
    polynomial = None  # P = scale I + polynomial.
    for k, (a, b, c) in enumerate(rows):
        factor = yield gram
        square = symmetric(factor, factor)
        z = b * factor.astype(square.dtype) + c * square
        if polynomial is None:
            polynomial = z
        else:
            v = yield polynomial
            polynomial = scale * z + a * polynomial + times((yield z), v)
        scale *= a
        if k + 1 < len(rows):
            half = a * gram + symmetric(factor, (yield z))
            gram = a * half + symmetric((yield half), (yield z))
    assert polynomial is not None
    product = times((yield polynomial), x)
    return (yield scale * x.astype(product.dtype) + product)
