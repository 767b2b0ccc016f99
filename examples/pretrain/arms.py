"""The optimizers that are compared."""

import dataclasses
from typing import Protocol

import optax

from orscale_jax import muon, orscale

# The paper's bounds of the trust ratio for language models.
R_MIN, R_MAX = 0.1, 5.0


class OptimizerFactory(Protocol):
    """Makes an optimizer of the two hyperparameters that all arms share."""

    def __call__(
        self, learning_rate: optax.Schedule, weight_decay: float
    ) -> optax.GradientTransformation: ...


@dataclasses.dataclass(frozen=True)
class Arm:
    """One optimizer under test.

    Attributes:
      label: Its name in tables and figures.
      color: Its colour in figures (told apart by the colour-blind too).
      optimizer: Its factory.
      has_readouts: Whether `orscale_jax.diagnostics` can read its state.
    """

    label: str
    color: str
    optimizer: OptimizerFactory
    has_readouts: bool = True


def _adamw(
    learning_rate: optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay)


def _muon(
    learning_rate: optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    return muon(learning_rate, weight_decay=weight_decay)


def _orscale(
    learning_rate: optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    return orscale(learning_rate, weight_decay=weight_decay, r_min=R_MIN, r_max=R_MAX)


ARMS: dict[str, Arm] = {
    "adamw": Arm("AdamW", "#666666", _adamw, has_readouts=False),
    "muon": Arm("Muon+Moonlight", "#0072B2", _muon),
    "orscale": Arm("OrScale", "#D55E00", _orscale),
}
