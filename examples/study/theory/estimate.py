"""Signal, noise and smoothness of every matrix, from gradients of micro-batches."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.study.theory import jackknife
from examples.study.theory.per_matrix import matrices_like
from examples.study.theory.samples import Sample, Sampling
from orscale_jax import _checks
from orscale_jax.diagnostics.step_gain import Estimate, LossFn, micro_batches
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree


class Statistics(NamedTuple):
    """The result of :func:`estimate`.

    Each field has ``value`` and ``stderr``: trees like the parameters (without boxes),
    with one entry for each matrix, of the shape of its batch axes, and
    :class:`optax.MaskedNode` where a leaf is no matrix.
    """

    #: a = ‖∇f‖_*, the nuclear norm of the true gradient.
    signal: Estimate
    #: σ of one micro-batch, with σ² = E‖G − ∇f‖² (Frobenius); k of them have σ/√k.
    noise: Estimate
    #: L along the direction, ⟨Δ, HΔ⟩ / ‖Δ‖² with the matrix's part of both.
    smoothness: Estimate


def estimate(
    loss_fn: LossFn,
    params: PyTree,
    batches: Any,
    *,
    directions: PyTree | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    exact: bool = True,
    cross_terms: bool = True,
) -> Statistics:
    r"""Estimate the signal, noise and smoothness of every matrix, with standard errors.

    The quantities of the paper's assumptions (A1) and (A2):

    ``signal``
      :math:`a_\ell = \|\nabla_\ell f\|_*`. The nuclear norm of a mean of noisy gradients
      is too large, often several times; see *Bias* below. With ``exact=False`` it is
      :math:`\langle \nabla_\ell f, Q_\ell \rangle`, measured with the gradient of one
      micro-batch and the polar factor of the mean gradient of all others. Its mean is at
      most :math:`a_\ell`, and near it where the noise is small.
    ``noise``
      :math:`\sigma_\ell`, where one micro-batch is the paper's :math:`b = 1`:
      :math:`\sigma_\ell^2 = \mathbb E \|G_\ell - \nabla_\ell f\|_F^2`. A batch of k
      micro-batches has :math:`\sigma_\ell / \sqrt k`; with n examples in each, the σ of
      one example is :math:`\sqrt n \, \sigma_\ell`.
    ``smoothness``
      :math:`L_\ell = \langle \Delta_\ell, (H \Delta)_\ell \rangle / \|\Delta_\ell\|_F^2`
      along ``directions``, H the Hessian over all matrices. The descent inequality uses
      :math:`\sum_\ell L_\ell \|\Delta_\ell\|_F^2` for a step of all matrices, and these
      sum up to its second-order term, :math:`\langle \Delta, H \Delta \rangle`, exactly.
      The derivative of the sum with respect to the multiplier of each matrix is right as
      well. L holds for steps near the one measured. ``cross_terms=False`` gives
      :math:`\langle \Delta_\ell, H_{\ell\ell} \Delta_\ell \rangle` instead, the
      smoothness of the matrix while the others do not move, at the same cost: each
      micro-batch flips the signs of the :math:`\Delta_\ell` at random, which moves the
      cross terms into the standard error. Smoothness is negative along directions of
      negative curvature, and NaN where a direction is zero.

    *Bias.* For each singular direction, the signal is the geometric mean of two numbers:
    the singular value, which noise raises, and the projection of left-out gradients,
    which noise lowers. The bias that remains depends on the spectrum. It is almost zero
    for low rank and for pure noise. For a power law the estimate is too low by a fifth of
    the distance between the sums of the two, and by a quarter where all singular values
    are equal and near the noise. A tenth of that distance is part of the standard error.
    If noise drowns the signal, its standard error is larger than its value, which may be
    negative: take more micro-batches.

    *Cost.* Each of N micro-batches takes one gradient, and one Hessian-vector product
    with the gradient that comes with it: about 4N gradients in all. With ``exact=True``
    there are also N singular value decompositions of each matrix, with singular vectors;
    for large matrices they cost more than the gradients, particularly on accelerators.
    With ``exact=False`` there are N Newton–Schulz iterations. Memory holds three
    gradients and what the Hessian-vector product needs. Programs are compiled once for
    each ``loss_fn`` (the same function object) and shapes. Pass eight micro-batches or
    more: standard errors themselves have errors, of a quarter with eight.

    Args:
      loss_fn: ``loss_fn(params, batch)`` returns the mean loss of the batch, a scalar. It
        must be hashable, as functions are, and have no dropout, or the same each time.
      params: The parameters at which to estimate.
      batches: At least two micro-batches of the same shapes: a list or an iterator of
        them, or one array, tuple, dict or other tree, whose leaves count micro-batches
        along their first axis.
      directions: The :math:`\Delta`: a tree like the parameters, such as the update, with
        any scale and sign; only its matrices count. None: the polar factor of the mean
        gradient, Muon's own direction.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      exact: Whether ``signal`` is the nuclear norm.
      cross_terms: Whether ``smoothness`` is that of the joint step.

    Returns:
      :class:`Statistics`, float32 (float64 for float64 parameters). Standard errors are
      those of the mean over micro-batches, by the jackknife for ``signal`` and ``noise``;
      that of the noise needs three micro-batches, and is NaN with two.

    Raises:
      ValueError: If ``batches`` or ``directions`` do not fit, or the loss is no scalar.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from examples.study.theory import estimate
      >>> def loss_fn(params, batch):  # L = 3, and noise in the gradient.
      ...     w = params["kernel"]
      ...     return 1.5 * jnp.sum(w**2) + jnp.sum(batch * w)
      >>> params = {"kernel": 2.0 * jnp.eye(4)}  # The gradient 6I: nuclear norm 24.
      >>> batches = 0.1 * jax.random.normal(jax.random.key(0), (16, 4, 4))
      >>> found = estimate(loss_fn, params, batches)
      >>> print(found.smoothness.value["kernel"].round(2))
      3.0
      >>> error = found.signal.value["kernel"] - 24
      >>> bool(jnp.abs(error) < 2 * found.signal.stderr["kernel"])
      True

    References:
      Lou & You, *OrScale*, section 4, (A1) to (A3), and appendix A, proof of Theorem 1.
    """
    _checks.flag("exact", exact)
    _checks.flag("cross_terms", cross_terms)
    found = micro_batches(loss_fn, params, batches, at_least=2)
    matrices = Matrices.of(weight_dimension_numbers, params)
    work = Sampling(loss_fn, matrices, exact, cross_terms)
    total = work.total_gradient(params, found)
    steps = (
        work.polar_factors(total)
        if directions is None
        else matrices_like("directions", directions, matrices, params)
    )
    count = len(found)
    samples = [
        work.measure(params, batch, (total, steps), jax.device_put((index, count)))
        for index, batch in enumerate(found)
    ]
    parts = _statistics(exact, jax.tree.map(lambda *xs: jnp.stack(xs), *samples))

    def tree(*of_parts: jax.Array) -> PyTree:
        return matrices.entries_of_parts(of_parts)

    if not parts:  # No parameter is a matrix.
        return Statistics(*(Estimate(tree(), tree()) for _ in Statistics._fields))
    return jax.tree.map(tree, *parts)


@functools.partial(jax.jit, static_argnums=0)
def _statistics(exact: bool, samples: list[Sample]) -> list[Statistics]:
    """The statistics of each part, from samples stacked along the first axis."""
    return [
        Statistics(
            signal=jackknife.nuclear_norm(of_part.spectrum, of_part.projection)
            if exact
            else jackknife.mean(of_part.projection),
            noise=jackknife.noise(of_part.square),
            smoothness=jackknife.mean(of_part.smoothness),
        )
        for of_part in samples
    ]
