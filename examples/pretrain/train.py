"""Training with one optimizer: what there is before the first step, and the loop."""

import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from examples.pretrain.config import Recipe, accumulation
from examples.pretrain.evaluation import evaluation
from examples.pretrain.loading import Batches
from examples.pretrain.meshes import batch_shards, in_effect
from examples.pretrain.setup import Setup, State, set_up
from examples.pretrain.step import TrainStep, compiled_step
from examples.pretrain.task import Data, Task


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
    last = trainer.setup.recipe.num_steps
    pending: list[dict[str, jax.Array]] = []
    began = time.perf_counter()
    for step, batch in enumerate(trainer.batches.read_ahead(start, last), start + 1):
        state, metrics = trainer.step(state, batch)
        pending.append(metrics)
        if pause(step) or step == last:
            fetched = jax.device_get(pending)
            yield Interval(step, state, fetched, time.perf_counter() - began)
            pending, began = [], time.perf_counter()
