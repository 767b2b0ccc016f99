"""The curvature of the paper's model, and the scale of its steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.stages import Scale
from orscale_jax.trees.boxes import PyTree, unbox


def curvature(
    smoothness: PyTree,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> PyTree:
    r"""Compute the curvature :math:`b_\ell = L_\ell p_\ell` of every matrix.

    :math:`p_\ell = \min(m_\ell, n_\ell)` bounds :math:`\|Q_\ell\|_F^2`: the squared norm
    of a polar factor is its rank. The function is linear: it also turns
    standard errors of L into b's.

    Args:
      smoothness: L, such as ``estimate(...).smoothness.value``.
      params: The parameters.
      weight_dimension_numbers: The dimension numbers of the optimizer.

    Returns:
      A tree like ``smoothness``.

    Raises:
      ValueError: If ``smoothness`` is not of these matrices.

    Example:
      >>> import jax.numpy as jnp
      >>> from examples.study.theory import curvature
      >>> print(curvature({"kernel": jnp.array(2.0)}, {"kernel": jnp.ones((3, 5))}))
      {'kernel': Array(6., dtype=float32)}

    References:
      Lou & You, *OrScale*, section 4.
    """
    return _times(min, smoothness, params, weight_dimension_numbers)


def shape_scale(
    per_matrix_tree: PyTree,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers,
    scale: Scale,
    power: int,
) -> PyTree:
    r"""Entries times :math:`s_\ell^k`, the scale of a matrix in :func:`scale_by_shape`.

    The paper's Φ is that of steps :math:`\hat r_\ell Q_\ell`. Where the step is
    :math:`\hat r_\ell s_\ell Q_\ell`, the same Φ with :math:`s_\ell a_\ell` and
    :math:`s_\ell^2 b_\ell` compares :math:`\hat r` with Muon at this scale.

    Args:
      per_matrix_tree: a, with ``power=1``, or b, with ``power=2``.
      params: The parameters.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      scale: s, with an RMS that is known.
      power: k.

    Returns:
      A tree like the one given.
    """
    if scale.square is None:
        return per_matrix_tree
    return _times(
        lambda m, n: scale.value(m, n) ** power,
        per_matrix_tree,
        params,
        weight_dimension_numbers,
    )


def _times(
    fn: Callable[[int, int], float],
    entries: PyTree,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> PyTree:
    """The entry of each matrix times ``fn(m, n)``."""

    def at(axes: MatrixAxes, scalars: Any, leaf: Any) -> jax.Array:
        scalars, shape = jnp.asarray(scalars), axes.batch_shape(leaf)
        if scalars.shape != shape:
            raise ValueError(f"found shape {scalars.shape} for matrices of shape {shape}")
        factor = np.broadcast_to(axes.batch_by_shape(fn, leaf), shape)
        return scalars * jnp.asarray(factor, compute_dtype(scalars))

    matrices = Matrices.of(weight_dimension_numbers, params)
    try:
        of_matrices = matrices.tree_of(matrices.leaves(unbox(entries)))
        return matrices.map(at, of_matrices, unbox(params))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "smoothness must be a tree like the parameters, with an entry for each "
            f"matrix: {error}"
        ) from error
