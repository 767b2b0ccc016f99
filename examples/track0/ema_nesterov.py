"""Gradients ahead of the weights, along an average of an optimizer's steps.

Yau et al. 2026, EMA-Nesterov, arXiv:2605.25395.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orscale_jax import muon


class EMANesterovState(NamedTuple):
    """The state of :func:`ema_nesterov`."""

    steps: jax.Array
    lookahead: jax.Array  # β of the parameters.
    average: optax.Params  # The average step m.
    inner_state: optax.OptState


def ema_nesterov(
    inner: optax.GradientTransformation,
    lookahead: optax.ScalarOrSchedule,
    decay: float = 0.99,
) -> optax.GradientTransformation:
    """θ ← A(θ + β m), where A takes a step of ``inner`` and m averages the steps of θ.

    The average is m ← γ m + (1 − γ) (θ_new − θ_old). The training loop has θ + β m.
    """

    def init(params: optax.Params) -> EMANesterovState:
        zeros = optax.tree.zeros_like(params)
        steps = jnp.zeros((), jnp.int32)
        return EMANesterovState(steps, jnp.zeros(()), zeros, inner.init(params))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        moves, inner_state = inner.update(updates, state.inner_state, params)
        steps, before = state.steps + 1, state.lookahead
        beta = jnp.asarray(lookahead(steps) if callable(lookahead) else lookahead)
        average = jax.tree.map(
            lambda m, move: decay * m + (1 - decay) * (move + before.astype(m.dtype) * m),
            state.average,
            moves,
        )
        ahead = jax.tree.map(
            lambda m, move: move + beta.astype(m.dtype) * m, average, moves
        )
        beta = beta.astype(before.dtype)
        return ahead, EMANesterovState(steps, beta, average, inner_state)

    return optax.GradientTransformation(init, update)


def without_lookahead(state: EMANesterovState, params: optax.Params) -> optax.Params:
    """θ, to evaluate and to export."""
    return jax.tree.map(
        lambda w, m: w - state.lookahead.astype(w.dtype) * m, params, state.average
    )


def muon_ahead(
    learning_rate: optax.ScalarOrSchedule, weight_dimension_numbers: Any = None
) -> optax.GradientTransformation:
    """Muon with gradients ahead of the weights."""
    given = {"weight_dimension_numbers": weight_dimension_numbers}
    return ema_nesterov(muon(learning_rate, **given), 0.3)
