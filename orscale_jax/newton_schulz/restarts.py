r"""The restarts of the Gram form of Newton–Schulz, and its cost, in NumPy.

References:
  Zhang, Amsel, Chen, Dao, *Gram Newton-Schulz*, 2026,
  https://dao-lab.ai/blog/2026/gram-newton-schulz; Amsel et al., *Dion3*, 2026, section 4
  and appendix B.
"""

import functools
from typing import TypeAlias

import numpy as np

# Coefficients (a, b, c), a row for each step.
Table: TypeAlias = tuple[tuple[float, ...], ...]

_MAX_STEPS = 3  # In a segment: drift between restarts does not correct itself.
_MAX_ERROR = 2.5  # A segment's error, relative to that of the whole plain iteration.
_MAX_GAIN = 2.0  # A negative eigenvalue's gain, relative to that of an eigenvalue 0.
_MAX_OVERSHOOT = 0.01  # For large singular values; the tables' margins are smaller.
_EQUAL_VALUES = 1024  # The number of equal singular values with the noisiest R.
GRID = np.concatenate([[0.0], np.geomspace(1e-4, 1, 300)])


def flops(m: int, n: int, steps: int, restarts: int) -> int:
    """The FLOPs of one m×n matrix, counting 2klm for each k×l by l×m product.

    A segment of k steps takes the Gram matrix, the product with X, k squares, k - 1
    products for P, 2(k - 1) for R. ``restarts = steps - 1`` is the plain iteration.
    """
    small, large = sorted((m, n))
    segments = restarts + 1
    square_products = 4 * steps - 3 * segments
    return 4 * segments * small**2 * large + 2 * square_products * small**3


def is_cheaper(m: int, n: int) -> bool:
    """Whether the Gram form takes fewer FLOPs: one side is 1.5 times the other."""
    return flops(m, n, steps=2, restarts=0) < flops(m, n, steps=2, restarts=1)


@functools.lru_cache(maxsize=256)
def restart_steps(table: Table, unit: float) -> tuple[int, ...]:
    r"""The steps, out of 1 … steps - 1, before which to restart; as few as are stable.

    A segment has at most three steps: once singular values have reached 1, the plain
    iteration corrects its own errors, and a drifting R does not (12 more steps without
    a restart cost two digits). Three conditions on every segment of more than one step:

    - *Drift.* Let a Gram matrix be off by E. To first order, its polynomial q(R) is off
      by :math:`q[r, s] E_{rs}` in its eigenbasis, with the divided difference
      :math:`q[r, s] = (q(r) - q(s)) / (r - s)` (Daleckii–Krein; Higham, *Functions of
      Matrices*, theorem 3.11), and q(R)X by at most :math:`|q[r, s] \sqrt s|` times as
      much, since column s of X has length :math:`\sqrt s`. Every R of a segment from i
      to j has such an error, with q the gain from there to j; forming X adds the largest
      gain; the steps after j multiply both by their gain at 0. In the plain iteration
      every segment has one step. E is the unit roundoff times the noise of
      :func:`ranges`, so that the unit cancels from the ratio that is bounded by 2.5.
    - *Negative eigenvalues.* An eigenvalue 0 of R may come out as -δ, and
      :math:`r \mapsto r z(r)^2` drives it away from zero. From
      :math:`-\tfrac12 \mathrm{unit} \cdot U^2`, the mean rounding of the largest
      eigenvalue that a segment can start with, the gain :math:`\prod z` must stay below
      twice that of 0.
    - *Overshoot.* P has cancellation: its part V is as large as the gain at 0 and brings
      large singular values down again. Rounding V, by half the unit on average, moves
      them by the gain times their size. The next steps tolerate at most a percent of
      that; in bfloat16 this leaves every preset with the plain iteration.

    ``tests/newton_schulz/test_gram.py`` compares errors with those of the plain form on
    adversarial spectra.

    ``unit`` is the unit roundoff of the products' operands.
    """
    rows = np.array(table)
    steps = len(rows)
    with np.errstate(all="ignore"):  # Tables that explode: no comparison with nan holds.
        upper, noise = ranges(rows)

        def formed(i: int, j: int) -> float:
            gain = _gain(rows[i:j], (upper[i] * GRID) ** 2)
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
        before, start = [], 0
        for k in range(1, steps):
            if not stable(start, k + 1):
                before.append(k)
                start = k
    return tuple(before)


def _gain(rows: np.ndarray, r: np.ndarray) -> np.ndarray:
    """The factor by which the steps multiply a singular value whose square is r."""
    gain = np.ones_like(r)
    for a, b, c in rows:
        z = a + r * (b + r * c)
        gain, r = gain * z, r * z**2
    return gain


def _drift(rows: np.ndarray, upper: float) -> float:
    """Largest error of q(R)X for errors of 1 in R, singular values in [0, upper]."""
    s = upper * GRID
    r = s**2
    gain = _gain(rows, r)
    distance = np.subtract.outer(r, r)
    np.fill_diagonal(distance, np.inf)
    return float(np.abs(np.subtract.outer(gain, gain) / distance * s).max())


def ranges(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Before every step: the largest singular value, and the noise of R.

    N equal singular values x of norm 1 have x = 1/√N. The rounding error of their Gram
    matrix has entries as large as the matrix itself has, with random signs; its spectral
    norm is therefore √N times the largest eigenvalue: at most p(x)²/x over all N.
    """
    x = np.concatenate([GRID, np.geomspace(_EQUAL_VALUES**-0.5, 1, 1000)])
    equal = x >= _EQUAL_VALUES**-0.5
    y, upper, noise = x, [], []
    for a, b, c in rows:
        upper.append(np.abs(y).max())
        noise.append((y[equal] ** 2 / x[equal]).max())
        y = y * (a + y**2 * (b + y**2 * c))
    return np.array(upper), np.array(noise)
