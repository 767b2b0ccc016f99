r"""Newton–Schulz on the Gram matrix: fewer products where matrices are far from square.

For wide :math:`X_0` (m ≤ n) every iterate is :math:`X_k = P_k X_0`, where :math:`P_k` is
a polynomial in :math:`R_0 = X_0 X_0^\top`. With :math:`Z_k = a_kI + b_kR_k + c_kR_k^2`

.. math:: P_{k+1} = Z_k P_k, \qquad R_{k+1} = R_k Z_k Z_k, \qquad P_0 = I,

so that only :math:`R_0` and the final :math:`P X_0` cost m²n. A *restart* forms
:math:`X_k = P X_0` and :math:`R_k = X_k X_k^\top` and goes on from there; restarting
before every step is the plain iteration.

Rounding limits the segments between restarts, and decides three things. (1) The products
commute only in exact arithmetic. With :math:`P \gets ZP` an error F of Z becomes
:math:`F(PX_0)`, as in the plain iteration; with :math:`P \gets PZ` it becomes
:math:`PFX_0`, larger by up to the gain of P. (2) One triangle of a product for R is
enough, and moves R no more than rounding does; of ZP it is not, since what is mirrored
has its error on P's other side. (3) The identity is never added: with
:math:`P = \alpha I + V`, only V and :math:`bR + cR^2` are rounded.

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
import numpy as np

from orscale_jax._precision import Arithmetic
from orscale_jax._preconditioning import Start

Rows: TypeAlias = Sequence[Sequence[Any]]
# Of one array of matrices: yields sums, is sent them as operands.
Chain: TypeAlias = Generator[jax.Array, jax.Array, jax.Array]

_MAX_STEPS = 3  # Of one segment: what drifts between restarts does not correct itself.
_MAX_ERROR = 2.5  # Of one segment, as a multiple of the whole plain iteration's.
_MAX_GAIN = 2.0  # Of a negative eigenvalue, as a multiple of a zero's.
_MAX_OVERSHOOT = 0.01  # Of large singular values; the tables' own margins are smaller.
_EQUAL_VALUES = 1024  # So many equal singular values have the noisiest Gram matrix.
_GRID = np.concatenate([[0.0], np.geomspace(1e-4, 1, 300)])


def flops(m: int, n: int, steps: int, restarts: int) -> int:
    """Of the products of one m×n matrix, 2klm for each k×l by l×m product.

    A segment of k steps takes the Gram matrix, the product with X, k squares, k - 1
    products for P, 2(k - 1) for R. ``restarts = steps - 1`` is the plain iteration.
    """
    small, large = sorted((m, n))
    segments = restarts + 1
    square_products = 4 * steps - 3 * segments
    return 4 * segments * small**2 * large + 2 * square_products * small**3


def pays(m: int, n: int) -> bool:
    """Whether fewer restarts mean fewer FLOPs: where one side is 1.5 times the other."""
    return flops(m, n, steps=2, restarts=0) < flops(m, n, steps=2, restarts=1)


def restarts(table: np.ndarray, steps: int, unit: float) -> tuple[int, ...]:
    r"""Before which of the steps 1 … steps - 1 to restart; as late as stability allows.

    A segment has at most three steps: once singular values have arrived at 1, the plain
    iteration takes its own errors back, and a drifting R does not (12 more steps without
    a restart cost two digits). Three conditions on every segment of more than one step:

    - *Drift.* Let a Gram matrix be off by E. To first order, its polynomial q(R) is off
      by :math:`q[r, s] E_{rs}` in its eigenbasis, with the divided difference
      :math:`q[r, s] = (q(r) - q(s)) / (r - s)` (Daleckii–Krein; Higham, *Functions of
      Matrices*, theorem 3.11), and q(R)X by at most :math:`|q[r, s] \sqrt s|` times as
      much, since column s of X has length :math:`\sqrt s`. Every R of a segment from i
      to j errs so, with q the gain from there to j; forming X adds the largest gain;
      the steps after j multiply both by their gain at 0. For the plain iteration all
      segments are of one step. E is the unit roundoff times the noise of
      :func:`_ranges`, so that the unit cancels from the ratio that is bounded by 2.5.
    - *Negative eigenvalues.* An eigenvalue 0 of R may come out as -δ, and
      :math:`r \mapsto r z(r)^2` drives it away from zero. From
      :math:`-\tfrac12 \mathrm{unit} \cdot U^2`, the mean rounding of the largest
      eigenvalue that a segment can start with, the gain :math:`\prod z` must stay below
      twice that of 0.
    - *Overshoot.* P cancels: its part V is as large as the gain at 0 and brings large
      singular values down again, and rounding it, by half the unit on average, moves
      them by the gain times their size. A percent of that is the most that the next
      steps bear; in bfloat16 it leaves the plain iteration to every preset.

    ``unit`` is the unit roundoff of the products' operands. ``tests/test_gram.py``
    compares the first with errors found on adversarial spectra.
    """
    return _restarts(rows_of(table, steps), float(unit))


@functools.lru_cache(maxsize=256)
def _restarts(steps_rows: tuple[tuple[float, ...], ...], unit: float) -> tuple[int, ...]:
    rows = np.array(steps_rows)
    steps = len(rows)
    with np.errstate(all="ignore"):  # Tables that explode: no comparison with nan holds.
        upper, noise = _ranges(rows)

        def formed(i: int, j: int) -> float:
            gain = _gain(rows[i:j], (upper[i] * _GRID) ** 2)
            return float(np.abs(gain).max() * upper[i])

        def error(i: int, j: int) -> float:
            drift = sum(_drift(rows[k:j], upper[k]) * noise[k] for k in range(i, j))
            return float((drift + formed(i, j)) * np.abs(np.prod(rows[j:, 0])))

        def stable(i: int, j: int) -> bool:
            negative = _gain(rows[i:j], np.array(-0.5 * unit * upper[i] ** 2))
            gain = negative / np.prod(rows[i:j, 0])
            overshoot = 0.5 * unit * formed(i, j)
            return bool(
                j - i <= _MAX_STEPS
                and error(i, j) <= _MAX_ERROR * plain
                and gain <= _MAX_GAIN
                and overshoot <= _MAX_OVERSHOOT
            )

        plain = sum(error(k, k + 1) for k in range(steps))
        found, start = [], 0
        for k in range(1, steps):
            if not stable(start, k + 1):
                found.append(k)
                start = k
    return tuple(found)


def _gain(rows: np.ndarray, r: np.ndarray) -> np.ndarray:
    """By how much the steps multiply a singular value whose square is r."""
    gain = np.ones_like(r)
    for a, b, c in rows:
        z = a + r * (b + r * c)
        gain, r = gain * z, r * z**2
    return gain


def _drift(rows: np.ndarray, upper: float) -> float:
    """Largest error of q(R)X for errors of 1 in R, singular values in [0, upper]."""
    s = upper * _GRID
    r = s**2
    gain = _gain(rows, r)
    distance = np.subtract.outer(r, r)
    np.fill_diagonal(distance, np.inf)
    return float(np.abs(np.subtract.outer(gain, gain) / distance * s).max())


def _ranges(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Before every step: the largest singular value, and the noise of R.

    N equal singular values x of norm 1 have x = 1/√N. What rounding adds to their Gram
    matrix has entries of the size of its own and random signs; its spectral norm is
    therefore √N times the largest eigenvalue, which is at most p(x)²/x over all N.
    """
    x = np.concatenate([_GRID, np.geomspace(_EQUAL_VALUES**-0.5, 1, 1000)])
    equal = x >= _EQUAL_VALUES**-0.5
    y, upper, noise = x, [], []
    for a, b, c in rows:
        upper.append(np.abs(y).max())
        noise.append((y[equal] ** 2 / x[equal]).max())
        y = y * (a + y**2 * (b + y**2 * c))
    return np.array(upper), np.array(noise)


# Of many leaves with one shape, all but the first find it traced.
@functools.partial(jax.jit, static_argnames=("restarts", "arithmetics"))
def gram_newton_schulz(
    starts: Sequence[Start],
    rows: Rows,
    restarts: Sequence[tuple[int, ...]],
    arithmetics: Sequence[Arithmetic],
) -> list[jax.Array]:
    """Newton–Schulz of arrays of preconditioned matrices in turns, a step for each row.

    While a product of one array runs, the operands of the next one can be fetched. All
    are of one dtype.
    """
    chains = [
        _chain(start, rows, before, arithmetic)
        for start, before, arithmetic in zip(starts, restarts, arithmetics, strict=True)
    ]
    found: list[Any] = [None] * len(chains)
    operands: dict[int, Any] = dict.fromkeys(range(len(chains)))
    while operands:
        wide = {}
        for i, operand in operands.items():
            try:
                wide[i] = chains[i].send(operand)
            except StopIteration as end:
                found[i] = end.value
        rounded = arithmetics[0].round_all([*wide.values()]) if wide else []
        operands = dict(zip(wide, rounded, strict=True))
    return found


def _chain(
    start: Start, rows: Rows, restarts: Sequence[int], arithmetic: Arithmetic
) -> Chain:
    for i, j in itertools.pairwise([0, *restarts, len(rows)]):
        start = Start((yield from _segment(start, rows[i:j], arithmetic)))
    return start.x


def rows_of(table: np.ndarray, steps: int) -> tuple[tuple[float, ...], ...]:
    """One row per step; beyond the table its last."""
    rows = np.asarray(table, np.float64)[np.minimum(range(steps), len(table) - 1)]
    return tuple(map(tuple, rows.tolist()))


def _segment(start: Start, rows: Rows, arithmetic: Arithmetic) -> Chain:
    x = start.x
    wide = arithmetic.is_wide(x)

    # Tall matrices are iterated as their transposes, without transposing any.
    def in_order(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (left, right) if wide else (right, left)

    def times(left: jax.Array, right: jax.Array) -> jax.Array:
        return arithmetic.einsum("...ij,...jk->...ik", *in_order(left, right))

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
