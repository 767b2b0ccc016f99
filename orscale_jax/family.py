r"""Relatives of OrScale, which add a stage to OrScale or Muon, or replace one.

Each function below is a chain of the stages of :func:`orscale_jax.orscale`, with
the same Newton–Schulz, the same meshes and the same AdamW: a comparison with OrScale or
Muon differs in one stage and nothing else.

==================  ==================================================================
hyperball           Muon on the sphere of each matrix's initial norm (MuonH)
normuon             Muon that divides neurons by their running root mean square
orscale_on_normuon  OrScale with NorMuon's direction
muon_plus           Muon that divides the inputs of Q, then its neurons, by their norms
aurora              Muon with a Q whose vectors on the longer side have nearly one norm
cautious            OrScale that decays only the entries that the update shrinks
==================  ==================================================================

All are optimizers with the arguments of :func:`orscale_jax.orscale`, without those of
stages that they do not have, and with a few more.
"""

from __future__ import annotations  # help() shows the names of types.

import dataclasses
from collections.abc import Sequence

import jax
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax._arguments import Arguments, MuonArguments, OrScaleArguments, takes
from orscale_jax._optimizers import Stages, build, muon_chain, orscale_chain
from orscale_jax.transforms.matrices import Optimizer
from orscale_jax.transforms.relatives import (
    FULL_RANK,
    INPUTS,
    NEURONS,
    balanced_polar_stage,
    cautious_stage,
    initial_norm_stage,
    neuron_rms_stage,
    normalize_stage,
)


@takes(Arguments)
def hyperball(h: Arguments) -> Optimizer:
    r"""Muon on the sphere of each matrix's initial norm (MuonH).

    .. math::

      W \leftarrow R \, \mathrm{normalize}(W - \eta R \, \mathrm{normalize}(Q)), \qquad
      R = \|W_0\|_F, \qquad \mathrm{normalize}(X) = X / \|X\|_F.

    :math:`\eta` is the relative size of a step; public runs use 0.01 to 0.03, and set
    ``adam_learning_rate`` separately. Matrices do not decay: ``weight_decay`` applies to
    AdamW's parameters only. A matrix of one entry cannot move: give it to AdamW, too.

    Returns:
      An optimizer.

    Raises:
      ValueError: In the same cases as :func:`orscale_jax.orscale`, and from ``init`` if a
        matrix is zero: it could not both keep its norm and move. (If ``init`` is
        compiled, the updates of the matrix are NaN instead.)

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

    def chain(s: Stages) -> optax.GradientTransformation:
        step = initial_norm_stage(s.scale_by_learning_rate, s.matrices)
        return optax.chain(s.momentum, s.orthogonalize, step)

    return build(chain, h)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _NorMuon(MuonArguments):
    r"""The arguments of :func:`normuon`.

    Args:
      b2: The decay rate :math:`\beta_2`, in [0, 1). 0: all neurons get the same norm.
      eps: The floor :math:`\varepsilon`, at least 0.
      norm: ``"full_rank"``, as above, or ``"kept"``: :math:`\|Q\|_F` instead of
        :math:`\sqrt{\min(m, n)}`.
    """

    b2: ArrayLike = 0.95
    eps: ArrayLike = 1e-8
    norm: str = FULL_RANK


@takes(_NorMuon)
def normuon(h: _NorMuon) -> Optimizer:
    r"""NorMuon: Muon that divides output neurons by their running root mean square.

    .. math::

      v_j &\leftarrow \beta_2 v_j + (1 - \beta_2) \tfrac{1}{m} \|Q_{:,j}\|^2, \qquad
      \hat Q_{:,j} = Q_{:,j} / (\sqrt{v_j} + \varepsilon), \\
      W &\leftarrow W - \eta \Big(\lambda W + s \sqrt{\min(m, n)} \,
      \frac{\hat Q}{\|\hat Q\|_F}\Big).

    With ``consistent_rms=0.2`` the step without decay has norm
    :math:`0.2 \, \eta \sqrt{mn}`, as in the paper.

    Returns:
      An optimizer.

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

    def chain(s: Stages) -> optax.GradientTransformation:
        neurons = neuron_rms_stage(h.b2, h.eps, h.norm, s.matrices)
        q_hat = optax.chain(s.orthogonalize, neurons)
        return muon_chain(dataclasses.replace(s, orthogonalize=q_hat))

    return build(chain, h)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _OrScaleOnNorMuon(OrScaleArguments):
    r"""The arguments of :func:`orscale_on_normuon`.

    Args:
      b2: The decay rate :math:`\beta_2`, in [0, 1). 0: all neurons get the same norm.
      neuron_eps: The floor under the root mean square of a neuron, at least 0.
      norm: ``"full_rank"``, as above, or ``"kept"``; see :func:`normuon`.
    """

    b2: ArrayLike = 0.95
    neuron_eps: ArrayLike = 1e-8
    norm: str = FULL_RANK


@takes(_OrScaleOnNorMuon)
def orscale_on_normuon(h: _OrScaleOnNorMuon) -> Optimizer:
    r"""OrScale with NorMuon's direction: NorMuon times a trust ratio for each matrix.

    .. math::

      D = \lambda W + s \sqrt{\min(m, n)} \, \frac{\hat Q}{\|\hat Q\|_F}, \qquad
      r = \frac{\|W\|_F}{c \|D\|_F + \varepsilon}, \qquad
      W \leftarrow W - \eta \, \hat r \, D,

    with :math:`\hat Q` as in :func:`normuon`, whose step the first one is.

    Returns:
      An optimizer. With ``r_min=1, r_max=1`` it is :func:`normuon`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import diagnostics, family
      >>> optimizer = family.orscale_on_normuon(1e-3)
      >>> params, grads = {"kernel": jnp.eye(16, 4)}, {"kernel": jnp.ones((16, 4))}
      >>> _, state = optimizer.update(grads, optimizer.init(params), params)
      >>> print(diagnostics.read(state, params).trust_ratio["kernel"].round(3))
      1.0

    References:
      Li et al. 2025, arXiv:2510.05491, for :math:`\hat Q`; Lou & You, *OrScale*, for r.
      Their composition is this library's (``docs/study/better_rule_protocol.md``).
    """
    _checks.number("neuron_eps", h.neuron_eps, at_least=0)

    def chain(s: Stages) -> optax.GradientTransformation:
        neurons = neuron_rms_stage(h.b2, h.neuron_eps, h.norm, s.matrices)
        q_hat = optax.chain(s.orthogonalize, neurons)
        return orscale_chain(dataclasses.replace(s, orthogonalize=q_hat))

    return build(chain, h)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _MuonPlus(MuonArguments):
    r"""The arguments of :func:`muon_plus`.

    Args:
      order: What is normalized, in this order: ``"neurons"`` or ``"inputs"`` or both,
        each any number of times.
      eps: The floor :math:`\varepsilon` under the root of each norm, at least 0.
    """

    order: Sequence[str] = (INPUTS, NEURONS)
    eps: ArrayLike = 1e-8


@takes(_MuonPlus)
def muon_plus(h: _MuonPlus) -> Optimizer:
    r"""Muon+: Muon that divides the inputs of Q, then its neurons, by their norms.

    Returns:
      An optimizer.

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

    def chain(s: Stages) -> optax.GradientTransformation:
        normalize = normalize_stage(h.order, h.eps, s.matrices)
        normalized = optax.chain(s.orthogonalize, normalize)
        return muon_chain(dataclasses.replace(s, orthogonalize=normalized))

    return build(chain, h)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Aurora(MuonArguments):
    r"""The arguments of :func:`aurora`.

    Args:
      pp_iterations: Passes through Newton–Schulz, at least 1. May be traced.
      pp_beta: The exponent :math:`\beta`, at least 0. 0.5 divides by the norms of U.
    """

    pp_iterations: int | jax.Array = 2
    pp_beta: ArrayLike = 0.5


@takes(_Aurora)
def aurora(h: _Aurora) -> Optimizer:
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

    Returns:
      An optimizer with Muon's state.

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

    def chain(s: Stages) -> optax.GradientTransformation:
        passes, beta = h.pp_iterations, h.pp_beta
        balanced = balanced_polar_stage(s.polar, passes, beta, s.matrices)
        return muon_chain(dataclasses.replace(s, orthogonalize=balanced))

    return build(chain, h)


@takes(OrScaleArguments)
def cautious(h: OrScaleArguments) -> Optimizer:
    r"""OrScale that decays only the entries that the update shrinks.

    .. math::

      D = \lambda \, \mathbf{1}[Q \odot W \geq 0] \odot W + sQ.

    The decay stays coupled: r is measured on this D and scales it. Its ceiling rises from
    :math:`1 / (c \lambda)` to :math:`\|W\| / (c \lambda \|W_+\|)`, with :math:`W_+` the
    entries that decay: by about :math:`\sqrt 2` where half of them do. AdamW's decay is
    unchanged.

    Returns:
      An optimizer. With ``r_min=1, r_max=1`` it is Muon with cautious decay.

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

    def chain(s: Stages) -> optax.GradientTransformation:
        decay = cautious_stage(s.add_decayed_weights)
        return orscale_chain(dataclasses.replace(s, add_decayed_weights=decay))

    return build(chain, h)
