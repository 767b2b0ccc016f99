"""Muon and OrScale with a direction whose neurons are divided by their running norm."""

from __future__ import annotations  # help() shows the names of types.

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.optimizers import (
    MuonArguments,
    OrScaleArguments,
    Stage,
    Stages,
    build,
    muon_chain,
    orscale_chain,
    takes,
)
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, Optimizer, broadcast, compute_dtype
from orscale_jax.trees.boxes import PyTree

FULL_RANK, KEPT = NORMS = ("full_rank", "kept")


class NeuronRMSState(NamedTuple):
    """State of NorMuon's stage."""

    #: Tree like the parameters. A leaf of matrices has an entry per output neuron of each
    #: matrix: the parameter's shape without its reduction axes (with an entry per block,
    #: if blocks divide one of them), dtype float32 (float64 for float64 parameters).
    neuron_mean_square: PyTree


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Neurons(MuonArguments):
    r"""What both optimizers say of neurons.

    Args:
      b2: The decay rate :math:`\beta_2`, in [0, 1). 0: all neurons get the same norm.
      norm: ``"full_rank"``, as above, or ``"kept"``: :math:`\|Q\|_F` instead of
        :math:`\sqrt{\min(m, n)}`.
      neuron_eps: The floor :math:`\varepsilon` under the root mean square of a neuron, at
        least 0.
    """

    b2: ArrayLike = 0.95
    norm: str = FULL_RANK
    neuron_eps: ArrayLike = 1e-8


@takes(_Neurons)
def normuon(h: _Neurons) -> Optimizer:
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
    return build(lambda s: muon_chain(s, neuron_polar_stage(h, s)), h)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _OrScaleOnNorMuon(OrScaleArguments, _Neurons):
    """The arguments of both."""


@takes(_OrScaleOnNorMuon)
def orscale_on_normuon(h: _OrScaleOnNorMuon) -> Optimizer:
    r"""OrScale with NorMuon's direction: NorMuon times a trust ratio for each matrix.

    .. math::

      D = \lambda W + s \sqrt{\min(m, n)} \, \frac{\hat Q}{\|\hat Q\|_F}, \qquad
      r = \frac{\|W\|_F}{c \|D\|_F + \varepsilon}, \qquad
      W \leftarrow W - \eta \, \hat r \, D,

    with :math:`\hat Q` as in :func:`normuon`. The first step is the same as with
    :func:`normuon`.

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
      This library combines the two.
    """
    return build(lambda s: orscale_chain(s, neuron_polar_stage(h, s)), h)


def neuron_polar_stage(h: _Neurons, s: Stages) -> Stage:
    """M̃ to NorMuon's Q̂."""
    return optax.chain(s.orthogonalize, neuron_rms_stage(h, s.matrices))


def neuron_rms_stage(h: _Neurons, matrices: Matrices) -> Stage:
    """Q to NorMuon's Q̂, of the norm of a Q of full rank or of Q itself."""
    validate.number("b2", h.b2, at_least=0, below=1)
    validate.number("neuron_eps", h.neuron_eps, at_least=0)
    validate.choice("norm", h.norm, NORMS)

    def mean(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
        return jnp.sum(x, axis=axis) / max(1, math.prod(x.shape[i] for i in axis))

    def step(axes: MatrixAxes, q: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        now, entries = axes.neurons.reduce(mean, jnp.square(q)), axes.of_neurons
        v = typed_sharding.shard_like(v, now)
        decay = jnp.asarray(h.b2, v.dtype)
        v = decay * v + (1 - decay) * now
        # No division by zero where both a neuron and eps are zero.
        root = jnp.sqrt(jnp.where(v == 0, 1, v))
        inverse = 1 / (root + jnp.asarray(h.neuron_eps, v.dtype))
        # ‖Q̂‖² / m and ρ² / m, without reading the matrix again for its norm.
        square = entries.reduce(jnp.sum, now * inverse * inverse)
        if h.norm == KEPT:
            wanted = entries.reduce(jnp.sum, now)
        else:
            full_rank = axes.batch_by_shape(lambda m, n: min(m, n) / max(m, 1), q)
            wanted = jnp.asarray(full_rank, v.dtype)
        factor = jnp.sqrt(wanted / jnp.where(square == 0, 1, square))
        per_neuron = broadcast(entries, factor, inverse) * inverse
        return broadcast(axes.neurons, per_neuron, q) * q, v

    def init(params: PyTree) -> NeuronRMSState:
        neurons = tuple(axes and axes.neurons for axes in matrices.axes)
        each = dataclasses.replace(matrices, axes=neurons)
        zeros = each.scalars(
            params,
            lambda axes, leaf: typed_sharding.full(
                axes.batch_shape(leaf), 0.0, compute_dtype(leaf), leaf
            ),
        )
        return NeuronRMSState(zeros)

    def update(
        updates: PyTree, state: NeuronRMSState, params: PyTree | None = None
    ) -> tuple[PyTree, NeuronRMSState]:
        rows = matrices.each(updates, state.neuron_mean_square)
        stepped = [step(*row) for row in rows]
        q_hat, v = (matrices.tree_of([leaf[i] for leaf in stepped]) for i in (0, 1))
        return q_hat, NeuronRMSState(v)

    return optax.GradientTransformation(init, update)
