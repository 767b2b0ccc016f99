"""Optimizers that are only there to be compared with: controls of the study."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from orscale_jax import muon, orscale
from orscale_jax._algorithm import ChainTail, Stages, with_arguments_of
from orscale_jax.parameters.dimension_numbers import is_axes_leaf, matrix_axes
from orscale_jax.transforms.neuron_rms import FULL_RANK, neuron_rms_stage

# About the mean of 0.2·√max(m, n) in models of width 64.
ONE_SCALE = 2.0


def adamw_apart(
    learning_rate: optax.Schedule,
    *,
    adam_learning_rate: optax.Schedule,
    weight_dimension_numbers: Any,
    param_shardings: Any = None,
    **arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """AdamW whose matrices have a learning rate of their own."""

    def labels(params: Any) -> Any:
        return jax.tree.map(
            lambda at: "other" if isinstance(at, optax.MaskedNode) else "matrix",
            matrix_axes(weight_dimension_numbers, params),
            is_leaf=is_axes_leaf,
        )

    rates = {"matrix": learning_rate, "other": adam_learning_rate or learning_rate}
    groups = {name: optax.adamw(rate, **arguments) for name, rate in rates.items()}
    return optax.partition(groups, labels)


def one_scale(
    learning_rate: optax.Schedule, *, weight_decay: float, **arguments: Any
) -> optax.GradientTransformationExtraArgs:
    """Muon+Moonlight whose updates have one scale for all shapes; decay is the same."""

    def scaled(step: jax.Array) -> jax.Array:
        return ONE_SCALE * learning_rate(step)

    arguments["adam_learning_rate"] = arguments["adam_learning_rate"] or learning_rate
    return muon(
        scaled,
        consistent_rms=None,
        weight_decay=weight_decay / ONE_SCALE,
        adam_weight_decay=weight_decay,
        **arguments,
    )


def round_to_nearest(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer in float32 whose bfloat16 weights are rounded after every step."""

    def init(params: Any) -> Any:
        return inner.init(optax.tree.cast(params, jnp.float32))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        wide = optax.tree.cast((updates, params), jnp.float32)
        return inner.update(wide[0], state, wide[1], **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


@with_arguments_of(orscale)
def orscale_on_normuon(stages: Stages) -> ChainTail:
    """OrScale's ratio on NorMuon's direction."""
    normalized = neuron_rms_stage(0.95, 1e-8, FULL_RANK)
    direction = stages.after_q(normalized).coupled
    return optax.chain(direction, stages.ratio), stages.learning_rate
