"""Signal, noise and smoothness of every matrix, from gradients of micro-batches."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import _checks
from orscale_jax.diagnostics.measure import whole_parts
from orscale_jax.diagnostics.step_gain import (
    NS_STEPS,
    Estimate,
    LossFn,
    Work,
    estimate_of,
    micro_batches,
    spread,
)
from orscale_jax.newton_schulz.polar import polar_factor
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import name_and_shape

# The bias that may remain in a nuclear norm, as a part of the distance between the sums
# of raised and lowered singular values. Measured under noise of 0.1 to 3 per entry (8 and
# 16 samples; 8 × 6 and 48 × 32): 0.00 to 0.07 of it for low rank and for pure noise, 0.02
# to 0.2 for a power law, 0.06 to 0.27 for equal singular values, most at the noise's
# level; that of the plain nuclear norm is 0.4 to 0.97. Two standard errors then hold the
# truth in 72 % of the draws at worst, and in 85 to 100 % of most.
REMAINING_BIAS = 0.1


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
    work = _Sampling(loss_fn, matrices, exact, cross_terms)
    total = work.total_gradient(params, found)
    steps = (
        work.polar_factors(total)
        if directions is None
        else _like("directions", directions, matrices, params)
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


class _Sample(NamedTuple):
    """The sample of one micro-batch for the matrices in one part of a leaf."""

    spectrum: jax.Array  # Singular values of the mean of the other gradients.
    projection: jax.Array  # This gradient on their singular vectors.
    square: jax.Array  # ‖G − mean‖².
    smoothness: jax.Array


@dataclasses.dataclass(frozen=True)
class _Sampling(Work):
    """The work on one micro-batch, compiled once."""

    exact: bool = True
    cross_terms: bool = True

    @functools.partial(jax.jit, static_argnums=0)
    def measure(
        self,
        params: PyTree,
        batch: Any,
        shared: tuple[PyTree, PyTree],
        place: tuple[jax.Array, jax.Array],
    ) -> list[_Sample]:
        """The samples of a micro-batch for all parts.

        ``shared`` holds the sum of all gradients, and the directions; ``place`` holds the
        index of the micro-batch and the number of micro-batches.
        """
        (total, directions), (index, count) = shared, place

        def flipped(axes: MatrixAxes, direction: jax.Array, key: jax.Array) -> jax.Array:
            signs = jax.random.rademacher(key, axes.batch_shape(direction))
            return direction * axes.per_matrix(signs).astype(direction.dtype)

        if not self.cross_terms:  # A random sign for each matrix.
            keys = jax.random.split(jax.random.key(index), len(self.matrices.of_leaves))
            of_leaves = self.matrices.tree_of([*keys])
            directions = self.matrices.map(flipped, directions, of_leaves)
        weights = self.weights(params)
        tangents = jax.tree.map(lambda d, w: d.astype(w.dtype), directions, weights)
        gradient, curved = jax.jvp(self.gradient(params, batch), (weights,), (tangents,))
        trees = gradient, total, tangents, curved
        parts = [whole_parts(self.matrices, tree) for tree in trees]
        return [self.sample(count, *of_part) for of_part in zip(*parts, strict=True)]

    def sample(
        self,
        count: Any,
        g: jax.Array,
        total: jax.Array,
        step: jax.Array,
        curved: jax.Array,
    ) -> _Sample:
        """Of matrices (..., m, n): this gradient, the sum of all ``count``, Δ and HΔ."""

        def inner(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.sum(x * y, axis=(-2, -1))

        others, error = (total - g) / (count - 1), g - total / count
        if self.exact:
            u, spectrum, vt = jnp.linalg.svd(others, full_matrices=False)
            projection = jnp.einsum(
                "...mk,...mn,...kn->...k", u, g, vt, precision=jax.lax.Precision.HIGHEST
            )
        else:
            q = polar_factor(others, steps=NS_STEPS, dtype=others.dtype)
            spectrum, projection = jnp.zeros((), g.dtype), inner(g, q)
        smoothness = inner(step, curved) / inner(step, step)
        return _Sample(spectrum, projection, inner(error, error), smoothness)


@functools.partial(jax.jit, static_argnums=0)
def _statistics(exact: bool, samples: list[_Sample]) -> list[Statistics]:
    """The statistics of each part, from samples stacked along the first axis."""

    def mean(x: jax.Array) -> Estimate:
        error = jnp.std(x, axis=0, ddof=1) / jnp.sqrt(len(x))
        return estimate_of(jnp.mean(x, axis=0), error)

    def signal(of_part: _Sample) -> Estimate:
        if exact:
            return nuclear_norm(of_part.spectrum, of_part.projection)
        return mean(of_part.projection)

    return [Statistics(signal(x), noise(x.square), mean(x.smoothness)) for x in samples]


def noise(squares: jax.Array) -> Estimate:
    """Standard deviation from squared distances of samples to their mean.

    Args:
      squares: Shape (samples, ...).
    """
    count = len(squares)
    total = jnp.sum(squares, axis=0, keepdims=True)
    value = jnp.sqrt(total[0] / (count - 1))
    if count < 3:
        return Estimate(value, jnp.full_like(value, jnp.nan))
    # A sample that is left out moves the mean of the others, too.
    others = (total - squares * (count / (count - 1))) / (count - 2)
    return estimate_of(value, spread(jnp.sqrt(jnp.maximum(others, 0))))


def nuclear_norm(spectra: jax.Array, projections: jax.Array) -> Estimate:
    r"""Nuclear norm of the mean of noisy matrices, without most of the noise's bias.

    Noise raises the singular values :math:`\sigma_k` of a mean. It also rotates the
    singular vectors: the projections :math:`\pi_k = u_k^\top G v_k` of a matrix that is
    not part of the mean are smaller than the true singular values. To second order in the
    noise, both errors have the same size. The estimate is
    :math:`\sum_k \mathrm{sign}(\pi_k) \sqrt{\sigma_k |\pi_k|}` of their means; a
    direction that is noise alone has :math:`\pi_k = 0` in the mean.

    Args:
      spectra: Singular values of the means of all samples but one, of shape
        (samples, ..., k).
      projections: The left-out sample on the singular vectors, of the same shape.
    """

    def geometric(raised: jax.Array, lowered: jax.Array) -> jax.Array:
        roots = jnp.sign(lowered) * jnp.sqrt(raised * jnp.abs(lowered))
        return jnp.sum(roots, axis=-1)

    count = len(spectra)
    raised, lowered = (jnp.mean(x, axis=0, keepdims=True) for x in (spectra, projections))
    others = (count * lowered - projections) / (count - 1)
    remaining = REMAINING_BIAS * jnp.sum(raised - lowered, axis=-1)[0]
    stderr = jnp.hypot(spread(geometric(spectra, others)), remaining)
    return estimate_of(geometric(raised, lowered)[0], stderr)


def _like(argument: str, tree: PyTree, matrices: Matrices, params: PyTree) -> PyTree:
    """The leaves of a tree where the parameters are matrices, masked elsewhere."""
    try:
        arrays = matrices.leaves(unbox(tree))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{argument} must be a tree of the parameters' structure: {error}"
        ) from error
    pairs = zip(matrices.paths, matrices.leaves(unbox(params)), strict=True)
    for array, (path, param) in zip(arrays, pairs, strict=True):
        known = isinstance(array, jax.Array | np.ndarray | np.generic | float | int)
        if not known or np.shape(array) != np.shape(param):
            found = f"shape {np.shape(array)}" if known else repr(array)
            raise ValueError(
                f"{argument} has {found} for parameter {name_and_shape(path, param)}: "
                "pass a tree of arrays like the parameters."
            )
    return matrices.tree_of(list(map(jnp.asarray, arrays)))
