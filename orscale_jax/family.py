r"""Relatives of OrScale, which add a stage to OrScale or Muon, or replace one.

Each function below is one arrangement of the stages of :func:`orscale_jax.orscale`, with
the same Newton–Schulz, the same meshes and the same AdamW: a comparison with OrScale or
Muon differs in one stage and nothing else.

==================  ==================================================================
hyperball           Muon on the sphere of each matrix's initial norm (MuonH)
normuon             Muon that divides neurons by their running root mean square
orscale_on_normuon  OrScale with NorMuon's direction
muon_plus           Muon that divides the inputs of Q, then its neurons, by their norms
aurora              Muon with a Q whose vectors on the longer side have nearly one norm
cautious            OrScale that decays only the entries that the update shrinks
pooled              OrScale with one ratio for all matrices, or one for each class
replayed            Muon whose learning rate is multiplied by recorded ratios
==================  ==================================================================

All are optimizers with the arguments of :func:`orscale_jax.orscale`, without those of
stages that they do not have, and with a few more.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax._algorithm import ChainTail, Optimizer, Stages
from orscale_jax._arrangements import with_arguments_of
from orscale_jax._optimizers import RATIO, orscale
from orscale_jax.transforms import decay
from orscale_jax.transforms.balance import balanced_polar_stage
from orscale_jax.transforms.initial_norm import initial_norm_stage
from orscale_jax.transforms.neuron_rms import FULL_RANK, neuron_rms_stage
from orscale_jax.transforms.normalize import INPUTS, NEURONS, normalize_stage
from orscale_jax.transforms.pooled_ratio import (
    Classes,
    class_labels,
    pooled_ratio_stage,
)
from orscale_jax.transforms.recorded_ratio import scale_by_recorded_trust_ratio


def _optimizer(
    *without: str,
) -> Callable[[Callable[..., ChainTail]], Callable[..., Optimizer]]:
    """Make an optimizer with the arguments of orscale and of the arrangement."""
    return with_arguments_of(orscale, without)


@_optimizer(*RATIO, "consistent_rms", "scale_mode")
def hyperball(stages: Stages) -> ChainTail:
    r"""Muon on the sphere of each matrix's initial norm (MuonH).

    .. math::

      W \leftarrow R \, \mathrm{normalize}(W - \eta R \, \mathrm{normalize}(Q)), \qquad
      R = \|W_0\|_F, \qquad \mathrm{normalize}(X) = X / \|X\|_F.

    :math:`\eta` is the relative size of a step; public runs use 0.01 to 0.03, and set
    ``adam_learning_rate`` separately. Matrices do not decay: ``weight_decay`` applies to
    the parameters that take AdamW alone. A matrix of one entry cannot move: give it to
    AdamW, too.

    Returns:
      An optimizer with the arguments of :func:`orscale_jax.muon` except
      ``consistent_rms`` and ``scale_mode``, which would have no effect.

    Raises:
      ValueError: In the same cases as :func:`orscale_jax.orscale`, and from ``init`` if a
        matrix is zero: it could not both keep its norm and move. See
        :func:`orscale_jax.keep_initial_norm`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import family
      >>> optimizer = family.hyperball(0.02, adam_learning_rate=1e-3)
      >>> params, grads = {"kernel": jnp.eye(9)}, {"kernel": jnp.ones((9, 9))}
      >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(jnp.linalg.norm(params["kernel"]).round(5))  # As it was: √9
      3.0

    References:
      Wen et al. 2026, arXiv:2606.16899. The paper keeps R fixed, as here; Marin's code
      uses the norm of the current step instead.
    """
    step = initial_norm_stage(stages.learning_rate, stages.matrices)
    return optax.chain(stages.orthogonalize), step


@_optimizer(*RATIO)
def normuon(
    stages: Stages, *, b2: ArrayLike = 0.95, eps: ArrayLike = 1e-8, norm: str = FULL_RANK
) -> ChainTail:
    r"""NorMuon: Muon that divides output neurons by their running root mean square.

    .. math::

      v_j &\leftarrow \beta_2 v_j + (1 - \beta_2) \tfrac{1}{m} \|Q_{:,j}\|^2, \qquad
      \hat Q_{:,j} = Q_{:,j} / (\sqrt{v_j} + \varepsilon), \\
      W &\leftarrow W - \eta \Big(\lambda W + s \sqrt{\min(m, n)} \,
      \frac{\hat Q}{\|\hat Q\|_F}\Big).

    With ``consistent_rms=0.2`` the step without decay has norm
    :math:`0.2 \, \eta \sqrt{mn}`, as in the paper.

    Args:
      b2: The decay rate :math:`\beta_2`, in [0, 1). 0: all neurons get the same norm.
      eps: The floor :math:`\varepsilon`, at least 0.
      norm: ``"full_rank"``, as above, or ``"kept"``: :math:`\|Q\|_F` instead of
        :math:`\sqrt{\min(m, n)}`.

    Returns:
      An optimizer with these arguments and those of :func:`orscale_jax.muon`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import family
      >>> optimizer = family.normuon(1e-3)
      >>> state = optimizer.init({"kernel": jnp.ones((16, 4))})
      >>> print(optax.tree.get(state, "neuron_mean_square")["kernel"].shape)
      (4,)

    References:
      Li et al. 2025, arXiv:2510.05491. The paper has no Nesterov momentum
      (``nesterov=False``); the authors' code has it, and keeps the norm of Q
      (``norm="kept"``).
    """
    normalized = neuron_rms_stage(b2, eps, norm)
    return optax.chain(stages.after_q(normalized).coupled), stages.learning_rate


@_optimizer()
def orscale_on_normuon(
    stages: Stages,
    *,
    b2: ArrayLike = 0.95,
    neuron_eps: ArrayLike = 1e-8,
    norm: str = FULL_RANK,
) -> ChainTail:
    r"""OrScale with NorMuon's direction: NorMuon times a trust ratio for each matrix.

    .. math::

      D = \lambda W + s \sqrt{\min(m, n)} \, \frac{\hat Q}{\|\hat Q\|_F}, \qquad
      r = \frac{\|W\|_F}{c \|D\|_F + \varepsilon}, \qquad
      W \leftarrow W - \eta \, \hat r \, D,

    with :math:`\hat Q` as in :func:`normuon`, whose step the first one is.

    Args:
      b2: The decay rate :math:`\beta_2`, in [0, 1). 0: all neurons get the same norm.
      neuron_eps: The floor under the root mean square of a neuron, at least 0.
      norm: ``"full_rank"``, as above, or ``"kept"``; see :func:`normuon`.

    Returns:
      An optimizer with these arguments and those of :func:`orscale_jax.orscale`. With
      ``r_min=1, r_max=1`` it is :func:`normuon`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import family
      >>> optimizer = family.orscale_on_normuon(1e-3)
      >>> params, grads = {"kernel": jnp.eye(16, 4)}, {"kernel": jnp.ones((16, 4))}
      >>> _, state = optimizer.update(grads, optimizer.init(params), params)
      >>> print(optax.tree.get(state, "trust_ratio")["kernel"].round(3))
      1.0

    References:
      Li et al. 2025, arXiv:2510.05491, for :math:`\hat Q`; Lou & You, *OrScale*, for r.
      Their composition is this library's (``docs/better_rule_protocol.md``).
    """
    _checks.number("neuron_eps", neuron_eps, at_least=0)
    normalized = neuron_rms_stage(b2, neuron_eps, norm)
    direction = stages.after_q(normalized).coupled
    return optax.chain(direction, stages.ratio), stages.learning_rate


@_optimizer(*RATIO)
def muon_plus(
    stages: Stages, *, order: Sequence[str] = (INPUTS, NEURONS), eps: ArrayLike = 1e-8
) -> ChainTail:
    r"""Muon+: Muon that divides the inputs of Q, then its neurons, by their norms.

    Args:
      order: What is normalized, in this order: ``"neurons"`` or ``"inputs"`` or both,
        each any number of times.
      eps: The floor :math:`\varepsilon` under the root of each norm, at least 0.

    Returns:
      An optimizer with these arguments and those of :func:`orscale_jax.muon`.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import family
      >>> optimizer = family.muon_plus(1.0, consistent_rms=None, weight_decay=0.0)
      >>> params = {"kernel": jnp.eye(2, 8)}
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
      >>> print((-updates["kernel"]).round(3))
      [[1. 0. 0. 0. 0. 0. 0. 0.]
       [0. 1. 0. 0. 0. 0. 0. 0.]]

    References:
      Zhang et al. 2026, arXiv:2602.21545. Its scale is ``scale_mode="unit_rms_norm"``,
      and its momentum has no Nesterov term (``nesterov=False``).
    """
    normalized = normalize_stage(order, eps)
    return optax.chain(stages.after_q(normalized).coupled), stages.learning_rate


@_optimizer(*RATIO)
def aurora(
    stages: Stages, *, pp_iterations: int | jax.Array = 2, pp_beta: ArrayLike = 0.5
) -> ChainTail:
    r"""Aurora: Muon with a Q whose vectors along the longer side have nearly one norm.

    Q stays orthogonal along the shorter side. For an ``(m, n)`` matrix with
    :math:`m > n`, whose rows :math:`i` are its inputs,

    .. math::

      X_{i,:} &= \tilde M_{i,:} / \|\tilde M_{i,:}\|, \\
      X_{i,:} &\leftarrow X_{i,:} / \|U_{i,:}\|^{2\beta} \quad \text{with} \quad
      U = \mathrm{NS}_k(X), \\
      Q &= \mathrm{NS}_k(X).

    The second line is repeated ``pp_iterations - 1`` times. With :math:`m < n` it is the
    same for the columns, the neurons. A square matrix takes Muon's step. Others go
    through Newton–Schulz ``pp_iterations`` times, with as many exchanges on meshes.

    Args:
      pp_iterations: Passes through Newton–Schulz, at least 1. May be traced.
      pp_beta: The exponent :math:`\beta`, at least 0. 0.5 divides by the norms of U.

    Returns:
      An optimizer with these arguments and those of :func:`orscale_jax.muon`, and with
      Muon's state.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import family
      >>> optimizer = family.aurora(1.0, consistent_rms=None, weight_decay=0, ns_steps=8)
      >>> params = {"kernel": jnp.array([[9.0, 0], [0, 1.0], [0, 0.1], [0.1, 0]])}
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
      >>> print(jnp.linalg.norm(updates["kernel"], axis=1).round(3))  # √(2/4) each
      [0.707 0.707 0.707 0.707]

    References:
      Dewulf et al. 2026, arXiv:2606.27715, and the authors' code, which this follows
      (tilde-research/aurora-release, 3d79a5c, 8 May 2026). Its scale is
      ``scale_mode="shape_scaling"``. Its floor of 1e-7 under the norms is missing here: a
      step does not depend on the scale of the gradients.
    """
    polar = balanced_polar_stage(stages.polar, pp_iterations, pp_beta)
    stages = dataclasses.replace(stages, orthogonalize=polar(stages.matrices))
    return optax.chain(stages.coupled), stages.learning_rate


@_optimizer()
def cautious(stages: Stages) -> ChainTail:
    r"""OrScale that decays only the entries that the update shrinks.

    .. math::

      D = \lambda \, \mathbf{1}[Q \odot W \geq 0] \odot W + sQ.

    The decay stays coupled: r is measured on this D and scales it; see
    :func:`orscale_jax.add_cautious_decayed_weights`. AdamW's decay is unchanged.

    Returns:
      An optimizer with the arguments of :func:`orscale_jax.orscale`. With
      ``r_min=1, r_max=1`` it is Muon with cautious decay.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import family
      >>> optimizer = family.cautious(
      ...     1.0, consistent_rms=None, weight_decay=0.5, ns_steps=8
      ... )
      >>> params = {"kernel": 4 * jnp.eye(2)}
      >>> grads = {"kernel": jnp.diag(jnp.array([1.0, -1.0]))}  # Down and up.
      >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
      >>> print(jnp.diag(updates["kernel"]).round(1))
      [-3.  1.]

    References:
      Chen et al. 2025, *Cautious Weight Decay*, arXiv:2510.12402.
    """
    stages = dataclasses.replace(stages, decay=decay.cautious(stages.decay))
    return optax.chain(stages.coupled, stages.ratio), stages.learning_rate


@_optimizer()
def pooled(stages: Stages, *, classes: Classes = None) -> ChainTail:
    r"""OrScale with one ratio for all matrices, or one for each class.

    .. math::

      \hat r = \mathrm{clip}\Big(\exp \frac{1}{N} \sum_{i=1}^N \log r_i,
      \, r_{\min}, r_{\max}\Big).

    It is the control experiment that separates the effect of one ratio per matrix from
    that of a larger learning rate for all. :func:`optax.inject_hyperparams` takes
    functions for schedules: if ``classes`` is a function, pass it
    ``static_args="classes"``.

    Args:
      classes: The class of each matrix: a tree of strings like the parameters (None where
        there is no matrix), a prefix of such a tree, or a callable from the parameters to
        one. Each class has one ratio. None: one ratio for all matrices.

    Returns:
      An optimizer with these arguments and those of :func:`orscale_jax.orscale`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from orscale_jax import family
      >>> optimizer = family.pooled(1e-3, calibrate=False, weight_decay=0.0)
      >>> params = {"up": jnp.eye(4), "down": 2 * jnp.eye(4)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> ratios = optax.tree.get(state, "trust_ratio")
      >>> print(ratios["up"] == ratios["down"])
      True

    References:
      This library's own.
    """
    h = stages.hyperparameters
    # Functions see all parameters, not the matrices alone.
    classes = class_labels(classes, stages.params, stages.params)
    pooled = pooled_ratio_stage(stages.ratio, h.r_min, h.r_max, classes, stages.matrices)
    return optax.chain(stages.coupled, pooled), stages.learning_rate


@_optimizer(*RATIO)
def replayed(
    stages: Stages, *, trust_ratio: ArrayLike | Callable[[jax.Array], jax.Array]
) -> ChainTail:
    r"""Muon+Moonlight whose learning rate is multiplied by recorded ratios.

    .. math::

      W \leftarrow W - \eta_t \hat r_t (\lambda W + sQ).

    It is the control experiment that separates the effect of a ratio that responds to
    its own run from that of a schedule. AdamW's learning rate is unchanged.

    Args:
      trust_ratio: The ratio of each step, of shape ``(T,)``, whose last entry applies to
        all later steps; a schedule, from the step to the ratio; or one number.

    Returns:
      An optimizer with these arguments and those of :func:`orscale_jax.muon`.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import family, muon
      >>> params = {"kernel": jnp.eye(4)}
      >>> replayed = family.replayed(1e-3, trust_ratio=[2.0, 3.0])
      >>> updates, _ = replayed.update(params, replayed.init(params), params)
      >>> expected, _ = muon(2e-3).update(params, muon(2e-3).init(params), params)
      >>> print(jnp.allclose(updates["kernel"], expected["kernel"]))
      True

    References:
      This library's own.
    """
    recorded = scale_by_recorded_trust_ratio(trust_ratio)
    return optax.chain(stages.coupled, recorded), stages.learning_rate
