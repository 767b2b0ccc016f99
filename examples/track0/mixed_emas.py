"""Momentum of several timescales: bi-Maxwell and K-Maxwell.

modded-nanogpt, pull requests 340 and 357.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import orthogonalize, scale_by_shape

Numbers: TypeAlias = Sequence[ArrayLike] | Callable[[jax.Array], Any]


def mixed_emas(
    decays: Numbers, weights: Numbers, gradient_share: optax.ScalarOrSchedule = 0.05
) -> optax.GradientTransformation:
    """M_k ← β_k M_k + (1 − β_k) G and M̃ = (1 − γ) Σ w_k M_k + γ G.

    Each average has a decay β_k and a weight w_k, and γ is the share of the gradient. All
    are numbers, or functions of the number of the step, which starts at 0.
    """

    def at(numbers: Any, step: jax.Array) -> Any:
        return numbers(step) if callable(numbers) else numbers

    def init(params: optax.Params) -> Any:
        step = jnp.zeros((), jnp.int32)
        return step, [optax.tree.zeros_like(params) for _ in at(decays, step)]

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        step, averages = state
        share = at(gradient_share, step)
        mixed, after = optax.tree.scale(share, updates), []
        numbers = zip(at(decays, step), at(weights, step), averages, strict=True)
        for decay, weight, average in numbers:
            average = jax.tree.map(
                lambda m, g, b=decay: b * m + (1 - b) * g, average, updates
            )
            mixed = optax.tree.add_scale(mixed, (1 - share) * weight, average)
            after.append(average)
        return mixed, (step + 1, after)

    return optax.GradientTransformation(init, update)


def two_timescales(
    learning_rate: optax.ScalarOrSchedule, weight_dimension_numbers: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Muon on the polar factor of a fast and a slow average."""
    given = {"weight_dimension_numbers": weight_dimension_numbers}
    return optax.chain(
        mixed_emas((0.85, 0.98), (0.44, 0.56)),
        orthogonalize(**given),
        scale_by_shape(**given),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(learning_rate),
    )
