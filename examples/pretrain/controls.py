"""Optimizers that are only there to be compared with: controls of the study."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax import muon, orscale
from orscale_jax._optimizers import RATIO, Stages, muon_chain, with_arguments_of
from orscale_jax.diagnostics import layer_classes
from orscale_jax.parameters.dimension_numbers import is_axes_leaf, matrix_axes
from orscale_jax.transforms.stages import Scale, shape_stage
from orscale_jax.trees.names import dotted

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


class StochasticRoundingState(NamedTuple):
    """State of :func:`round_stochastically`."""

    #: The number of updates so far. An int32 scalar.
    updates: jax.Array
    #: The state of the inner optimizer.
    inner_state: optax.OptState


def round_stochastically(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer in float32 whose bfloat16 weights are rounded up or down at random.

    The chance of either is such that the mean is the float32 weight. What is drawn
    depends on the step and on the weight's path and place alone.
    """

    def init(params: Any) -> StochasticRoundingState:
        wide = optax.tree.cast(params, jnp.float32)
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner.init(wide))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        grads, weights = optax.tree.cast((updates, params), jnp.float32)
        steps, inner_state = inner.update(grads, state.inner_state, weights, **extra_args)
        key = jax.random.fold_in(jax.random.key(0), state.updates)

        def rounded(path: Any, step: jax.Array, weight: jax.Array) -> jax.Array:
            of_leaf = jax.random.fold_in(key, zlib.crc32(dotted(path).encode()))
            # The difference of two bfloat16 numbers: optax.apply_updates rounds nothing.
            return _rounded(of_leaf, weight + step) - weight

        new = jax.tree.map_with_path(rounded, steps, weights)
        return new, StochasticRoundingState(state.updates + 1, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _rounded(key: jax.Array, weight: jax.Array) -> jax.Array:
    """A float32 array rounded to bfloat16 numbers: its bits but for the lower 16."""
    bits = jax.lax.bitcast_convert_type(weight, jnp.uint32)
    noise = jax.random.bits(key, weight.shape, jnp.uint16).astype(jnp.uint32)
    upper = jnp.where(jnp.isfinite(weight), bits + noise, bits) & np.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(upper, jnp.float32)


@with_arguments_of(orscale, (*RATIO, "consistent_rms", "scale_mode"))
def scale_between(s: Stages) -> optax.GradientTransformation:
    """Muon+Moonlight whose s is the geometric mean of its own and of ONE_SCALE."""
    square = Scale(None, lambda m, n: ONE_SCALE * 0.2 * math.sqrt(max(m, n)))
    scale = shape_stage(square, s.matrices)
    return muon_chain(dataclasses.replace(s, scale_by_shape=scale))


# Geometric means of r* along Muon+Moonlight, usual and small initial weights: the page
# "Both rates searched", Ratios by class.
MODEL_OPTIMA: dict[str, Mapping[str, float]] = {
    "dense": {
        "attention query": 1.26,
        "attention key": 1.07,
        "attention value": 1.05,
        "attention output": 1.22,
        "mlp up": 0.72,
        "mlp down": 0.80,
    },
    "mixture": {
        "attention query": 0.61,
        "attention latent down": 0.73,
        "attention latent up": 0.54,
        "attention output": 0.42,
        "mlp gate": 0.62,
        "mlp up": 0.62,
        "mlp down": 0.67,
        "router": 1.26,
        "routed expert gate": 1.27,
        "routed expert up": 1.27,
        "routed expert down": 1.28,
        "shared expert gate": 0.93,
        "shared expert up": 0.89,
        "shared expert down": 1.16,
    },
}


def model_optimum(
    learning_rate: optax.Schedule, **arguments: Any
) -> optax.GradientTransformationExtraArgs:
    """Muon+Moonlight with the paper's model's best ratio of each class as a factor."""
    return muon(learning_rate, learning_rate_multipliers=optimum_factors, **arguments)


def optimum_factors(params: Any) -> Any:
    """The factor of each parameter within [1/2, 2]; 1 for those without a class."""
    labels = layer_classes(params)
    is_mixture = "router" in jax.tree.leaves(labels)
    optima = MODEL_OPTIMA["mixture" if is_mixture else "dense"]
    return jax.tree.map(lambda label: min(max(optima.get(label, 1.0), 0.5), 2.0), labels)
