"""Muon on the sphere of each matrix's initial norm."""

from __future__ import annotations  # help() shows the names of types.

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.optimizers import Arguments, Stage, Stages, build, takes
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, Optimizer, broadcast, compute_dtype
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.checks import require_params
from orscale_jax.trees.names import quoted


class InitialNormState(NamedTuple):
    """State of Hyperball's stage."""

    #: Tree like the parameters. A leaf of matrices has their norms R, in an array of
    #: the batch shape (``()`` for a plain matrix), dtype float32 (float64 for float64
    #: parameters).
    initial_norm: PyTree
    #: The state of the learning rate.
    inner_state: optax.OptState


@takes(Arguments)
def hyperball(h: Arguments) -> Optimizer:
    r"""Muon on the sphere of each matrix's initial norm (MuonH).

    .. math::

      W \leftarrow R \, \mathrm{normalize}(W - \eta R \, \mathrm{normalize}(Q)), \qquad
      R = \|W_0\|_F, \qquad \mathrm{normalize}(X) = X / \|X\|_F.

    :math:`\eta` is the relative size of a step. Public runs use 0.003 to 0.03, and set
    ``adam_learning_rate`` separately. Matrices do not decay, so ``weight_decay`` applies
    only to the parameters that AdamW trains. A matrix of one entry cannot move. Give such
    a matrix to AdamW.

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

    def chain(s: Stages) -> Stage:
        step = initial_norm_stage(s.scale_by_learning_rate, s.matrices)
        return optax.chain(s.momentum, s.orthogonalize, step)

    return build(chain, h)


def initial_norm_stage(learning_rate: Stage, matrices: Matrices) -> Optimizer:
    """Q to Hyperball's step, from W to R normalize(W − ηR normalize(Q))."""
    learning_rate = optax.with_extra_args_support(learning_rate)

    def init(params: PyTree) -> InitialNormState:
        bare = unbox(params)
        for path, leaf in jax.tree.leaves_with_path(bare):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"parameter {quoted(path)} is abstract, and has no norm to keep: "
                    "call jax.eval_shape(optimizer.init, params)."
                )
        initial = matrices.scalars(
            params, lambda axes, leaf: axes.norms(leaf.astype(compute_dtype(leaf)))
        )
        # Not strict: optax.tree.map_params passes a placeholder without leaves.
        norms = jax.tree.leaves_with_path(unbox(initial))
        for (path, norm), leaf in zip(norms, jax.tree.leaves(bare), strict=False):
            known = not isinstance(norm, jax.core.Tracer)
            if jnp.size(leaf) and known and bool((norm == 0).any()):
                raise ValueError(
                    f"parameter {quoted(path)} has a matrix that is zero, which cannot "
                    "keep its norm and move: initialize it with other values, or put "
                    "None in its place in weight_dimension_numbers for AdamW."
                )
        return InitialNormState(initial, learning_rate.init(params))

    def to_norm(axes: MatrixAxes, leaf: jax.Array, norm: jax.Array) -> jax.Array:
        now = axes.norms(leaf)
        norm = typed_sharding.shard_like(norm, now)
        # A zero norm was not refused where ``init`` was compiled: here it shows as NaN.
        factor = jnp.where(norm == 0, jnp.nan, norm) / jnp.where(now == 0, 1, now)
        return broadcast(axes, factor, leaf) * leaf

    def change(
        axes: MatrixAxes, by: jax.Array, w: jax.Array, norm: jax.Array
    ) -> jax.Array:
        still = axes.reduce(largest_magnitude, by) == 0
        now = axes.norms(w + by)
        norm = typed_sharding.shard_like(norm, now)
        # A step to zero leaves no direction: the matrix stays where it is.
        moved = jnp.where(still | (now == 0), norm, now)
        # Not R (W + step) / ‖W + step‖ − W, which would round off the step's digits.
        factor = jnp.where(now == 0, 0, norm / moved)
        shrinkage = (norm - moved) / moved
        return broadcast(axes, factor, by) * by + broadcast(axes, shrinkage, w) * w

    def update(
        updates: PyTree,
        state: InitialNormState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, InitialNormState]:
        require_params(params)
        on_sphere = matrices.map(to_norm, updates, state.initial_norm)
        steps, inner_state = learning_rate.update(
            on_sphere, state.inner_state, params, **extra_args
        )
        changes = matrices.map(change, steps, params, state.initial_norm)
        return changes, InitialNormState(state.initial_norm, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
