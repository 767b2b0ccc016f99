"""What the trainer asks of a model and of its data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import grain
import jax
from flax import nnx

PyTree = Any
Metrics = dict[str, jax.Array]


class Task:
    """A model and its loss, to be subclassed."""

    item: str  # What throughput counts: "tokens" or "images".
    items_per_example: int
    # Operations of the model in a training step, without those that rematerialization
    # repeats; None where they are not counted.
    flops_per_example: float | None = None

    def create(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model with its initial weights."""
        raise NotImplementedError

    def weight_dimension_numbers(self, model: Any) -> Callable[[PyTree], PyTree]:
        """Which parameters are matrices, for `orscale` and its relatives."""
        raise NotImplementedError

    def loss(self, model: Any, batch: PyTree) -> tuple[jax.Array, Metrics]:
        """The loss that is trained on, and what is recorded besides, means over a batch.

        May change variables of the model that are no parameters.
        """
        raise NotImplementedError

    def evaluate(self, model: Any, batch: PyTree) -> Metrics:
        """What validation records, means over a batch; "loss" is one of them."""
        raise NotImplementedError

    def after_step(self, variables: PyTree, metrics: Metrics) -> PyTree:
        """The model's other variables after an optimizer step with these metrics."""
        return variables

    def note(self) -> str:
        """A line on how the model is computed on the mesh in context; or nothing."""
        return ""

    def batch(self, size: int) -> PyTree:
        """The shapes and dtypes of a batch."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains on and is validated on."""

    train: grain.MapDataset  # Examples in the order of training, without end.
    validation: grain.MapDataset  # Those of every validation, whole batches of them.
    unit: str  # What the loss counts by: "byte", "token" or "image".
    description: str  # A line for the reader.
    facts: dict[str, Any]  # What tells it apart from other data, for `config.json`.
