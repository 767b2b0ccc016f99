r"""Newton–Schulz in float16, for GPUs: products that are added to an array by one kernel.

Where sums of products are float32, a second kernel adds them up and rounds them, and
takes as long as the product. Here both polynomials of the Gram form are *monic*,

.. math:: Z = a (I + Y), \qquad P = \alpha (I + W),

so that every array is another one plus a multiple of a product, :math:`C + \beta AB`.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from orscale_jax.newton_schulz.arithmetic import Arithmetic, Start
from orscale_jax.newton_schulz.restarts import GRID, Table, ranges

# Of each segment: the factor of x before it, and that of x's Gram matrix.
Scales: TypeAlias = tuple[tuple[float, float], ...]

# Half of the largest float16, which leaves room for rounding.
_LARGEST = 2.0**15


# Jitted, so that leaves of one shape are traced once.
@functools.partial(jax.jit, static_argnames=("rows", "restarts", "scales", "arithmetic"))
def monic_newton_schulz(
    start: Start,
    rows: Table,
    restarts: tuple[int, ...],
    scales: Scales,
    arithmetic: Arithmetic,
) -> jax.Array:
    """Newton–Schulz on preconditioned matrices, by the scales of :func:`monic_scales`."""
    x, gram = start
    wide = arithmetic.is_wide(x)

    def add(c: jax.Array, beta: float, left: jax.Array, right: jax.Array) -> jax.Array:
        # Tall matrices are iterated like their transposes, but not transposed.
        first, second = (left, right) if wide else (right, left)
        return arithmetic.add_product(c, beta, first, second)

    def mix(w: jax.Array, beta: float, y: jax.Array) -> jax.Array:
        sums = w.astype(arithmetic.accumulator) + beta * y.astype(arithmetic.accumulator)
        return arithmetic.round(sums)

    gain = 1 / arithmetic.scale
    segments = itertools.pairwise([0, *restarts, len(rows)])
    for (i, j), (lift, g) in zip(segments, scales, strict=True):
        if lift != 1:
            x, gain = x * np.asarray(lift, x.dtype), gain / lift
        gram = arithmetic.gram(x) if gram is None else gram
        factor = arithmetic.round(g * gram)
        x, gram = _segment(x, factor, g / gain**2, rows[i:j], add, mix), None
        gain *= math.prod(a for a, _, _ in rows[i:j])
    return gain * x.astype(arithmetic.accumulator)


def _segment(
    x: Any, factor: Any, phi: Any, rows: Table, add: Callable[..., Any], mix: Any
) -> Any:
    r"""The steps between two restarts: x becomes :math:`(I + W)x`.

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
    return add(x, 1 / omega, w, x)


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
        upper, _ = ranges(np.array(table))
        if not np.isfinite(upper).all() or not all(a and b for a, b, _ in table):
            return None
        for i, j in itertools.pairwise([0, *restarts, len(table)]):
            rows = table[i:j]
            (a, b, _), alpha = rows[0], math.prod(a for a, _, _ in rows)
            # A small x would have subnormal entries: it regains its size, exactly.
            grown = abs(gain * alpha) > 16
            lift = 2.0 ** math.floor(math.log2(abs(gain)) + 6) if grown else 1.0
            gain /= lift
            x = 1.05 * upper[i] * GRID / gain
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

    _segment(x, factor, phi, rows, add, lambda w, beta, y: w + beta * y)
    return np.max([np.abs(each).max(axis=-1) * np.ones(len(phi)) for each in found], 0)
