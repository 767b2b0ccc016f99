"""Smoothness from successive gradients, and the curvature of the paper's model."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.diagnostics import jackknife
from orscale_jax.diagnostics.jackknife import Estimate
from orscale_jax.diagnostics.matrix_leaves import (
    matrix_leaves,
    per_matrix,
    require_like,
    tree_of,
)
from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers, matrix_axes
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.trees.boxes import PyTree


def secant_smoothness(
    previous_gradients: Sequence[PyTree],
    gradients: Sequence[PyTree],
    step: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> Estimate:
    r"""Compute the smoothness along a step from the gradients before and after it.

    .. math::

      L_\ell = \frac{\langle G'_\ell - G_\ell, \, \Delta_\ell \rangle}
        {\|\Delta_\ell\|_F^2}, \qquad \Delta = W' - W,

    the mean over the step of the smoothness that :func:`estimate` finds at its start. It
    takes no second derivatives, and costs no more than the gradients. Both gradients must
    be of the same micro-batches: those of different ones also differ by their noise,
    which a small step cannot outweigh.

    Args:
      previous_gradients: The gradients at W: a list with a tree for each micro-batch;
        ``[tree]`` for one.
      gradients: The gradients of the same micro-batches at W', in the same order.
      step: :math:`W' - W`, a tree like the parameters.
      weight_dimension_numbers: The dimension numbers of the optimizer.

    Returns:
      An :class:`Estimate` of trees, like ``smoothness`` of :func:`estimate`. The standard
      error is NaN for one micro-batch, and L is NaN for a matrix that did not move.

    Raises:
      ValueError: If the lists do not have the same length, or a tree does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from orscale_jax.diagnostics import secant_smoothness
      >>> gradient = jax.grad(lambda w: 1.5 * jnp.sum(w["kernel"] ** 2))
      >>> before, after = {"kernel": jnp.eye(3)}, {"kernel": 0.9 * jnp.eye(3)}
      >>> step = jax.tree.map(jnp.subtract, after, before)
      >>> found = secant_smoothness([gradient(before)], [gradient(after)], step)
      >>> print(found.value["kernel"].round(3))
      3.0

    References:
      Lou & You, *OrScale*, section 4, (A1).
    """
    for name, trees in (
        ("previous_gradients", previous_gradients),
        ("gradients", gradients),
    ):
        if not isinstance(trees, list | tuple) or not trees:
            _checks.refuse(name, type(trees), "pass a list of trees, one per micro-batch")
    if len(previous_gradients) != len(gradients):
        raise ValueError(
            f"previous_gradients has {len(previous_gradients)} micro-batches and "
            f"gradients {len(gradients)}: pass gradients of the same ones in both."
        )
    axes_tree, leaves = matrix_leaves(weight_dimension_numbers, step)
    moved = leaves.parts(leaves.pick(step))
    samples = []
    for before, after in zip(previous_gradients, gradients, strict=True):
        old, new = (
            leaves.parts(require_like(name, axes_tree, tree, step))
            for name, tree in (("previous_gradients", before), ("gradients", after))
        )
        samples.append([_secant(*parts) for parts in zip(old, new, moved, strict=True)])
    parts = [jackknife.mean(jnp.stack(of_part)) for of_part in zip(*samples, strict=True)]
    value, stderr = (
        tree_of(axes_tree, leaves.from_parts([part[i] for part in parts])) for i in (0, 1)
    )
    return Estimate(value, stderr)


def _secant(old: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
    change, square = (jnp.sum(x * step, axis=(-2, -1)) for x in (new - old, step))
    return change / square


def curvature(
    smoothness: PyTree,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> PyTree:
    r"""Compute the curvature :math:`b_\ell = L_\ell p_\ell` of every matrix.

    :math:`p_\ell = \min(m_\ell, n_\ell)` bounds :math:`\|Q_\ell\|_F^2`, the rank of the
    polar factor. The function is linear: it also turns standard errors of L into b's.

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
      >>> from orscale_jax.diagnostics import curvature
      >>> print(curvature({"kernel": jnp.array(2.0)}, {"kernel": jnp.ones((3, 5))}))
      {'kernel': Array(6., dtype=float32)}

    References:
      Lou & You, *OrScale*, section 4.
    """

    def times_p(axes: LeafAxes, scalars: Any, leaf: Any) -> jax.Array:
        p = np.asarray(axes.batch_by_shape(min, leaf), np.float64)
        return _times(p, scalars, axes, leaf)

    return _per_matrix(times_p, smoothness, params, weight_dimension_numbers)


def shape_scale(
    per_matrix_tree: PyTree,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    consistent_rms: ArrayLike | None,
    power: int = 1,
) -> PyTree:
    r"""Entries times :math:`s_\ell^k`, the scale of a matrix in :func:`scale_by_shape`.

    The paper's Φ is that of steps :math:`\hat r_\ell Q_\ell`. Where the step is
    :math:`\hat r_\ell s_\ell Q_\ell`, the same Φ with :math:`s_\ell a_\ell` and
    :math:`s_\ell^2 b_\ell` compares :math:`\hat r` with Muon at this scale.

    Args:
      per_matrix_tree: a, with ``power=1``, or b, with ``power=2``.
      params: The parameters.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      consistent_rms: The value that the optimizer has; None: :math:`s_\ell = 1`.
      power: k.

    Returns:
      A tree like the one given.
    """
    if consistent_rms is None:
        return per_matrix_tree
    rms = float(jax.device_get(consistent_rms))

    def scaled(axes: LeafAxes, scalars: Any, leaf: Any) -> jax.Array:
        def s(m: int, n: int) -> float:
            return (rms * math.sqrt(max(m, n))) ** power

        return _times(np.asarray(axes.batch_by_shape(s, leaf)), scalars, axes, leaf)

    return _per_matrix(scaled, per_matrix_tree, params, weight_dimension_numbers)


def _per_matrix(
    fn: Any, tree: PyTree, params: PyTree, weight_dimension_numbers: Any
) -> PyTree:
    axes_tree = matrix_axes(weight_dimension_numbers, params)
    try:
        return per_matrix(axes_tree, fn, tree, params)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "smoothness must be a tree like the parameters, with an entry for each "
            f"matrix: {error}"
        ) from error


def _times(factor: np.ndarray, scalars: Any, axes: LeafAxes, leaf: Any) -> jax.Array:
    scalars = jnp.asarray(scalars)
    shape = axes.batch_shape(leaf)
    if scalars.shape != shape:
        raise ValueError(f"found shape {scalars.shape} for matrices of shape {shape}")
    wide = np.broadcast_to(factor, shape)
    return scalars * jnp.asarray(wide, compute_dtype(scalars))
