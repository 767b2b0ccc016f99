r"""What is done to a matrix before Newton–Schulz: singular values have to be at most 1.

Dividing by the Frobenius norm does that, and leaves the singular values of an m×n matrix
(m ≤ n) at :math:`1/\sqrt m` or less on average. AOL (*almost orthogonal layer*) gives
each of the m vectors on the shorter side its own factor instead,

.. math:: s_i = \Bigl(\sum_j |A_{ij}|\Bigr)^{-1/2}, \qquad A = XX^\top, \qquad
   X \gets \operatorname{diag}(s) X.

:math:`\operatorname{diag}(s) |A| \operatorname{diag}(s)` is similar to
:math:`\operatorname{diag}(s)^2 |A|`, a matrix without negative entries whose rows sum to
1. Its spectral radius is 1, and bounds that of
:math:`\operatorname{diag}(s) A \operatorname{diag}(s)`, the new Gram matrix, by the
triangle inequality; it has the first step's product already.

References:
  Boissin, Massena, Mamalet, Serrurier, *Turbo-Muon: Accelerating Orthogonality-Based
  Optimization with Pre-Conditioning*, 2025, arXiv:2512.04632; Prach & Lampert,
  *Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks*, 2022,
  arXiv:2208.03160, theorem 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from orscale_jax import _checks
from orscale_jax._precision import Arithmetic, accumulator


class Start(NamedTuple):
    """What Newton–Schulz starts from.

    Attributes:
      x: Shape (..., m, n), the dtype of the products' operands.
      gram: The Gram matrix of the shorter side, in the accumulator's dtype, if it is
        known already.
    """

    x: jax.Array
    gram: jax.Array | None = None


def check(name: str, value: str) -> None:
    """Refuse ``value`` unless it names a preconditioning."""
    _checks.choice(name, value, _PRECONDITIONINGS)


def start(x: jax.Array, preconditioning: str, arithmetic: Arithmetic) -> Start:
    """Precondition matrices.

    Args:
      x: Shape (..., m, n).
      preconditioning: ``"frobenius"`` or ``"aol"``.
      arithmetic: Of the products.

    Returns:
      Matrices whose singular values are at most 1, up to one rounding.
    """
    # A float64 input may lie beyond float32's range.
    widths = (arithmetic.accumulator, accumulator(x.dtype))
    widest = x.astype(max(widths, key=lambda kind: kind.itemsize))
    # Over its largest entry: squares neither overflow nor underflow.
    largest = arithmetic.max(jnp.abs(widest))
    bounded = widest / jnp.where(largest == 0, 1, largest)
    return _PRECONDITIONINGS[preconditioning](bounded, arithmetic)


def _frobenius(x: jax.Array, arithmetic: Arithmetic) -> Start:
    norm = jnp.sqrt(arithmetic.sum(jnp.square(x)))
    normalized = x / jnp.where(norm == 0, 1, norm)
    return Start(arithmetic.round(normalized.astype(arithmetic.accumulator)))


def _aol(x: jax.Array, arithmetic: Arithmetic) -> Start:
    # Factors of the operand, not of x: an entry that float16 loses has to stay lost.
    operand = arithmetic.round(x.astype(arithmetic.accumulator))
    gram = arithmetic.gram(operand)
    sums = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    # Zero vectors stay zero; subnormal sums have too few digits to bound anything.
    scale = jax.lax.rsqrt(jnp.maximum(sums, jnp.finfo(sums.dtype).tiny))
    scaled = (scale if arithmetic.is_wide(x) else scale.mT) * operand.astype(gram.dtype)
    # In this order, since the product of two factors may overflow.
    return Start(arithmetic.round(scaled), scale * gram * scale.mT)


_PRECONDITIONINGS = {"frobenius": _frobenius, "aol": _aol}
