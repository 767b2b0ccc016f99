"""No neuron's update is small beside its weights: RowFloor.

modded-nanogpt, pull request 328.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from orscale_jax import orthogonalize, scale_by_shape


def neuron_floor(ratio: float) -> optax.GradientTransformation:
    """Raise ‖update‖ to at least ratio · ‖weights‖, for each neuron."""

    def update(updates: optax.Updates, params: optax.Params) -> optax.Updates:
        return jax.tree.map(lambda u, w: raised(u, w, ratio), updates, params)

    return optax.stateless(update)


def raised(update: jax.Array, weights: jax.Array, ratio: float) -> jax.Array:
    """The updates of matrices (..., inputs, outputs); each output is a neuron."""
    u, w = (jnp.linalg.norm(x, axis=-2, keepdims=True) for x in (update, weights))
    return jnp.maximum(1, ratio * w / jnp.where(u == 0, 1, u)) * update


def row_floor(
    learning_rate: optax.ScalarOrSchedule, weight_dimension_numbers: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Muon whose neurons all move, without weight decay."""
    given = {"weight_dimension_numbers": weight_dimension_numbers}
    return optax.chain(
        optax.trace(0.95, nesterov=True),
        orthogonalize(**given),
        scale_by_shape(**given),
        neuron_floor(0.38),
        optax.scale_by_learning_rate(learning_rate),
    )
