r"""The paper's deleted design choices: OrScale without one of them at a time.

Each function below is one arrangement of the stages that :func:`orscale_jax.orscale`
chains before the learning rate: :math:`\tilde M \mapsto sQ` (direction),
:math:`u \mapsto \lambda W + u` (decay) and :math:`u \mapsto \hat r u` (ratio, measured
on its input u). The place of the ratio decides what it is measured on:

- after the direction and the decay, on :math:`\lambda W + sQ`, as in OrScale;
- between the two, on sQ alone: the decay is then decoupled;
- around the direction, on the raw momentum.

All are optimizers with the arguments of :func:`orscale_jax.orscale` except ``anchor`` and
``anchor_steps``, and with the defaults under which the paper reports them. The paper's
other baselines, LAMB and LARS, are :func:`optax.lamb` and :func:`optax.lars`.

References:
  Lou & You, *OrScale*, section 5.5, Table 4 (``tab:req-ablation``) and appendix C.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax._algorithm import ChainTail, Stages, with_arguments_of
from orscale_jax._optimizers import orscale
from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.anchors import not_one
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices, broadcast
from orscale_jax.trees.boxes import PyTree

# The paper's designs use the paper's anchor.
_ablation = functools.partial(
    with_arguments_of, orscale, without=("anchor", "anchor_steps")
)


class _AroundState(NamedTuple):
    """States of the ratio and of the transformation inside it."""

    ratio: optax.OptState
    inner: optax.OptState


def _around(
    inner: optax.GradientTransformation,
    ratio: optax.GradientTransformation,
    matrices: Matrices,
) -> optax.GradientTransformation:
    """Scale the output of ``inner`` by the ratio measured on its input."""

    def init(params: PyTree) -> _AroundState:
        return _AroundState(ratio.init(params), inner.init(params))

    def update(
        updates: PyTree, state: _AroundState, params: PyTree | None = None
    ) -> tuple[PyTree, _AroundState]:
        _, ratio_state = ratio.update(updates, state.ratio, params)
        directions, inner_state = inner.update(updates, state.inner, params)
        scaled = matrices.map(
            lambda at, direction, r: broadcast(at, r, direction) * direction,
            directions,
            ratio_state.trust_ratio,
        )
        norms = functools.partial(matrices.map, _norms)
        like = ratio_state.weight_norm
        weight_norm, direction_norm = norms(params, like), norms(directions, like)
        ratio_state = ratio_state._replace(
            weight_norm=weight_norm, direction_norm=direction_norm
        )
        return scaled, _AroundState(_anchored(ratio_state, state.ratio), inner_state)

    return optax.GradientTransformation(init, update)


def _norms(at: LeafAxes, leaf: jax.Array, like: jax.Array) -> jax.Array:
    """The norms of the matrices in a leaf, with sharding and dtype of ``like``."""
    norms = at.norms(leaf.astype(compute_dtype(leaf)))
    return typed_sharding.shard_like(norms, like).astype(like.dtype)


def _anchored(state: Any, before: Any) -> Any:
    """A state of the ratio that holds the norm of W itself where c was anchored."""

    def norm(old: jax.Array, new: jax.Array, weight_norm: jax.Array) -> jax.Array:
        return jnp.where(new == old, old, weight_norm)

    norms = before.anchor_weight_norm, state.anchor_weight_norm, state.weight_norm
    return state._replace(anchor_weight_norm=jax.tree.map(norm, *norms))


def _of_root_mean_squares(
    ratio: optax.GradientTransformation, matrices: Matrices
) -> optax.GradientTransformation:
    """The ratio with RMS instead of Frobenius norms; its state holds the result."""

    def root_of_size(m: int, n: int) -> float:
        return math.sqrt(m * n)

    def over_root_of_size(at: LeafAxes, leaf: jax.Array) -> jax.Array:
        return leaf / jnp.asarray(at.by_shape(root_of_size, leaf), leaf.dtype)

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        rescaled = (matrices.map(over_root_of_size, tree) for tree in (updates, params))
        rescaled_updates, rescaled_params = rescaled
        return ratio.update(rescaled_updates, state, rescaled_params)

    return optax.GradientTransformation(ratio.init, update)


def _calibrated_in_bfloat16(
    ratio: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """The ratio with a c that is anchored on rounded matrices, and rounded itself."""
    ratio = optax.with_extra_args_support(ratio)
    # Unlike a pair of casts, which XLA may remove, reduce_precision always rounds.
    rounded = functools.partial(
        jax.tree.map,
        functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7),
    )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        _, anchored = ratio.update(rounded(updates), state, rounded(params), **extra_args)
        calibration = jax.tree.map(not_one, rounded(anchored.calibration))
        given = state._replace(
            calibration=calibration, anchor_weight_norm=anchored.anchor_weight_norm
        )
        scaled, new = ratio.update(updates, given, params, **extra_args)
        return scaled, _anchored(new, state)

    return optax.GradientTransformationExtraArgs(ratio.init, update)


@_ablation(consistent_rms=None, calibrate=False, r_min=0.5, r_max=1.5)
def polar_factor_denominator(stages: Stages) -> ChainTail:
    r"""Replaces the applied direction in the denominator by :math:`\|Q\|_F`.

    .. math::

      r = \|W\|_F / (\|Q\|_F + \varepsilon), \qquad
      W \leftarrow (1 - \eta\lambda) W - \eta \, \hat r \, Q.

    The symptom: :math:`\|Q\|_F = \sqrt{\operatorname{rank} Q}` is a constant of the
    shape, so that the ratio carries no information about the update. In the paper's
    table it ties with OrScale on CIFAR-10 (94.06) and trails on text (3.231).

    Returns:
      An optimizer with the arguments of :func:`orscale_jax.orscale`, whose defaults are
      s = 1, no calibration and bounds 0.5 and 1.5.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import ablations
      >>> optimizer = ablations.polar_factor_denominator(1e-2, ns_steps=8)
      >>> params = {"kernel": jnp.eye(9)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> print(optax.tree.get(state, "raw_trust_ratio")["kernel"])  # 3 / √9
      1.000

    References:
      Lou & You, *OrScale*, appendix C (the paper's code: ``orscale_muon``).
    """
    scaled = optax.chain(stages.direction, stages.ratio, stages.decoupled_decay)
    return scaled, stages.learning_rate


@_ablation(consistent_rms=None, calibrate=False, r_min=0.5, r_max=1.5)
def momentum_denominator(stages: Stages) -> ChainTail:
    r"""Replaces the applied direction in the denominator by :math:`\|\tilde M\|_F`.

    .. math::

      r = \|W\|_F / (\|\tilde M\|_F + \varepsilon), \qquad
      W \leftarrow (1 - \eta\lambda) W - \eta \, \hat r \, Q.

    The symptom: the momentum's norm has the units of the gradient, and r sits orders of
    magnitude from 1; the paper logs :math:`\hat r = r_{\max}` on 99.75 to 100 % of the
    steps, which is Muon with another learning rate (its Theorem "collapse").

    Returns:
      An optimizer with the arguments of :func:`orscale_jax.orscale`, whose defaults are
      s = 1, no calibration and bounds 0.5 and 1.5. A momentum whose squares underflow
      float32 (norms below about 1e-19) counts as zero, with r = 1; one whose squares
      overflow it (norms above 1e19) gives NaN.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import ablations
      >>> optimizer = ablations.momentum_denominator(1e-2)
      >>> params = {"kernel": jnp.eye(9)}
      >>> grads = {"kernel": 1e-4 * jnp.eye(9)}
      >>> _, state = optimizer.update(grads, optimizer.init(params), params)
      >>> print(optax.tree.get(state, "trust_ratio")["kernel"])
      1.5

    References:
      Lou & You, *OrScale*, appendix C (the paper's code: ``mutrust``).
    """
    scaled = _around(stages.direction, stages.ratio, stages.matrices)
    return optax.chain(scaled, stages.decoupled_decay), stages.learning_rate


@_ablation(calibrate=False, r_min=0.5, r_max=1.5)
def momentum_rms_denominator(stages: Stages) -> ChainTail:
    r"""Replaces the applied direction in the denominator by RMS(M̃), with s.

    .. math::

      r = \mathrm{RMS}(W) / (\mathrm{RMS}(\tilde M) + \varepsilon), \qquad
      W \leftarrow (1 - \eta\lambda) W - \eta \, \hat r \, s Q.

    The symptom is that of :func:`momentum_denominator`: :math:`\hat r = r_{\max}` on 99.5
    to 100 % of the steps. The two ratios differ only in :math:`\varepsilon`, which is
    a floor per entry here.

    Returns:
      An optimizer with the arguments of :func:`orscale_jax.orscale`, whose defaults are
      no calibration and bounds 0.5 and 1.5.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import ablations
      >>> optimizer = ablations.momentum_rms_denominator(1e-2, momentum=0.0, eps=0.5)
      >>> params = {"kernel": jnp.ones((9, 4))}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> print(optax.tree.get(state, "raw_trust_ratio")["kernel"].round(4))  # 1 / 1.5
      0.6667

    References:
      Lou & You, *OrScale*, appendix C (the paper's code: ``muscale``).
    """
    ratio = _of_root_mean_squares(stages.ratio, stages.matrices)
    scaled = _around(stages.direction, ratio, stages.matrices)
    return optax.chain(scaled, stages.decoupled_decay), stages.learning_rate


@_ablation(calibrate=False)
def uncalibrated(stages: Stages) -> ChainTail:
    r"""Deletes the calibration: c = 1, with Moonlight's s.

    .. math::

      r = \|W\|_F / (\|\lambda W + sQ\|_F + \varepsilon), \qquad
      W \leftarrow W - \eta \, \hat r \, (\lambda W + sQ).

    The symptom: r starts at about RMS(W)/0.2, between 0.11 and 0.26 in the layers of the
    paper's 125M model, so that a tuned learning rate no longer transfers; it needs to be
    2.5 to 3 times as large, and the loss is still behind (3.2232 against 3.2120).

    Returns:
      ``orscale(..., calibrate=False)``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import ablations
      >>> optimizer = ablations.uncalibrated(1e-3, weight_decay=0.0, ns_steps=8)
      >>> params = {"kernel": 0.02 * jnp.eye(16)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> print(optax.tree.get(state, "raw_trust_ratio")["kernel"])  # 0.02 / (0.2 √16)
      0.025

    References:
      Lou & You, *OrScale*, sections 5.4 and 5.5, appendix C (the paper's code:
      ``orscale_muon_moonlight``).
    """
    return optax.chain(stages.coupled, stages.ratio), stages.learning_rate


@_ablation()
def decoupled_weight_decay(stages: Stages) -> ChainTail:
    r"""Deletes the coupling of the decay: the ratio neither scales nor sees it.

    .. math::

      r = \|W\|_F / (c \|sQ\|_F + \varepsilon), \qquad
      W \leftarrow (1 - \eta\lambda) W - \eta \, \hat r \, s Q.

    The symptom: growing weights raise r, which makes them grow faster, and a decay that
    does not scale with r cannot stop it. There is no ceiling :math:`1/(c\lambda)` before
    the clip; the paper logs 10 to 50 times larger weight norms on MLPs and output
    projections, and a loss of 3.305.

    Returns:
      An optimizer with the arguments and defaults of :func:`orscale_jax.orscale`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import ablations
      >>> optimizer = ablations.decoupled_weight_decay(1e-2)
      >>> params = {"kernel": jnp.eye(3)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> print(optax.tree.get(state, "raw_trust_ratio")["kernel"])
      1.000

    References:
      Lou & You, *OrScale*, section 3.1 and appendix C (the paper's code: ``FM3``).
    """
    scaled = optax.chain(stages.direction, stages.ratio, stages.decoupled_decay)
    return scaled, stages.learning_rate


@_ablation()
def bfloat16_calibration(stages: Stages) -> ChainTail:
    r"""Deletes the precision of the calibration: c in bfloat16.

    c is anchored on W and D rounded to bfloat16, and is itself rounded to 8 significant
    bits; everything else is as in :func:`orscale_jax.orscale`. r then starts up to 0.4 %
    away from 1, and stays off by this factor. The symptom: a loss of 3.2158 instead of
    3.2120.

    Returns:
      An optimizer with the arguments and defaults of :func:`orscale_jax.orscale`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import ablations
      >>> optimizer = ablations.bfloat16_calibration(1e-2)
      >>> params = {"kernel": jnp.eye(3)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> c = optax.tree.get(state, "calibration")["kernel"]
      >>> print(c == c.astype(jnp.bfloat16))
      True

    References:
      Lou & You, *OrScale*, Table 3 (``tab:calibration``).
    """
    ratio = _calibrated_in_bfloat16(stages.ratio)
    return optax.chain(stages.coupled, ratio), stages.learning_rate


@_ablation(r_min=-np.inf, r_max=np.inf)
def unclipped(stages: Stages) -> ChainTail:
    r"""Deletes the clip: :math:`\hat r = r`.

    The symptom is a transient: r reaches 9.6 in the first 5 % of the paper's steps before
    the ceiling :math:`1/(c\lambda)` of the coupled decay takes effect, and the loss is
    3.2187 instead of 3.2120.

    Returns:
      ``orscale(..., r_min=-inf, r_max=inf)``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import ablations
      >>> optimizer = ablations.unclipped(1e-2)
      >>> params, grown = {"kernel": 0.01 * jnp.eye(3)}, {"kernel": 0.09 * jnp.eye(3)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> _, state = optimizer.update(params, state, grown)
      >>> print(optax.tree.get(state, "trust_ratio")["kernel"] > 5)
      True

    References:
      Lou & You, *OrScale*, appendix C, "Clip removal".
    """
    return optax.chain(stages.coupled, stages.ratio), stages.learning_rate
