"""Training with one optimizer, from the first weights or the last checkpoint on."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from examples.pretrain.checkpoint import Checkpoints
from examples.pretrain.config import Config
from examples.pretrain.evaluation import evaluation, evaluation_batch_size
from examples.pretrain.loading import Batches
from examples.pretrain.logs import Logs, check_finite
from examples.pretrain.meshes import batch_shards, in_effect
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.processes import is_first
from examples.pretrain.recipe import Recipe, accumulation
from examples.pretrain.records import Interval
from examples.pretrain.rundir import write_atomically
from examples.pretrain.setup import Setup, State, set_up
from examples.pretrain.step import compiled_step
from examples.pretrain.stop import StopSignal
from examples.pretrain.tasks import Data, Task
from examples.pretrain.timing import time_step


@dataclasses.dataclass(frozen=True)
class Run:
    """What the optimizers of a run share."""

    config: Config
    task: Task
    data: Data
    mesh: Mesh
    stop: StopSignal
    console: Console


def check(config: Config, task: Task, data: Data, mesh: Mesh) -> None:
    """Refuses what could not be trained, before anything is written.

    Raises:
      UsageError: If batches or the model do not divide among the devices, or if an
        optimizer does not take the recipe's hyperparameters.
    """
    recipe = config.recipe
    Batches(data.train, recipe.batch_size, mesh)
    accumulation(recipe, batch_shards(mesh), config.per_device_batch)
    evaluation_batch_size(len(data.validation), recipe.batch_size, batch_shards(mesh))
    for name in config.optimizer:
        set_up(task, config.recipe_of(name), mesh, config.mesh.zero1)


def train(optimizer: str, run: Run) -> None:
    """Trains to the end and writes the result, unless that is there already."""
    config, mesh = run.config, run.mesh
    folder = config.out / optimizer
    if (folder / "result.json").exists():
        return
    recipe = config.recipe_of(optimizer)
    setup = set_up(run.task, recipe, mesh, config.mesh.zero1)
    batches = Batches(run.data.train, recipe.batch_size, mesh)
    with in_effect(mesh):
        evaluate = evaluation(setup, run.data, recipe.batch_size)
        parts = accumulation(recipe, batch_shards(mesh), config.per_device_batch)
        train_step = compiled_step(setup, parts, batches[0])
        with Checkpoints(folder / "checkpoints", config.keep, run.console) as checkpoints:
            state, start = checkpoints.restore(setup) or (setup.initial_state(), 0)
            with Logs(folder, setup, start, config, run.console) as logs:
                for interval in training(train_step, state, batches, start, run):
                    state, step = interval.state, interval.step
                    check_finite(interval, checkpoints.latest_step)
                    validating = _due(step, recipe.validation_every, recipe)
                    validation = evaluate(state) if validating else {}
                    logs.write(interval, validation, _to_measure(step, batches, config))
                    if interval.stopping or _due(step, config.checkpoint_every, recipe):
                        checkpoints.save(step, state)
                    if interval.stopping:
                        label = OPTIMIZERS[optimizer].label
                        run.stop.check(f"{label} stopped at step {step}")
        _write_result(folder / "result.json", setup, train_step, state, batches, config)


def training(
    train_step: Any, state: State, batches: Batches, start: int, run: Run
) -> Iterator[Interval]:
    """Runs the steps and stops wherever something is to be done.

    In between nothing waits for the device.
    """
    config, recipe = run.config, run.config.recipe
    everies = (
        config.log_every,
        config.measure_every,
        config.checkpoint_every,
        recipe.validation_every,
    )
    pending: list[dict[str, jax.Array]] = []
    began = time.perf_counter()
    for step, batch in enumerate(batches.read_ahead(start, recipe.num_steps), start + 1):
        state, metrics = train_step(state, batch)
        pending.append(metrics)
        stopping = run.stop.requested(step)
        if stopping or any(_due(step, every, recipe) for every in everies):
            fetched = jax.device_get(pending)
            seconds = time.perf_counter() - began
            yield Interval(step, state, fetched, seconds, stopping)
            pending, began = [], time.perf_counter()


def _due(step: int, every: int | None, recipe: Recipe) -> bool:
    return step == recipe.num_steps or (every is not None and step % every == 0)


def _to_measure(step: int, batches: Batches, config: Config) -> list[Any]:
    """The next batches, none of them seen yet, where a measurement is due."""
    if config.measure_every is None or step % config.measure_every:
        return []
    return [batches[step + index] for index in range(config.measure_batches)]


def _write_result(
    path: pathlib.Path,
    setup: Setup,
    train_step: Any,
    state: State,
    batches: Batches,
    config: Config,
) -> None:
    """Writes down what the end tells; the file says that the training is finished."""
    params = setup.abstract["params"]
    result = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }
    if config.time_optimizer:
        seconds = time_step(train_step, setup.optimizer, state, batches[0])
        result["seconds"] = dataclasses.asdict(seconds)
    if is_first():
        write_atomically(path, json.dumps(result, indent=2) + "\n")
