r"""The restarts of the Gram form of Newton–Schulz, its cost and its range, in NumPy.

References:
  Zhang, Amsel, Chen, Dao, *Gram Newton-Schulz*, 2026,
  https://dao-lab.ai/blog/2026/gram-newton-schulz; Amsel et al., *Dion3*, 2026, section 4
  and appendix B.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

# Coefficients (a, b, c), a row for each step.
Table: TypeAlias = tuple[tuple[float, ...], ...]
# Of each segment: the factor of x before it, and that of x's Gram matrix.
Scales: TypeAlias = tuple[tuple[float, float], ...]

_MAX_STEPS = 3  # In a segment: drift between restarts does not correct itself.
_MAX_ERROR = 2.5  # A segment's error, relative to that of the whole plain iteration.
_MAX_GAIN = 2.0  # A negative eigenvalue's gain, relative to that of an eigenvalue 0.
_MAX_OVERSHOOT = 0.01  # For large singular values; the tables' margins are smaller.
_EQUAL_VALUES = 1024  # The number of equal singular values with the noisiest R.
# Half of the largest float16, which leaves room for rounding.
_LARGEST = 2.0**15
_GRID = np.concatenate([[0.0], np.geomspace(1e-4, 1, 300)])


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
      :func:`_ranges`, so that the unit cancels from the ratio that is bounded by 2.5.
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
    s = upper * _GRID
    r = s**2
    gain = _gain(rows, r)
    distance = np.subtract.outer(r, r)
    np.fill_diagonal(distance, np.inf)
    return float(np.abs(np.subtract.outer(gain, gain) / distance * s).max())


def _ranges(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Before every step: the largest singular value, and the noise of R.

    N equal singular values x of norm 1 have x = 1/√N. The rounding error of their Gram
    matrix has entries as large as the matrix itself has, with random signs; its spectral
    norm is therefore √N times the largest eigenvalue: at most p(x)²/x over all N.
    """
    x = np.concatenate([_GRID, np.geomspace(_EQUAL_VALUES**-0.5, 1, 1000)])
    equal = x >= _EQUAL_VALUES**-0.5
    y, upper, noise = x, [], []
    for a, b, c in rows:
        upper.append(np.abs(y).max())
        noise.append((y[equal] ** 2 / x[equal]).max())
        y = y * (a + y**2 * (b + y**2 * c))
    return np.array(upper), np.array(noise)


def segment(
    factor: Any, phi: Any, rows: Table, add: Callable[..., Any], mix: Any
) -> tuple[Any, Any]:
    r"""The w and ω of the steps between two restarts, from the factor F.

    For X = γx, with the Gram matrix R, these are stored, and their scales are numbers of
    Python: F = φR, y = ψY and w = ωW, where

    .. math::

      y &= F + \tfrac{c}{b\phi} FF, && \psi = a\phi / b, \\
      w &\gets (w + \tfrac\omega\psi y) + \tfrac1\psi yw
        && (w = y,\ \omega = \psi \text{ at first}), \\
      h &= F + \tfrac1\psi Fy, \\
      F &\gets h + \tfrac1\psi hy, && \phi \gets \phi / a^2, \\
      x &\gets x + \tfrac1\omega wx.

    The second one is :math:`P \gets ZP`, the next two are :math:`R \gets RZZ`, and the
    last one is :math:`X \gets PX`. The factors a and α are left out of each, and appear
    in φ and γ instead. ψ is what gives F the coefficient 1 in y, and ω = ψ saves a
    multiplication; φ alone is free.
    """
    w, omega = None, phi
    for k, (a, b, c) in enumerate(rows, 1):
        psi = a * phi / b
        y = add(factor, c / (b * phi), factor, factor) if c else factor
        if w is None:
            w, omega = y, psi
        else:
            w = add(mix(w, omega / psi, y), 1 / psi, y, w)
        if k < len(rows):
            half = add(factor, 1 / psi, factor, y)
            factor, phi = add(half, 1 / psi, half, y), phi / (a * a)
    return w, omega


@functools.lru_cache(maxsize=256)
def monic_scales(table: Table, restarts: tuple[int, ...], norm: float) -> Scales | None:
    r"""The factors of each segment with which nothing overflows float16; None without.

    Every array of a segment is a polynomial in its R, or one times x. No entry exceeds
    the largest singular value, which is the largest absolute value of the polynomial on
    R's eigenvalues. So the steps are run here on eigenvalues, in float64: each result,
    each product before it is scaled and added, and each constant must stay below half of
    the largest float16. The other half is room for rounding. A table that explodes, or
    has a zero a or b, has no such factors.

    The first ψ of a segment is a power of two, so that what 1/ψ and 1/ω scale is not
    rounded for it; the largest one that fits, so that few entries are subnormal.
    ``norm`` is that of normalized matrices.
    """
    scales, gain = [], 1 / norm
    with np.errstate(all="ignore"):  # Tables that explode: no comparison with nan holds.
        upper, _ = _ranges(np.array(table))
        if not np.isfinite(upper).all() or not all(a and b for a, b, _ in table):
            return None
        for i, j in itertools.pairwise([0, *restarts, len(table)]):
            rows = table[i:j]
            (a, b, _), alpha = rows[0], math.prod(a for a, _, _ in rows)
            # A small x would have subnormal entries: it regains its size, exactly.
            grown = abs(gain * alpha) > 16
            lift = 2.0 ** math.floor(math.log2(abs(gain)) + 6) if grown else 1.0
            gain /= lift
            x = 1.05 * upper[i] * _GRID / gain
            phi = abs(b / a) * 2.0 ** np.arange(30, -30, -1)
            fits = _largest(rows, x, gain, phi[:, None]) <= _LARGEST
            if not fits.any():
                return None
            scales.append((lift, float(phi[fits.argmax()]) * gain**2))
            gain *= alpha
    return tuple(scales)


def _largest(rows: Table, x: np.ndarray, gain: float, phi: np.ndarray) -> np.ndarray:
    """The largest number of a segment whose x has these singular values, for each φ."""
    factor = phi * (gain * x) ** 2
    found = [factor, x**2]

    def add(c: Any, beta: Any, left: Any, right: Any) -> Any:
        found.extend([beta, left * right, result := c + beta * left * right])
        return result

    w, omega = segment(factor, phi, rows, add, lambda w, beta, y: w + beta * y)
    add(x, 1 / omega, w, x)
    return np.max([np.abs(each).max(axis=-1) * np.ones(len(phi)) for each in found], 0)
