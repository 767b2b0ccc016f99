"""The stage that scales every matrix by its shape."""

import math

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.boundary import Stage, on_matrices
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices


def scale_by_shape(
    consistent_rms: ArrayLike | None = 0.2,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale every ``(m, n)`` matrix by :math:`s = \text{rms} \cdot \sqrt{\max(m, n)}`.

    The entries of a semi-orthogonal Q then have root mean square ``consistent_rms``,
    whatever its shape; 0.2 matches the updates of AdamW.

    Args:
      consistent_rms: The root mean square; ``None`` for :math:`s = 1`. (In Optax's
        own ``scale_by_shape``, ``None`` stands for another rule, the width scaling.)
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A stateless transformation. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, or, from ``update``, if a leaf is not a
        matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import scale_by_shape
      >>> stage = scale_by_shape(0.2)
      >>> updates = {"kernel": jnp.ones((2, 100))}
      >>> print(stage.update(updates, stage.init(updates))[0]["kernel"][0, 0])
      2.0

    References:
      Liu et al. 2025, arXiv:2502.16982, section 2.2; Lou & You, *OrScale*, section 2.
    """
    stage = shape_stage(consistent_rms)
    if consistent_rms is None:
        return optax.identity()
    return on_matrices(weight_dimension_numbers, stage)


def shape_stage(consistent_rms: ArrayLike | None) -> Stage:
    """:func:`scale_by_shape` for given matrices."""
    _checks.number("consistent_rms", consistent_rms, at_least=0, optional=True)

    def scaled(axes: LeafAxes, leaf: jax.Array) -> jax.Array:
        dtype = compute_dtype(leaf)
        rms = jnp.asarray(consistent_rms, dtype)
        factor = rms * jnp.asarray(axes.by_shape(_root_of_larger, leaf), dtype)
        return (factor * leaf.astype(dtype)).astype(leaf.dtype)

    def stage(matrices: Matrices) -> optax.GradientTransformation:
        if consistent_rms is None:
            return optax.identity()
        return optax.stateless(lambda updates, _: matrices.map(scaled, updates))

    return stage


def _root_of_larger(m: int, n: int) -> float:
    return math.sqrt(max(m, n))
