"""Optimizers that are only there to be compared with: controls of the study."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from orscale_jax import muon
from orscale_jax.parameters.dimension_numbers import is_axes_leaf, matrix_axes

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


def twice_the_decay(
    learning_rate: optax.Schedule,
    *,
    weight_decay: float,
    optimizer: Callable[..., optax.GradientTransformationExtraArgs] = muon,
    **arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """Muon+Moonlight, or another optimizer, whose matrices decay twice as much."""
    return optimizer(
        learning_rate,
        weight_decay=2 * weight_decay,
        adam_weight_decay=weight_decay,
        **arguments,
    )
