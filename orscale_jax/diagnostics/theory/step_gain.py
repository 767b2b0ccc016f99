"""The gain over Muon along the step itself, without a model of the curvature."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orscale_jax.diagnostics.readouts.reading import Reading, known_leaves, numbers_of
from orscale_jax.diagnostics.theory import jackknife
from orscale_jax.diagnostics.theory.jackknife import Estimate
from orscale_jax.diagnostics.theory.samples import (
    LossFn,
    Work,
    micro_batches,
    require_scalar,
)
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.stages import SPECTRAL, Scale
from orscale_jax.trees.boxes import PyTree, unbox


class StepGain(NamedTuple):
    """The result of :func:`step_gain`: scalars with standard errors."""

    #: The largest decrease of the loss along r̂sQ, over the largest along sQ.
    kappa: Estimate
    #: The learning rate of the largest decrease along r̂sQ.
    learning_rate: Estimate
    #: The learning rate of the largest decrease along sQ, Muon's step.
    muon_learning_rate: Estimate


class _Slopes(NamedTuple):
    """Slopes of one micro-batch along sQ and along r̂sQ, each of shape (2,)."""

    descent: jax.Array  # ⟨G, Δ⟩
    curvature: jax.Array  # ⟨Δ, HΔ⟩


def step_gain(
    loss_fn: LossFn,
    params: PyTree,
    batches: Any,
    trust_ratio: PyTree | Reading,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    consistent_rms: ArrayLike | None = 0.2,
    scale_mode: str = SPECTRAL,
) -> StepGain:
    r"""Measure the gain of one step over Muon's, each at its own best learning rate.

    To second order, a step :math:`-\eta \Delta` decreases the loss by at most
    :math:`\langle \nabla f, \Delta \rangle^2 / 2 \langle \Delta, H \Delta \rangle`, at
    :math:`\eta = \langle \nabla f, \Delta \rangle / \langle \Delta, H \Delta \rangle`.
    With :math:`\Delta_\ell(\hat r) = \hat r_\ell s_\ell Q_\ell`,

    .. math::

      \kappa = \frac{\langle \nabla f, \Delta(\hat r) \rangle^2}
        {\langle \Delta(\hat r), H \Delta(\hat r) \rangle} \Big/
        \frac{\langle \nabla f, \Delta(\mathbf 1) \rangle^2}
        {\langle \Delta(\mathbf 1), H \Delta(\mathbf 1) \rangle} .

    It is the :math:`\kappa_{\mathrm{eff}}` of :func:`gain` with the whole Hessian instead
    of one number per matrix. The paper's model leaves out the terms between matrices; in
    deep networks, these are most of the curvature of a step. Where the two gains differ,
    a line search along the steps confirms this one (``docs/reading_your_run.md``).

    Q is the polar factor of the mean gradient of one half of the micro-batches (every
    second one), and slopes and curvatures are measured on the other half; then the halves
    change places. So no gradient is measured along its own polar factor.

    *Cost.* About seven gradients for each micro-batch, and two Newton–Schulz iterations.

    Args:
      loss_fn: See :func:`estimate`.
      params: The parameters.
      batches: At least four micro-batches, as in :func:`estimate`.
      trust_ratio: The :class:`Reading` of the last step, whose matrices and
        :math:`\hat r` are taken; or :math:`\hat r` alone, a tree like its
        ``trust_ratio``.
      weight_dimension_numbers: The dimension numbers of the optimizer, if
        ``trust_ratio`` is not a reading. (A reading has them, and others are refused.)
      consistent_rms: The value that the optimizer has; None: :math:`s = 1`.
      scale_mode: The mode that the optimizer has; see
        :func:`orscale_jax.scale_by_shape`.

    Returns:
      :class:`StepGain`, with standard errors by the jackknife over micro-batches. Values
      are NaN along a step of negative curvature, which has no best learning rate.

    Raises:
      ValueError: If ``batches`` or ``trust_ratio`` do not fit, the loss is no scalar, or
        the reading is one of an optimizer without ratios.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from orscale_jax import diagnostics
      >>> def loss_fn(params, batch):  # The curvature of b is four times that of a.
      ...     a, b = params["a"], params["b"]
      ...     return jnp.sum(a**2) / 2 + 2 * jnp.sum(b**2) + jnp.sum(batch * a)
      >>> params = {"a": jnp.eye(4), "b": jnp.eye(4)}
      >>> batches = 0.01 * jax.random.normal(jax.random.key(0), (8, 4, 4))
      >>> ratios = {"a": jnp.array(2.0), "b": jnp.array(1.0)}
      >>> found = diagnostics.step_gain(loss_fn, params, batches, ratios)
      >>> print(found.kappa.value.round(2))  # (2 + 4)²/(4 + 4) over (1 + 4)²/(1 + 4)
      0.9

    References:
      Lou & You, *OrScale*, section 4 (the definition of κ_eff), with another curvature.
    """
    scale = Scale.of(consistent_rms, scale_mode)
    found = micro_batches(batches, at_least=4)
    if isinstance(trust_ratio, Reading):
        weight_dimension_numbers = numbers_of(
            trust_ratio, params, weight_dimension_numbers
        )
        trust_ratio = _ratios_or_one(trust_ratio)
    matrices = Matrices.of(weight_dimension_numbers, params)
    require_scalar(loss_fn, params, found[0])
    work = Work(loss_fn, matrices)
    multipliers = _multipliers(matrices, params, trust_ratio, scale)
    halves = (work.total_gradient(params, found[i::2]) for i in (0, 1))
    factors = [work.polar_factors(total) for total in halves]
    slopes = [
        _slopes(work, params, batch, factors[1 - index % 2], multipliers)
        for index, batch in enumerate(found)
    ]
    return _gain(jax.tree.map(lambda *xs: jnp.stack(xs), *slopes))


def _ratios_or_one(reading: Reading) -> list[jax.Array]:
    """r̂ at each leaf of matrices; 1 where its optimizer has no ratios."""
    if reading.trust_ratio is None:
        raise ValueError("the reading has no trust ratios: it is one of muon.")
    norms = jax.tree.leaves(reading.weight_norm)
    found = known_leaves(reading.trust_ratio, reading)
    return [
        jnp.ones_like(norm) if ratio is None else ratio
        for ratio, norm in zip(found, norms, strict=True)
    ]


def _multipliers(
    matrices: Matrices,
    params: PyTree,
    trust_ratio: PyTree,
    scale: Scale,
) -> tuple[PyTree, PyTree]:
    """The factors of Q in both steps, for each leaf: s, and r̂s."""
    picked, ratios = matrices.leaves(unbox(params)), jax.tree.leaves(trust_ratio)
    pairs = list(zip(matrices.of_leaves, picked, strict=True))
    shapes = [axes.batch_shape(leaf) for axes, leaf in pairs]
    if [np.shape(ratio) for ratio in ratios] != shapes:
        raise ValueError(
            f"trust_ratio has arrays of shapes {[np.shape(r) for r in ratios]}, but the "
            f"matrices have batch shapes {shapes}: pass that of read(), with the same "
            "weight_dimension_numbers."
        )
    values = [axes.by_shape(scale.value, leaf) for axes, leaf in pairs]
    of_leaves = [np.asarray(value, np.float32) for value in values]
    scales = matrices.tree_of(jax.device_put(of_leaves))

    def scaled(axes: MatrixAxes, s: jax.Array, ratio: jax.Array) -> jax.Array:
        return axes.per_matrix(jnp.asarray(ratio)) * s

    return scales, matrices.map(scaled, scales, matrices.tree_of(ratios))


@functools.partial(jax.jit, static_argnums=0)
def _slopes(
    work: Work,
    params: PyTree,
    batch: Any,
    factors: PyTree,
    multipliers: tuple[PyTree, PyTree],
) -> _Slopes:
    """Slope and curvature of the loss along both steps."""
    weights = work.weights(params)
    gradient, hessian = jax.linearize(work.gradient(params, batch), weights)
    found = []
    for of_step in multipliers:
        step = jax.tree.map(
            lambda q, by, w: (q * by).astype(w.dtype), factors, of_step, weights
        )
        found.append(_Slopes(_inner(gradient, step), _inner(step, hessian(step))))
    return jax.tree.map(lambda *xs: jnp.stack(xs), *found)


def _inner(a: PyTree, b: PyTree) -> jax.Array:
    pairs, dtype = zip(*map(jax.tree.leaves, (a, b)), strict=True), compute_dtype(a)
    return sum((jnp.sum(x * y, dtype=dtype) for x, y in pairs), jnp.zeros((), dtype))


@jax.jit
def _gain(slopes: _Slopes) -> StepGain:
    """The estimates, of slopes stacked along the first axis."""
    count = len(slopes.descent)
    mean = jax.tree.map(lambda x: jnp.mean(x, axis=0, keepdims=True), slopes)
    others = jax.tree.map(lambda m, x: (count * m - x) / (count - 1), mean, slopes)
    pairs = zip(_of_means(mean), _of_means(others), strict=True)
    return StepGain(*(jackknife.estimate_of(value[0], reps) for value, reps in pairs))


def _of_means(means: _Slopes) -> tuple[jax.Array, ...]:
    """κ and the two learning rates, of slopes of shape (..., 2)."""
    descent, curvature = means
    curvature = jnp.where(curvature > 0, curvature, jnp.nan)
    rates = descent / curvature
    decreases = descent * rates
    return decreases[:, 1] / decreases[:, 0], rates[:, 1], rates[:, 0]
