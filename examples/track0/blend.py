"""Q minus a part of the momentum: Contra-Muon.

modded-nanogpt, pull request 275.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from orscale_jax import orthogonalize, scale_by_shape


def blend_momentum(
    direction: optax.GradientTransformation, share: float
) -> optax.GradientTransformation:
    """D = (1 − s) Q + s M̃ / ‖M̃‖₂, and then D ← ‖Q‖ D / ‖D‖ in Frobenius norms.

    With a share s below 0, the singular values that are small in M̃ become the larger
    ones.
    """

    def blended(q: jax.Array, m: jax.Array) -> jax.Array:
        d = (1 - share) * q + share * m / _or_one(spectral(m))
        return frobenius(q) * d / _or_one(frobenius(d))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        q, state = direction.update(updates, state, params)
        return jax.tree.map(blended, q, updates), state

    return optax.GradientTransformation(direction.init, update)


def frobenius(x: jax.Array) -> jax.Array:
    """The norms of matrices along the last two axes."""
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def spectral(x: jax.Array) -> jax.Array:
    """The largest singular values, by five power steps from a vector of ones."""
    v = jnp.ones_like(x[..., :1])  # (..., inputs, 1)
    for _ in range(5):
        v = x @ (x.mT @ v / _or_one(frobenius(x.mT @ v)))
        v = v / _or_one(frobenius(v))
    # The ones may miss the large values, which are not below the mean square.
    least = frobenius(x) / min(x.shape[-2:]) ** 0.5
    return jnp.maximum(frobenius(x.mT @ v), least)


def _or_one(norm: jax.Array) -> jax.Array:
    return jnp.where(norm == 0, 1, norm)


def contra_muon(
    learning_rate: optax.ScalarOrSchedule, weight_dimension_numbers: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Muon on Q minus a part of the momentum."""
    given = {"weight_dimension_numbers": weight_dimension_numbers}
    return optax.chain(
        optax.trace(0.95, nesterov=True),
        blend_momentum(orthogonalize(**given), -0.25),
        scale_by_shape(**given),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(learning_rate),
    )
