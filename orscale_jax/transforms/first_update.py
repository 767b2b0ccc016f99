"""Which matrices have an update, and the wrapper that waits for the first one."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orscale_jax import _checks
from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.boundary import on_matrices
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree


class FromFirstNonzeroUpdateState(NamedTuple):
    """State of :func:`from_first_nonzero_update`."""

    #: Tree like the parameters. A leaf of matrices has 0 or 1 for each matrix, in an
    #: array of the batch shape and dtype int8.
    started: PyTree
    #: The state of the inner transformation.
    inner_state: optax.OptState


def from_first_nonzero_update(
    inner: optax.GradientTransformation,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Apply ``inner`` to a matrix from the first step on which its update is not zero.

    OrScale computes D inside it: a matrix that has received no momentum yet (an expert
    without tokens, a frozen branch) keeps :math:`D = 0` instead of
    :math:`D = \lambda W`, and does not change. Once it has started, zero updates pass
    through ``inner`` like others: :math:`D = \lambda W`, as Algorithm 1 says. Numbers
    below the smallest normal one of float32 (of float64 in float64) count as zero, as
    on CPUs and TPUs.

    ``inner`` is told which matrices have an update at this step, in the extra argument
    ``moving``: if :func:`scale_by_calibrated_trust_ratio` is part of it, decay alone does
    not anchor c.

    Args:
      inner: A transformation that keeps the updates' structure, such as
        :func:`optax.add_decayed_weights`. Its output before that step is replaced by
        zeros.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation whose state holds, per matrix, whether it has started, and the
      state of ``inner``, which runs at every step.

    Raises:
      ValueError: From ``init`` and ``update``, if a leaf is not a matrix.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import from_first_nonzero_update
      >>> stage = from_first_nonzero_update(optax.add_decayed_weights(0.1))
      >>> params = {"kernel": jnp.ones((2, 2))}
      >>> state = stage.init(params)
      >>> zero = {"kernel": jnp.zeros((2, 2))}
      >>> print(stage.update(zero, state, params)[0]["kernel"].max())
      0.0

    References:
      Lou & You, *OrScale*, Definition 2.
    """
    _checks.transformation("inner", inner)
    stage = functools.partial(first_update_stage, inner)
    return on_matrices(weight_dimension_numbers, stage)


def first_update_stage(
    inner: optax.GradientTransformation, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """:func:`from_first_nonzero_update` for given matrices."""
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> FromFirstNonzeroUpdateState:
        started = matrices.full(params, 0, lambda _: jnp.int8)
        return FromFirstNonzeroUpdateState(started, inner.init(params))

    def update(
        updates: PyTree,
        state: FromFirstNonzeroUpdateState,
        params: PyTree | None = None,
        *,
        moving: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, FromFirstNonzeroUpdateState]:
        if moving is None:
            moving = moving_matrices(matrices, updates)
        transformed, inner_state = inner.update(
            updates, state.inner_state, params, moving=moving, **extra_args
        )
        started = matrices.map(
            lambda _, before, now: before | now.astype(before.dtype),
            state.started,
            moving,
        )
        updates = matrices.map(
            lambda _, on, u: jnp.where(on != 0, u, jnp.zeros_like(u)),
            matrices.broadcast(started, transformed),
            transformed,
        )
        return updates, FromFirstNonzeroUpdateState(started, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def with_moving(
    inner: optax.GradientTransformation, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` with the extra argument ``moving``.

    It is a tree like the updates. A leaf of matrices has a boolean for each matrix, in an
    array of the batch shape: whether the matrix has an update.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        moving = moving_matrices(matrices, updates)
        return inner.update(updates, state, params, **extra_args | {"moving": moving})

    return optax.GradientTransformationExtraArgs(inner.init, update)


def moving_matrices(matrices: Matrices, updates: PyTree) -> PyTree:
    """Whether each matrix has an update, also one that is not finite."""

    def at(_: MatrixAxes, largest: jax.Array) -> jax.Array:
        wide = largest.astype(compute_dtype(largest))
        # Some platforms flush subnormal numbers to zero, some only where they round.
        return ~(wide < jnp.finfo(wide.dtype).tiny)

    return matrices.map(at, matrices.reduce(largest_magnitude, updates))
