"""The gain over Muon along the step itself, without a model of the curvature."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orscale_jax.diagnostics.reading import Reading, matrices_of
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.orthogonalize import orthogonalize
from orscale_jax.transforms.stages import SPECTRAL, Scale
from orscale_jax.trees.boxes import PyTree, rebox, unbox
from orscale_jax.trees.names import by_name, names_on

LossFn: TypeAlias = Callable[[PyTree, Any], jax.Array]

# Eight steps bring singular values down to 1e-3 of the norm to 1 within 1e-3.
NS_STEPS = 8
# Sums in the dtype of the gradients are exact to a few of its units, so a standard error
# is at least this, even where all samples are equal.
_ROUNDING_UNITS = 16


class Estimate(NamedTuple):
    """Values and their standard errors: trees, or arrays while they are computed."""

    #: The estimates.
    value: PyTree
    #: Their standard errors. NaN where there are too few micro-batches for one.
    stderr: PyTree


class StepGain(NamedTuple):
    """The result of :func:`step_gain`: scalars with standard errors."""

    #: The largest decrease of the loss along r̂sQ, over the largest along sQ.
    kappa: Estimate
    #: The learning rate of the largest decrease along r̂sQ.
    learning_rate: Estimate
    #: The learning rate of the largest decrease along sQ, Muon's step.
    muon_learning_rate: Estimate


@dataclasses.dataclass(frozen=True)
class Work:
    """The work on one micro-batch; static in compiled programs."""

    loss_fn: LossFn
    matrices: Matrices

    def weights(self, params: PyTree) -> PyTree:
        """The leaves of matrices, masked elsewhere."""
        leaves = self.matrices.leaves(unbox(params))
        return self.matrices.tree_of(list(map(jnp.asarray, leaves)))

    def gradient(self, params: PyTree, batch: Any) -> Callable[[PyTree], PyTree]:
        """The gradient as a function of the weights."""

        def loss(weights: PyTree) -> jax.Array:
            leaves = self.matrices.leaves(weights)
            whole = self.matrices.replace(unbox(params), leaves)
            return self.loss_fn(rebox(whole, params), batch)

        return jax.grad(loss)

    @functools.partial(jax.jit, static_argnums=0)
    def _gradients(self, params: PyTree, batch: Any) -> PyTree:
        """The gradients of the weights, in float32 or wider."""
        found = self.gradient(params, batch)(self.weights(params))
        return jax.tree.map(lambda g: g.astype(compute_dtype(g)), found)

    def total_gradient(self, params: PyTree, batches: Iterable[Any]) -> PyTree:
        """The sum of the gradients of all micro-batches."""
        gradients = (self._gradients(params, batch) for batch in batches)
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), gradients)

    @functools.partial(jax.jit, static_argnums=0)
    def polar_factors(self, gradients: PyTree) -> PyTree:
        """The polar factors of all matrices."""
        stage = orthogonalize(
            ns_steps=NS_STEPS,
            ns_dtype=compute_dtype(gradients),
            weight_dimension_numbers=self.matrices.axes_tree,
        )
        factors, _ = stage.update(gradients, stage.init(gradients))
        return factors


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

    It is the paper's :math:`\kappa_{\mathrm{eff}}` with the whole Hessian instead of one
    number per matrix. The paper's model leaves out the terms between matrices; in deep
    networks, these are most of the curvature of a step. Where the two gains differ, a
    line search along the steps confirms this one (``docs/monitoring.md``).

    Q is the polar factor of the mean gradient of one half of the micro-batches (every
    second one), and slopes and curvatures are measured on the other half; then the halves
    change places. So no gradient is measured along its own polar factor.

    *Cost.* About seven gradients for each micro-batch, and two Newton–Schulz iterations.

    Args:
      loss_fn: ``loss_fn(params, batch)``, the mean loss of a micro-batch, a scalar. It is
        differentiated twice.
      params: The parameters.
      batches: At least four micro-batches of the same shapes: a list, an iterator, or a
        tree whose leaves count them along their first axis.
      trust_ratio: The :class:`Reading` of the last step; or :math:`\hat r` alone, a tree
        like its ``trust_ratio``. Parameters of which it has nothing, such as those of
        another optimizer, stay where they are in both steps.
      weight_dimension_numbers: The dimension numbers of the optimizer.
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
    found = micro_batches(loss_fn, params, batches, at_least=4)
    if isinstance(trust_ratio, Reading):
        if trust_ratio.trust_ratio is None:
            raise ValueError("the reading has no trust ratios: it is one of muon.")
        norms, known = map(by_name, (trust_ratio.weight_norm, trust_ratio.trust_ratio))
        # 1 where the optimizer of a leaf has no ratios.
        ratios = {p: known[p] if p in known else jnp.ones_like(norms[p]) for p in norms}
    else:
        ratios = by_name(unbox(trust_ratio))
    bare = unbox(params)
    matrices = matrices_of(bare, weight_dimension_numbers, ratios, "trust_ratio")
    rows = matrices.rows(bare)
    values = [np.float32(axes.by_shape(scale.value, leaf)) for axes, leaf in rows]
    s = matrices.tree_of(jax.device_put(values))
    own = [jnp.asarray(ratios[names_on(path)]) for path in matrices.paths]
    of_leaves = matrices.tree_of(own)
    scaled = matrices.map(lambda axes, r, s: axes.per_matrix(r) * s, of_leaves, s)
    work = Work(loss_fn, matrices)
    halves = (work.total_gradient(params, found[i::2]) for i in (0, 1))
    factors = [work.polar_factors(total) for total in halves]
    slopes = [
        _slopes(work, params, batch, factors[1 - index % 2], (s, scaled))
        for index, batch in enumerate(found)
    ]
    return _gain(jnp.stack(slopes))


def micro_batches(
    loss_fn: LossFn, params: PyTree, batches: Any, at_least: int
) -> list[Any]:
    """A list of micro-batches, also of those in a tree; refuses what does not fit."""
    found = batches
    if not isinstance(batches, list | Iterator):
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batches)}
        if len(lengths) != 1 or () in lengths:
            raise ValueError(
                "batches must be a list of micro-batches, or a tree whose leaves count "
                f"them along their first axis: found leaves of shapes {_shapes(batches)}."
            )
        [(length,)] = lengths
        found = [jax.tree.map(lambda leaf, i=i: leaf[i], batches) for i in range(length)]
    found = list(found)
    if len(found) < at_least:
        raise ValueError(
            f"batches has {len(found)} micro-batches: pass at least {at_least}, better 8 "
            "or more."
        )
    shapes = [_shapes(batch) for batch in found]
    for index, of_batch in enumerate(shapes):
        if of_batch != shapes[0]:
            raise ValueError(
                "batches must have the same shapes, or their mean would weight them "
                f"wrongly: batch 0 has {shapes[0]} and batch {index} has {of_batch}."
            )
    loss = jax.eval_shape(loss_fn, params, found[0])
    if not jax.tree_util.all_leaves([loss]) or loss.shape:
        raise ValueError(
            f"loss_fn must return one scalar, the mean loss of the batch; it returns "
            f"{loss}."
        )
    return found


def spread(replicates: jax.Array) -> jax.Array:
    """The jackknife's standard error, of estimates without one sample each."""
    return jnp.sqrt(len(replicates) - 1.0) * jnp.std(replicates, axis=0)


def estimate_of(value: jax.Array, stderr: jax.Array) -> Estimate:
    """An estimate whose standard error is at least the error of rounding."""
    rounding = _ROUNDING_UNITS * jnp.finfo(value.dtype).eps * jnp.abs(value)
    return Estimate(value, jnp.maximum(stderr, rounding))


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(batch)]


@functools.partial(jax.jit, static_argnums=0)
def _slopes(
    work: Work,
    params: PyTree,
    batch: Any,
    factors: PyTree,
    multipliers: tuple[PyTree, PyTree],
) -> jax.Array:
    """⟨G, Δ⟩ and ⟨Δ, HΔ⟩ of one micro-batch, along both steps: shape (2, 2)."""
    weights = work.weights(params)
    gradient, hessian = jax.linearize(work.gradient(params, batch), weights)

    def inner(a: PyTree, b: PyTree) -> jax.Array:
        pairs, dtype = zip(*map(jax.tree.leaves, (a, b)), strict=True), compute_dtype(a)
        return sum((jnp.sum(x * y, dtype=dtype) for x, y in pairs), jnp.zeros((), dtype))

    found = []
    for of_step in multipliers:
        step = jax.tree.map(
            lambda q, by, w: (q * by).astype(w.dtype), factors, of_step, weights
        )
        found.append([inner(gradient, step), inner(step, hessian(step))])
    return jnp.array(found)


@jax.jit
def _gain(slopes: jax.Array) -> StepGain:
    """The estimates, of the slopes of all micro-batches."""
    count, mean = len(slopes), jnp.mean(slopes, axis=0, keepdims=True)
    others = (count * mean - slopes) / (count - 1)

    def of_means(means: jax.Array) -> tuple[jax.Array, ...]:
        """κ and the two learning rates, of slopes of shape (..., 2, 2)."""
        descent, curvature = means[..., 0], means[..., 1]
        rates = descent / jnp.where(curvature > 0, curvature, jnp.nan)
        decreases = descent * rates
        return decreases[:, 1] / decreases[:, 0], rates[:, 1], rates[:, 0]

    pairs = zip(of_means(mean), of_means(others), strict=True)
    return StepGain(*(estimate_of(value[0], spread(reps)) for value, reps in pairs))
