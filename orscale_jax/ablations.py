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
import warnings
from collections.abc import Callable

import optax

from orscale_jax._algorithm import ChainTail, Optimizer, Stages
from orscale_jax._arrangements import Parameters, with_arguments_of
from orscale_jax._optimizers import orscale
from orscale_jax.transforms.altered_ratio import (
    around,
    calibrated_in_bfloat16,
    over_root_of_size,
)

# The paper's designs use the paper's anchor.
_ablation = functools.partial(
    with_arguments_of, orscale, without=("anchor", "anchor_steps")
)


def _deprecated(
    instead: str, optimizer: Callable[Parameters, Optimizer]
) -> Callable[Parameters, Optimizer]:
    """Have an optimizer warn that there is another call for it."""

    @functools.wraps(optimizer)
    def warned(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Optimizer:
        message = f"{optimizer.__name__} is deprecated: call {instead} instead."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return optimizer(*args, **kwargs)

    return warned


@_ablation(consistent_rms=None, calibrate=False, r_min=0.5, r_max=1.5)
def polar_factor_denominator(stages: Stages) -> ChainTail:
    r"""Replaces the applied direction in the denominator by :math:`\|Q\|_F`.

    .. math::

      r = \|W\|_F / (\|Q\|_F + \varepsilon), \qquad
      W \leftarrow (1 - \eta\lambda) W - \eta \, \hat r \, Q.

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
    scaled = around(stages.direction, stages.ratio)
    return optax.chain(scaled, stages.decoupled_decay), stages.learning_rate


@_ablation(calibrate=False, r_min=0.5, r_max=1.5)
def momentum_rms_denominator(stages: Stages) -> ChainTail:
    r"""Replaces the applied direction in the denominator by RMS(M̃), with s.

    .. math::

      r = \mathrm{RMS}(W) / (\mathrm{RMS}(\tilde M) + \varepsilon), \qquad
      W \leftarrow (1 - \eta\lambda) W - \eta \, \hat r \, s Q.

    The ratio differs from that of :func:`momentum_denominator` only in
    :math:`\varepsilon`, which is a floor per entry here.

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
    rescaled = functools.partial(stages.matrices.map, over_root_of_size)
    scaled = around(stages.direction, stages.ratio, rescaled)
    return optax.chain(scaled, stages.decoupled_decay), stages.learning_rate


@_ablation()
def decoupled_weight_decay(stages: Stages) -> ChainTail:
    r"""Deletes the coupling of the decay: the ratio neither scales nor sees it.

    .. math::

      r = \|W\|_F / (c \|sQ\|_F + \varepsilon), \qquad
      W \leftarrow (1 - \eta\lambda) W - \eta \, \hat r \, s Q.

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
    away from 1, and stays off by this factor.

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
    ratio = calibrated_in_bfloat16(stages.ratio)
    return optax.chain(stages.coupled, ratio), stages.learning_rate


@functools.partial(_deprecated, "orscale(..., calibrate=False)")
@_ablation(calibrate=False)
def uncalibrated(stages: Stages) -> ChainTail:
    """Is deprecated: call ``orscale(..., calibrate=False)`` instead."""
    return optax.chain(stages.coupled, stages.ratio), stages.learning_rate


@functools.partial(_deprecated, "orscale(..., r_min=-jnp.inf, r_max=jnp.inf)")
@_ablation(r_min=-math.inf, r_max=math.inf)
def unclipped(stages: Stages) -> ChainTail:
    """Is deprecated: call ``orscale(..., r_min=-jnp.inf, r_max=jnp.inf)`` instead."""
    return optax.chain(stages.coupled, stages.ratio), stages.learning_rate
