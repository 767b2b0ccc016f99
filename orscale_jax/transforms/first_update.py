"""The wrapper that leaves a matrix alone until it receives its first update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    require_matrices,
)
from orscale_jax.transforms.fusion import in_stacks
from orscale_jax.transforms.per_matrix import (
    full_per_matrix,
    map_matrices,
    reduce_matrices,
    require_per_matrix,
    spread,
)
from orscale_jax.trees.boxes import PyTree, on_bare_arrays


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
    :math:`D = \lambda W`. The matrix does not change, and :math:`D \neq 0`
    tells the next stage that the paper's "first non-zero update" has come.

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
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> FromFirstNonzeroUpdateState:
        started = full_per_matrix(weight_dimension_numbers, params, 0, lambda _: jnp.int8)
        return FromFirstNonzeroUpdateState(started, inner.init(params))

    def update(
        updates: PyTree,
        state: FromFirstNonzeroUpdateState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, FromFirstNonzeroUpdateState]:
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        require_per_matrix(state.started, axes_tree, updates)
        transformed, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        largest = reduce_matrices(_largest, axes_tree, updates)
        started = map_matrices(
            lambda _, before, x: before | (x != 0).astype(before.dtype),
            axes_tree,
            state.started,
            in_stacks(largest),
        )
        updates = map_matrices(
            lambda axes, on, u: jnp.where(spread(axes, on, u) != 0, u, jnp.zeros_like(u)),
            axes_tree,
            in_stacks(started),
            transformed,
        )
        return updates, FromFirstNonzeroUpdateState(started, inner_state)

    return on_bare_arrays(optax.GradientTransformationExtraArgs(init, update))


def _largest(leaf: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """The largest absolute value, NaN if there is one; 0 without values."""
    # Newton–Schulz begins with the same reduction; for the same array it runs once.
    return jnp.max(jnp.abs(leaf), axis=axis, initial=None if leaf.size else 0)
