"""OrScale and its limit, Muon: Algorithm 1, and AdamW for all other parameters."""

from __future__ import annotations  # help() shows the names of types.

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import optax

from orscale_jax.arguments import Arguments, MuonArguments, OrScaleArguments, takes
from orscale_jax.sharding.param_shardings import ParamSpecs
from orscale_jax.transforms.matrices import (
    ADAMW,
    MATRIX,
    MakeStage,
    Matrices,
    Optimizer,
    on_parameters,
)
from orscale_jax.transforms.momentum import adam_stage, float_dtype, momentum_stage
from orscale_jax.transforms.orthogonalize import orthogonalize_stage
from orscale_jax.transforms.stages import (
    decay_stage,
    resolve_mask,
    shape_stage,
    where_nonzero_stage,
)
from orscale_jax.transforms.trust_ratio import trust_ratio_stage
from orscale_jax.trees.boxes import PyTree


@takes(OrScaleArguments)
def orscale(h: OrScaleArguments) -> Optimizer:
    r"""OrScale: Muon with a calibrated trust ratio for each matrix.

    Each matrix :math:`W \in \mathbb{R}^{m \times n}` with gradient G takes the step

    .. math::

      M &\leftarrow \mu M + G, \\
      \tilde M &= \mu M + G, \\
      Q &= \mathrm{NS}_k(\tilde M), \\
      s &= 0.2 \sqrt{\max(m, n)}, \\
      D &= \lambda W + s Q, \\
      r &= \|W\|_F / (c \|D\|_F + \varepsilon), \\
      \hat r &= \mathrm{clip}(r, r_{\min}, r_{\max}), \\
      W &\leftarrow W - \eta \, \hat r \, D,

    where c is set at the first step of the matrix, so that the first r is 1: that step
    is the same as with :func:`muon`. AdamW trains all other parameters.

    The defaults are the paper's configuration for language models. Its configuration for
    vision is ``orscale(lr, consistent_rms=None, calibrate=False, r_min=0.5, r_max=1.5)``.

    Returns:
      A transformation. Its updates have the shapes of the gradients. As in Optax, their
      dtype is the one to which gradient, parameter and ``mu_dtype`` promote. The state
      holds c, r and the norms of each matrix, in float32 (float64 for float64), and
      :func:`orscale_jax.diagnostics.read` gives them by name.

    Raises:
      ValueError: At once, if a hyperparameter is not valid. From ``init``, if a leaf is
        ambiguous or does not fit its dimension numbers. From ``update``, if ``params`` is
        missing, a gradient has another shape than its parameter, or ``init`` would not
        make this state of these parameters. The checks run while JAX traces.
      TypeError: If an argument is not known. The message suggests the nearest one.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from orscale_jax import diagnostics, orscale
      >>> optimizer = orscale(learning_rate=1e-3)
      >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
      >>> state = optimizer.init(params)
      >>> grads = jax.tree.map(jnp.ones_like, params)
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(diagnostics.read(state, params).trust_ratio["kernel"].round(4))
      1.0

    References:
      Lou & You, *OrScale: Orthogonalized Optimization with Layer-Wise Trust-Ratio
      Scaling*, Algorithm 1.
    """
    return build(orscale_chain, h)


@dataclasses.dataclass(frozen=True)
class Stages:
    """What an optimizer of the matrices is chained from, for given parameters."""

    hyperparameters: Arguments
    params: PyTree  # Or, without them, the updates.
    matrices: Matrices  # Which of them are matrices.
    momentum: optax.GradientTransformation  # G to M̃.
    orthogonalize: optax.GradientTransformation  # M̃ to Q.
    scale_by_shape: optax.GradientTransformation  # Q to sQ.
    add_decayed_weights: optax.GradientTransformation  # Adds λW.
    scale_by_trust_ratio: optax.GradientTransformation  # D to r̂D.
    scale_by_learning_rate: optax.GradientTransformation  # By −η.
    polar: MakeStage  # M̃ to Q, for any of the matrices.

    @property
    def direction(self) -> optax.GradientTransformation:
        """M̃ to D = λW + sQ with Q = NS(M̃), and to D = 0 where M̃ is zero."""
        stages = self.orthogonalize, self.scale_by_shape, self.add_decayed_weights
        return where_nonzero_stage(optax.chain(*stages), self.matrices)


# An optimizer of matrices from its stages. The nesting of chains is the state's tree:
# changing it breaks checkpoints.
Chain: TypeAlias = Callable[[Stages], optax.GradientTransformation]


def orscale_chain(s: Stages) -> optax.GradientTransformation:
    """OrScale: M ← μM + G, D = λW + sQ and W ← W − η r̂ D."""
    return optax.chain(
        s.momentum,  # M̃ = μM + G
        s.direction,  # D = λW + sQ, Q = NS(M̃)
        s.scale_by_trust_ratio,  # r̂D
        s.scale_by_learning_rate,  # −η r̂D
    )


def muon_chain(s: Stages) -> optax.GradientTransformation:
    """Muon: OrScale without the ratio, r̂ = 1."""
    return optax.chain(s.momentum, s.direction, s.scale_by_learning_rate)


def adamw_chain(h: Arguments, mask: PyTree | None) -> optax.GradientTransformation:
    """:func:`optax.adamw`, for the parameters that are no matrices."""
    moments = optax.scale_by_adam(
        b1=h.adam_b1,
        b2=h.adam_b2,
        eps=h.adam_eps,
        eps_root=h.adam_eps_root,
        nesterov=h.adam_nesterov,
    )
    return optax.chain(
        adam_stage(moments, float_dtype(h.mu_dtype)),
        decay_stage(h.adam_decay, mask),
        optax.scale_by_learning_rate(h.adam_rate),
    )


def build(chain: Chain, h: Arguments) -> Optimizer:
    """The optimizer whose matrices take a chain of stages, and all others AdamW."""
    specs = ParamSpecs(h.param_shardings)

    def optimizer_of(params: PyTree) -> Optimizer:
        polar = functools.partial(orthogonalize_stage, h.polar_options, specs)
        ratio = h.ratio
        # Functions among the arguments see the whole tree, not just one group of it.
        matrices = Matrices.of(h.weight_dimension_numbers, params)
        mask = resolve_mask(h.weight_decay_mask, params, matrices.mask)
        stages = Stages(
            hyperparameters=h,
            params=params,
            matrices=matrices,
            momentum=momentum_stage(h.momentum, h.nesterov, h.mu_dtype, matrices),
            orthogonalize=polar(matrices),
            scale_by_shape=shape_stage(h.scale, matrices),
            add_decayed_weights=decay_stage(h.weight_decay, mask),
            scale_by_trust_ratio=(
                optax.identity() if ratio is None else trust_ratio_stage(ratio, matrices)
            ),
            scale_by_learning_rate=optax.scale_by_learning_rate(h.learning_rate),
            polar=polar,
        )
        groups = {MATRIX: chain(stages), ADAMW: adamw_chain(h, mask)}
        labels = jax.tree.map(
            lambda is_matrix: MATRIX if is_matrix else ADAMW, matrices.mask
        )
        # Labels replace whole boxes: no box is without an array. In a function, since
        # optax.partition would call a tree of labels that is callable.
        return optax.partition(groups, lambda _: labels)

    optimizer_of(())  # Checks the arguments of the stages.
    return on_parameters(optimizer_of, float_dtype(h.mu_dtype))


@takes(MuonArguments)
def muon(h: MuonArguments) -> Optimizer:
    r"""Muon for the matrices, and AdamW for all other parameters.

    Each matrix takes the step :math:`W \leftarrow W - \eta (\lambda W + s Q)`: this is
    :func:`orscale` without the trust ratio, :math:`\hat r = 1`. The default,
    ``consistent_rms=0.2``, is Muon+Moonlight. ``consistent_rms=None`` is Muon with s = 1.
    ``scale_mode="shape_scaling"`` is the scale of Keller Jordan's code and of
    :func:`optax.contrib.muon`.

    :func:`optax.contrib.muon` has other defaults. It has no decay, ``adam_b2=0.999`` and
    ``adam_nesterov=True``, and it treats embeddings and heads as matrices. Its
    ``consistent_rms=None`` means ``scale_mode="shape_scaling"``.

    Returns:
      A transformation, as :func:`orscale` does, without c and r in its state.

    Raises:
      ValueError: In the same cases as :func:`orscale`.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import muon
      >>> optimizer = muon(1.0, consistent_rms=None, weight_decay=0.0, ns_steps=8)
      >>> params = {"kernel": jnp.eye(2)}
      >>> grads = {"kernel": jnp.array([[0.0, 1.0], [1.0, 0.0]])}
      >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
      >>> print(updates["kernel"].round(1) + 0.0)
      [[ 0. -1.]
       [-1.  0.]]

    References:
      Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025,
      arXiv:2502.16982; Lou & You, *OrScale*, section 3, "degenerate cases".
    """
    return build(muon_chain, h)
