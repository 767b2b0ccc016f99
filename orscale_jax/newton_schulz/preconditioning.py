r"""Preconditioning before Newton–Schulz, which needs singular values of at most 1.

Dividing by the Frobenius norm ensures that; the singular values of an m×n matrix (m ≤ n)
are then :math:`1/\sqrt m` or less on average. AOL (*almost orthogonal layer*) gives
each of the m vectors on the shorter side its own factor instead,

.. math:: s_i = \Bigl(\sum_j |A_{ij}|\Bigr)^{-1/2}, \qquad A = XX^\top, \qquad
   X \gets \operatorname{diag}(s) X.

:math:`\operatorname{diag}(s) |A| \operatorname{diag}(s)` is similar to
:math:`\operatorname{diag}(s)^2 |A|`, a matrix without negative entries whose rows sum to
1. Its spectral radius is 1, and bounds that of
:math:`\operatorname{diag}(s) A \operatorname{diag}(s)` by the triangle inequality. The
latter is the new Gram matrix, which saves the first product of the first step.

References:
  Boissin, Massena, Mamalet, Serrurier, *Turbo-Muon: Accelerating Orthogonality-Based
  Optimization with Pre-Conditioning*, 2025, arXiv:2512.04632; Prach & Lampert,
  *Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks*, 2022,
  arXiv:2208.03160, theorem 1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from orscale_jax import _checks
from orscale_jax.newton_schulz.arithmetic import Arithmetic, accumulator


class Start(NamedTuple):
    """A preconditioned array of matrices.

    Attributes:
      x: Shape (..., m, n), the dtype of the products' operands.
      gram: The Gram matrix of the shorter side, in the accumulator's dtype, if
        preconditioning computed it.
    """

    x: jax.Array
    gram: jax.Array | None = None


def check(name: str, value: str) -> None:
    """Refuse ``value`` unless it names a preconditioning."""
    _checks.choice(name, value, _PRECONDITIONINGS)


def may_transpose_squares(name: str) -> bool:
    """Whether a square matrix and its transpose are preconditioned alike."""
    return name != "aol"  # AOL scales the rows of squares.


# Jitted, so that leaves of one shape are traced once.
@functools.partial(jax.jit, static_argnames="arithmetic")
def normalize(x: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    """Divide each matrix by its Frobenius norm, whatever the scale of its entries.

    Args:
      x: Shape (..., m, n).
      arithmetic: The arithmetic of the products that follow.

    Returns:
      Matrices of norm 0 or ``arithmetic.scale``, in the wider of the two accumulators'
      dtypes.
    """
    x = _widen(x, arithmetic)
    largest = arithmetic.largest(x)
    scaled = x / jnp.where(largest == 0, 1, largest)
    unit = scaled / _root(arithmetic.sum(jnp.square(scaled)))
    return _times(arithmetic.scale, unit)


def normalize_all(
    xs: Sequence[jax.Array],
    arithmetic: Arithmetic,
    sums: Callable[[Sequence[jax.Array]], Sequence[jax.Array]],
) -> list[jax.Array]:
    """:func:`normalize` of several arrays, in one pass over the entries instead of two.

    Args:
      xs: Arrays of shape (..., m, n).
      arithmetic: The arithmetic of the products that follow.
      sums: The sums of the entries of each matrix, of shape (..., 1, 1), for several
        arrays.

    Returns:
      Matrices of norm 0 or ``arithmetic.scale``, in the wider of the two accumulators'
      dtypes.
    """
    of_all = [_at_three_scales(x, arithmetic) for x in xs]
    found = iter(sums([square for _, *squares in of_all for square in squares]))
    return [
        _divide(wide, *(next(found) for _ in squares), scale=arithmetic.scale)
        for wide, *squares in of_all
    ]


def _widen(x: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    # A float64 input may lie beyond float32's range.
    widths = (arithmetic.accumulator, accumulator(x.dtype))
    return x.astype(max(widths, key=lambda kind: kind.itemsize))


def _times(scale: float, x: jax.Array) -> jax.Array:
    return x if scale == 1 else scale * x


def _root(square: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.where(square == 0, 1, square))


class _Scales(NamedTuple):
    """Powers of two for the sums of squares of small, of usual and of large entries.

    Attributes:
      shift: The factor of small entries, and the divisor of large ones.
      tiny: A sum of squares below it may have lost digits to underflow.
    """

    shift: float
    tiny: float

    @classmethod
    def of(cls, dtype: Any) -> "_Scales":
        exponent = jnp.finfo(dtype).maxexp // 8
        return cls(2.0 ** (5 * exponent), 2.0 ** (-3 * exponent))


# Jitted, so that leaves of one shape are traced once; so is the next one.
@functools.partial(jax.jit, static_argnames="arithmetic")
def _at_three_scales(
    x: jax.Array, arithmetic: Arithmetic
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The matrices, widened, and their squares as they are, scaled down, and up."""
    x = _widen(x, arithmetic)
    shift, tiny = _Scales.of(x.dtype)
    # Clipped: an overflow here would spoil the derivative even where it is not chosen.
    clipped = jnp.clip(x, -math.sqrt(tiny), math.sqrt(tiny))
    return x, jnp.square(x), jnp.square(x / shift), jnp.square(clipped * shift)


@functools.partial(jax.jit, static_argnames="scale")
def _divide(
    x: jax.Array, middle: jax.Array, large: jax.Array, small: jax.Array, *, scale: float
) -> jax.Array:
    """Give each matrix the norm ``scale``, from the sums of its squares at three scales.

    Where the sum of squares overflows, or may have lost digits to underflow, the sum at
    another scale, which has not, is used.
    """
    shift, tiny = _Scales.of(x.dtype)
    overflows = jnp.isinf(middle)

    def chosen(if_small: Any, if_large: Any, else_: Any) -> jax.Array:
        return jnp.where(middle < tiny, if_small, jnp.where(overflows, if_large, else_))

    factor = chosen(scale * shift, scale / shift, scale)
    return x * factor / _root(chosen(small, large, middle))


def start(x: jax.Array, preconditioning: str, arithmetic: Arithmetic) -> Start:
    """Precondition matrices.

    Args:
      x: From :func:`normalize`.
      preconditioning: ``"frobenius"`` or ``"aol"``.
      arithmetic: The arithmetic of the products.

    Returns:
      Matrices whose singular values are at most ``arithmetic.scale``, up to one rounding.
    """
    return _PRECONDITIONINGS[preconditioning](x, arithmetic)


def _frobenius(x: jax.Array, arithmetic: Arithmetic) -> Start:
    return Start(arithmetic.round(x.astype(arithmetic.accumulator)))


def _aol(x: jax.Array, arithmetic: Arithmetic) -> Start:
    # From the rounded operand: an entry that float16 flushes to zero stays zero.
    operand = arithmetic.round(x.astype(arithmetic.accumulator))
    gram = arithmetic.gram(operand)
    sums = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    # Zero vectors stay zero; subnormal sums have too few digits to bound anything.
    tiny = jnp.finfo(sums.dtype).tiny
    # Twice, since the derivative of a root at zero is infinite.
    small = sums < tiny
    inverse = jnp.where(small, tiny**-0.5, jax.lax.rsqrt(jnp.where(small, 1, sums)))
    scale = _times(arithmetic.scale, inverse)
    scaled = (scale if arithmetic.is_wide(x) else scale.mT) * operand.astype(gram.dtype)
    # In this order, since the product of two factors may overflow.
    return Start(arithmetic.round(scaled), scale * gram * scale.mT)


_PRECONDITIONINGS = {"frobenius": _frobenius, "aol": _aol}
