"""The optimizers of the table, and those of them that need more than an import."""

from typing import Any, TypeAlias

import optax

import orscale_jax

Rate: TypeAlias = optax.Schedule
Optimizer: TypeAlias = optax.GradientTransformation

_HERE, _FAMILY = "examples.track0", "orscale_jax.family"
ENTRIES = {  # The MODULE:FACTORY of each name.
    "muon": "orscale_jax:muon",
    "adamw": f"{_HERE}.entries:adamw",
    "normuon": f"{_FAMILY}:normuon",
    "orscale": "orscale_jax:orscale",
    "hyperball": f"{_FAMILY}:hyperball",
    "aurora": f"{_FAMILY}:aurora",
    "twice_the_decay": f"{_HERE}.entries:twice_the_decay",
    "optax_muon": f"{_HERE}.entries:optax_muon",
    "ema_nesterov": f"{_HERE}.ema_nesterov:muon_ahead",
    "two_timescales": f"{_HERE}.mixed_emas:two_timescales",
    "adam_nesterov": f"{_HERE}.entries:adam_nesterov",
    "orscale_on_normuon": f"{_FAMILY}:orscale_on_normuon",
    "contra_muon": f"{_HERE}.blend:contra_muon",
    "neuron_floor": f"{_HERE}.neuron_floor:row_floor",
    "lion": f"{_HERE}.entries:lion",
    "schedule_free_adamw": f"{_HERE}.entries:schedule_free_adamw",
}


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


def adam_nesterov(
    learning_rate: Rate, other_learning_rate: Rate, weight_dimension_numbers: Any
) -> Optimizer:
    """AdamW also has Nesterov's momentum, as in Optax's Muon."""
    return orscale_jax.muon(
        learning_rate,
        adam_learning_rate=other_learning_rate,
        weight_dimension_numbers=weight_dimension_numbers,
        adam_nesterov=True,
    )
