"""Training with one optimizer: all before the first step, the loop, validation."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from examples.pretrain.config import Recipe, accumulation
from examples.pretrain.errors import UsageError
from examples.pretrain.loading import Batches
from examples.pretrain.meshes import batch_shards, in_effect
from examples.pretrain.setup import Setup, State, set_up
from examples.pretrain.step import TrainStep, compiled_step, on_auto_axes
from examples.pretrain.task import Data, Metrics, Task


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A recipe that is ready to be trained."""

    setup: Setup
    # The batch of every step.
    batches: Batches
    # From one training state to the next, compiled. It takes the state's memory.
    step: TrainStep
    # The validation metrics of a training state.
    evaluate: Callable[[State], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Interval:
    """Some steps in a row: the metrics of each, and the seconds that they took.

    `step` are done, and `state` is what they led to. The next step takes its memory.
    """

    step: int
    state: State
    metrics: list[dict[str, np.ndarray]]
    seconds: float

    @property
    def first_step(self) -> int:
        """The first one of the interval, counted from 1."""
        return self.step - len(self.metrics) + 1

    @property
    def loss(self) -> float:
        """The training loss of the last step."""
        return float(self.metrics[-1]["loss"])


def make_trainer(
    task: Task,
    data: Data,
    recipe: Recipe,
    mesh: Mesh,
    *,
    zero1: bool = False,
    per_device_batch: int | None = None,
) -> Trainer:
    """Compiles the training of a task with a recipe.

    With `zero1` the optimizer's state is sharded over the replicas, too. A device takes
    `per_device_batch` examples at once; None: its whole part of the batch.
    """
    setup = set_up(task, recipe, mesh, zero1)
    batches = Batches(data.train, recipe.batch_size, mesh)
    parts = accumulation(recipe, batch_shards(mesh), per_device_batch)
    with in_effect(mesh):
        evaluate = evaluation(setup, data, recipe.batch_size)
        step = compiled_step(setup, parts, batches[0])
    return Trainer(setup, batches, step, evaluate)


def train(
    trainer: Trainer, state: State, start: int, pause: Callable[[int], bool]
) -> Iterator[Interval]:
    """Trains to the end from the state after `start` steps, and pauses where it is asked.

    In between nothing waits for the device. `pause` says whether to after so many steps;
    the last step always does. To train and to see the loss now and then:

        state = trainer.setup.initial_state()
        for interval in train(trainer, state, 0, lambda step: step % 10 == 0):
            print(interval.step, interval.loss)
    """
    last = trainer.setup.recipe.steps
    pending: list[dict[str, jax.Array]] = []
    began = time.perf_counter()
    for step, batch in enumerate(trainer.batches.read_ahead(start, last), start + 1):
        state, metrics = trainer.step(state, batch)
        pending.append(metrics)
        if pause(step) or step == last:
            fetched = jax.device_get(pending)
            yield Interval(step, state, fetched, time.perf_counter() - began)
            pending, began = [], time.perf_counter()


def evaluation(
    setup: Setup, data: Data, largest_batch: int
) -> Callable[[State], dict[str, float]]:
    """The metrics as a function of the training state.

    The validation examples are kept on the devices, in batches of at most this size.
    """
    shards = batch_shards(setup.mesh)
    size = evaluation_batch_size(len(data.validation), largest_batch, shards)
    batches = Batches(data.validation, size, setup.mesh)
    held = [batches[index] for index in range(len(batches))]

    def metrics_of(params: Any, variables: Any, batch: Any) -> Metrics:
        return setup.task.evaluate(setup.merge(params, variables), batch)

    metrics_of = jax.jit(on_auto_axes(setup, metrics_of, PartitionSpec()))

    def evaluate(state: State) -> dict[str, float]:
        params, variables = state["params"], state["variables"]
        with in_effect(setup.mesh):
            found = [metrics_of(params, variables, batch) for batch in held]
        found = jax.device_get(found)
        return {name: float(np.mean([m[name] for m in found])) for name in found[0]}

    return evaluate


def evaluation_batch_size(examples: int, largest: int, shards: int) -> int:
    """The largest batch of which the examples make whole ones, on all devices."""
    sizes = range(largest - largest % shards, 0, -shards)
    for size in sizes:
        if examples % size == 0:
            return size
    raise UsageError(
        f"{examples} validation examples make no whole batches of at most {largest} on "
        f"{shards} devices: change --val-batches, --batch-size or the mesh."
    )
