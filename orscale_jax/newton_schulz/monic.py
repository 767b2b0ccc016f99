r"""Newton–Schulz in float16, for GPUs: products that are added to an array by one kernel.

Where sums of products are float32, a second kernel adds them up and rounds them, and
takes as long as the product. Here both polynomials of the Gram form are *monic*,

.. math:: Z = a (I + Y), \qquad P = \alpha (I + W),

so that every array is another one plus a multiple of a product, :math:`C + \beta AB`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
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
    starts: Sequence[Start],
    rows: Table,
    restarts: tuple[int, ...],
    scales: Scales,
    arithmetic: Arithmetic,
) -> list[jax.Array]:
    """Newton–Schulz on preconditioned matrices, by the scales of :func:`monic_scales`.

    The shorter sides of all arrays have one length. Their Gram matrices go through the
    steps in one batch.
    """
    xs, grams = ([*each] for each in zip(*starts, strict=True))
    add = arithmetic.add_product

    def mix(w: jax.Array, beta: float, y: jax.Array) -> jax.Array:
        sums = w.astype(arithmetic.accumulator) + beta * y.astype(arithmetic.accumulator)
        return arithmetic.round(sums)

    gain = 1 / arithmetic.scale
    segments = itertools.pairwise([0, *restarts, len(rows)])
    for (i, j), (lift, g) in zip(segments, scales, strict=True):
        if lift != 1:
            xs, gain = [x * np.asarray(lift, x.dtype) for x in xs], gain / lift
        factors = [
            arithmetic.round(g * (arithmetic.gram(x) if gram is None else gram))
            for x, gram in zip(xs, grams, strict=True)
        ]
        factor = _in_one_batch(factors)
        w, omega = _segment(factor, g / gain**2, rows[i:j], add, mix)
        # Tall matrices are iterated like their transposes, but not transposed.
        xs = [
            add(x, 1 / omega, *((of_x, x) if arithmetic.is_wide(x) else (x, of_x.mT)))
            for x, of_x in zip(xs, _apart(w, factors), strict=True)
        ]
        grams = [None] * len(xs)
        gain *= math.prod(a for a, _, _ in rows[i:j])
    return [gain * x.astype(arithmetic.accumulator) for x in xs]


def _in_one_batch(xs: Sequence[jax.Array]) -> jax.Array:
    if len(xs) == 1:
        return xs[0]
    return jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in xs])


def _apart(batch: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Invert :func:`_in_one_batch`, to arrays of the shapes of ``like``."""
    if len(like) == 1:
        return [batch]
    ends = itertools.accumulate(math.prod(x.shape[:-2]) for x in like[:-1])
    parts = jnp.split(batch, [*ends])
    return [part.reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def _segment(
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

    w, omega = _segment(factor, phi, rows, add, lambda w, beta, y: w + beta * y)
    add(x, 1 / omega, w, x)
    return np.max([np.abs(each).max(axis=-1) * np.ones(len(phi)) for each in found], 0)
