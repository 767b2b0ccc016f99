"""Optimizers of the table that need more than an import.

The others are `orscale_jax:muon`, `orscale_jax:orscale`, `orscale_jax.family:` with
`normuon`, `aurora`, `hyperball` and `orscale_on_normuon`, and the four methods of this
folder: `mixed_emas:two_timescales`, `blend:contra_muon`, `neuron_floor:row_floor` and
`ema_nesterov:muon_ahead`.
"""

from typing import Any, TypeAlias

import optax

import orscale_jax

Rate: TypeAlias = optax.Schedule
Optimizer: TypeAlias = optax.GradientTransformation


def adamw(learning_rate: Rate) -> Optimizer:
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1)


def lion(learning_rate: Rate) -> Optimizer:
    return optax.lion(learning_rate, weight_decay=0.1)


def schedule_free_adamw(learning_rate: Rate) -> Optimizer:
    """Validated on the weights at which it takes gradients, near the average."""
    inner = optax.adamw(learning_rate, b1=0.0, b2=0.95, weight_decay=0.1)
    return optax.contrib.schedule_free(inner, learning_rate, b1=0.9)


def optax_muon(
    learning_rate: Rate, other_learning_rate: Rate, weight_dimension_numbers: Any
) -> Optimizer:
    return optax.contrib.muon(
        learning_rate,
        adam_learning_rate=other_learning_rate,
        weight_decay=0.1,
        adam_weight_decay=0.1,
        consistent_rms=0.2,
        adam_b1=0.9,
        adam_b2=0.95,
        muon_weight_dimension_numbers=weight_dimension_numbers,
    )


def twice_the_decay(
    learning_rate: Rate, other_learning_rate: Rate, weight_dimension_numbers: Any
) -> Optimizer:
    """An entry can win by its decay alone: this one says by how much."""
    return orscale_jax.muon(
        learning_rate,
        adam_learning_rate=other_learning_rate,
        weight_dimension_numbers=weight_dimension_numbers,
        weight_decay=0.2,
    )
