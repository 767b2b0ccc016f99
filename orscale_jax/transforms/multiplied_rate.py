"""The learning rate, multiplied by a number of each parameter or of each matrix."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import is_axes_leaf
from orscale_jax.parameters.rate_multipliers import (
    NAME,
    RateMultipliers,
    rate_multipliers,
)
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import name_and_shape
from orscale_jax.trees.nodes import is_masked, mask_like


class RateMultiplierState(NamedTuple):
    """The multipliers of the last step, from which steps can be read off the state."""

    #: Tree like the parameters. A leaf of matrices has their multipliers, in an array of
    #: the batch shape (``()`` for a plain matrix), dtype float32 (float64 for float64
    #: parameters).
    learning_rate_multiplier: PyTree
    #: The state of the learning rate.
    inner_state: optax.OptState


def multiplied_for_matrices(
    learning_rate: optax.GradientTransformation, multipliers: PyTree, matrices: Matrices
) -> optax.GradientTransformation:
    """The learning rate with a multiplier for each matrix, which its state shows."""

    def init(params: PyTree) -> RateMultiplierState:
        entries = matrices.entries(params, _entries, multipliers)
        return RateMultiplierState(entries, learning_rate.init(params))

    def update(
        updates: PyTree, state: RateMultiplierState, params: PyTree | None = None
    ) -> tuple[PyTree, RateMultiplierState]:
        steps, inner_state = learning_rate.update(updates, state.inner_state, params)
        entries = matrices.entries(steps, _entries, multipliers)
        factors = matrices.broadcast(entries, steps)
        steps = matrices.map(lambda _, step, factor: factor * step, steps, factors)
        return steps, RateMultiplierState(entries, inner_state)

    return optax.GradientTransformation(init, update)


def multiplied(
    learning_rate: optax.GradientTransformation, multipliers: PyTree
) -> optax.GradientTransformation:
    """The learning rate with a multiplier for each parameter, and with its own state."""

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, Any]:
        steps, state = learning_rate.update(updates, state, params)
        own = mask_like(multipliers, steps)  # Without those of the matrices.
        return jax.tree.map(_times, steps, own), state

    return optax.GradientTransformation(learning_rate.init, update)


def multipliers_of(
    given: RateMultipliers, params: PyTree, matrices: Matrices
) -> PyTree | None:
    """The multiplier of each parameter; None if none are given.

    Raises:
      ValueError: If they do not fit the parameters, or the matrices among them.
    """
    multipliers = rate_multipliers(given, params)
    if multipliers is not None and jax.tree.leaves(params):
        _require_fitting(multipliers, params, matrices)
    return multipliers


def _require_fitting(multipliers: PyTree, params: PyTree, matrices: Matrices) -> None:
    """Refuse arrays that do not have the lengths of the first batch axes."""

    def check(path: Any, axes: MatrixAxes | Any, leaf: Any, value: ArrayLike) -> None:
        shape = np.shape(value)
        free = np.shape(leaf)[: _first_batch_axes(axes, np.ndim(leaf))]
        if shape != free[: len(shape)]:
            raise ValueError(
                f"{NAME} of parameter {name_and_shape(path, leaf)} has shape {shape}: "
                "pass a number, or an array with the lengths of its first axes, which "
                f"must be batch axes of matrices: {free}, or the first of these."
            )

    axes = matrices.axes_tree
    arguments = (axes, params, multipliers)
    jax.tree.map_with_path(check, *arguments, is_leaf=is_axes_leaf)


def _first_batch_axes(axes: MatrixAxes | Any, rank: int) -> int:
    """How many of the first axes may have multipliers of their own."""
    if is_masked(axes):  # AdamW's.
        return rank
    batch = axes.batch
    return next((i for i, axis in enumerate(batch) if axis != i), len(batch))


def _entries(axes: MatrixAxes, leaf: jax.Array, value: ArrayLike) -> jax.Array:
    """The multiplier of each matrix of a leaf."""
    shape = axes.batch_shape(leaf)
    # A copy: a step to which the state is donated must not delete the user's array.
    array = jnp.array(value, compute_dtype(leaf))
    return jnp.broadcast_to(_along_first(array, len(shape)), shape)


def _times(step: jax.Array, value: ArrayLike) -> jax.Array:
    if not np.ndim(value):
        return step * jnp.asarray(value, step.dtype)
    factor = _along_first(jnp.asarray(value, step.dtype), step.ndim)
    rest = step.ndim - np.ndim(value)
    spec = (*typed_sharding.spec(step)[: np.ndim(value)], *(None,) * rest)
    return step * typed_sharding.shard_as(factor, step, spec)


def _along_first(array: jax.Array, rank: int) -> jax.Array:
    return array.reshape(array.shape + (1,) * (rank - array.ndim))
