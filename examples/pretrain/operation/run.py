"""A run: every optimizer in turn, each from its last checkpoint on, and a report."""

import json
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from examples.pretrain.config import Config, Recipe, accumulation
from examples.pretrain.loading import Batches
from examples.pretrain.meshes import batch_shards, in_effect
from examples.pretrain.operation import report
from examples.pretrain.operation.checkpoint import Checkpoints
from examples.pretrain.operation.logs import Logs, check_finite
from examples.pretrain.operation.processes import StopSignal, is_first, writing
from examples.pretrain.operation.rundir import claim, read_result, write_atomically
from examples.pretrain.optimizers import find_optimizer, rates_and_decay
from examples.pretrain.output import Output
from examples.pretrain.recipes import rates_in_words
from examples.pretrain.sample import check_prompt, show_samples
from examples.pretrain.setup import set_up
from examples.pretrain.task import Data, Task
from examples.pretrain.train import Trainer, evaluation_batch_size, make_trainer, train


def run(config: Config, task: Task, data: Data, mesh: Mesh, console: Output) -> None:
    """Trains what is not finished, then reports on everything in the folder.

    What could not be trained is refused before anything is written.
    """
    size, shards = config.recipe.batch_size, batch_shards(mesh)
    if config.sample is not None:
        check_prompt(config.sample, data.unit, getattr(config.model, "vocab_size", 0))
    Batches(data.train, size, mesh)
    accumulation(config.recipe, shards, config.per_device_batch)
    evaluation_batch_size(len(data.validation), size, shards)
    for name in config.optimizer:
        set_up(task, config.recipe_of(name), mesh, config.mesh.zero1)
    if len(config.optimizer) > 1:
        console.print(rates_in_words(config))
    console.print(data.description)
    with in_effect(mesh):
        if note := task.note():
            console.print(note)
    claimed = claim(config, data)
    with writing(config.out), claimed, StopSignal() as stop:
        for name in config.optimizer:
            folder, recipe = config.out / name, config.recipe_of(name)
            if read_result(folder) is not None:
                console.print(f"{find_optimizer(name).label} is finished in {folder}.")
            else:
                console.print(rates_and_decay(recipe))
                # Without a name, so that its memory is free for the next one.
                train_and_save(
                    make_trainer(
                        task,
                        data,
                        recipe,
                        mesh,
                        zero1=config.mesh.zero1,
                        per_device_batch=config.per_device_batch,
                    ),
                    folder,
                    config,
                    stop,
                    console,
                )
            stop.check(f"Stopped after {name}")
        if is_first():
            report.write(config.out, console)
            if config.sample is not None:
                show_samples(config.out, config.sample, console)


def train_and_save(
    trainer: Trainer,
    folder: pathlib.Path,
    config: Config,
    stop: StopSignal,
    console: Output,
) -> None:
    """Trains to the end from the last checkpoint on, and writes the result."""
    setup, recipe = trainer.setup, trainer.setup.recipe
    label = find_optimizer(recipe.optimizer).label
    everies = (
        config.log_every,
        config.measure_every,
        config.checkpoint_every,
        recipe.val_every,
    )

    def pause(step: int) -> bool:
        return stop.requested(step) or any(_due(step, every, recipe) for every in everies)

    with (
        in_effect(setup.mesh),
        Checkpoints(folder / "checkpoints", config.keep, console) as checkpoints,
    ):
        restored = checkpoints.restore(setup)
        if restored is None and (folder / "metrics.csv").exists():
            console.print(f"{folder} has no checkpoint any more: {label} begins anew.")
        state, start = restored or (checkpoints.begin(setup), 0)
        if start:
            console.print(
                f"{label} resumes from its checkpoint of step {start} of {recipe.steps}."
            )
        logs = Logs(folder, setup, start, config, console)
        for interval in train(trainer, state, start, pause):
            state, step, stopping = interval.state, interval.step, stop.noted
            check_finite(interval, checkpoints.latest_step)
            validating = _due(step, recipe.val_every, recipe)
            validation = trainer.evaluate(state) if validating else {}
            logs.write(interval, validation)
            if stopping or _due(step, config.checkpoint_every, recipe):
                checkpoints.save(step, state)
            if stopping:
                stop.check(f"{label} stopped at step {step}")
    params = setup.abstract["params"]
    result: dict[str, Any] = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
    }
    if is_first():  # The file says that the training is finished.
        write_atomically(folder / "result.json", json.dumps(result, indent=2) + "\n")


def _due(step: int, every: int | None, recipe: Recipe) -> bool:
    return step == recipe.steps or (every is not None and step % every == 0)
