"""The training of one arm, from its first weights or its last checkpoint on."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from examples.pretrain.arms import ARMS
from examples.pretrain.batches import train_batches, validation_batches
from examples.pretrain.checkpoint import Checkpoints
from examples.pretrain.config import Config
from examples.pretrain.data import Corpus
from examples.pretrain.interrupt import StopSignal
from examples.pretrain.model import Decoder, cross_entropy
from examples.pretrain.progress import Display
from examples.pretrain.readouts import Readouts, due, examples_to_measure
from examples.pretrain.records import Interval, Recorder
from examples.pretrain.rundir import write_atomically
from examples.pretrain.timing import StepTime, time_step

PyTree = Any
State = dict[str, PyTree]  # "params" and "opt_state".
Batch = Any  # B×(T+1) tokens, of NumPy or JAX.
LossFn = Callable[[PyTree, Batch], jax.Array]
TrainStep = Callable[[State, Batch], tuple[State, jax.Array]]


def train_arm(
    name: str, config: Config, corpus: Corpus, stop: StopSignal, console: Console
) -> None:
    """Trains one arm to its end and writes its result, unless that is there already."""
    folder = config.out / name
    if (folder / "result.json").exists():
        return
    schedule = learning_rates(config)
    optimizer = ARMS[name].optimizer(schedule, config.weight_decay)
    loss_fn, params = initial_model(config, corpus.vocab_size)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    batches = train_batches(config, corpus)
    validate = validation(loss_fn, validation_batches(config, corpus))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        state = {"params": params, "opt_state": optimizer.init(params)}
        state, start = checkpoints.restore(state)
        recorder = Recorder(folder, name, start, schedule, config)
        readouts = None
        if ARMS[name].has_readouts:
            readouts = Readouts(folder, start, schedule, loss_fn, params)
        with Display(console, ARMS[name].label, start, config.steps) as display:
            train_step = compiled_step(loss_fn, optimizer, state, batches[start])
            for interval in training(train_step, state, batches, start, stop, config):
                state, step = interval.state, interval.step
                validating = _due(step, config.val_every, config)
                val_loss = validate(state["params"]) if validating else None
                recorder.record(interval, val_loss)
                if readouts is not None and due(step, config):
                    examples = examples_to_measure(step, batches, config)
                    readouts.record(step, state, examples, loss=interval.losses[-1])
                display.update(step, interval.losses[-1], recorder.tokens_per_second)
                stopping = stop.requested  # Asked once: never stop without having saved.
                if stopping or _due(step, config.checkpoint_every, config):
                    checkpoints.save(step, state)
                if stopping:
                    stop.check(f"{ARMS[name].label} stopped at step {step}")
    step_time = time_step(train_step, optimizer, state, batches[start])
    write_result(folder / "result.json", parameters, step_time)


def write_result(path: pathlib.Path, parameters: int, step_time: StepTime) -> None:
    """Writes down what the end of an arm tells; the file says that it is finished."""
    result = {
        "parameters": parameters,
        "seconds": dataclasses.asdict(step_time),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    write_atomically(path, json.dumps(result, indent=2) + "\n")


def learning_rates(config: Config) -> optax.Schedule:
    """Linear warmup, then a cosine to zero."""
    return optax.warmup_cosine_decay_schedule(
        # The warmup begins one step above zero: no step is without effect.
        init_value=config.learning_rate / max(config.warmup_steps, 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=0.0,
    )


def initial_model(config: Config, vocab_size: int) -> tuple[LossFn, PyTree]:
    """The loss as a function of (parameters, batch), and the initial parameters."""
    model = Decoder(
        vocab_size=vocab_size,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        rngs=nnx.Rngs(config.seed),
    )
    graphdef, params = nnx.split(model, nnx.Param)

    def loss_fn(params: PyTree, batch_BxT1: Batch) -> jax.Array:
        logits_BxTxV = nnx.merge(graphdef, params)(batch_BxT1[:, :-1])
        return cross_entropy(logits_BxTxV, batch_BxT1[:, 1:])

    return loss_fn, nnx.to_pure_dict(params)


def compiled_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    state: State,
    batch: Batch,
) -> TrainStep:
    """The training step, compiled for these shapes; it reuses the memory of its state."""

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}, loss

    return jax.jit(step, donate_argnums=0).lower(state, batch).compile()


def validation(loss_fn: LossFn, batches: Sequence[Batch]) -> Callable[[PyTree], float]:
    """The mean loss over all validation batches as a function of the parameters."""
    loss_fn = jax.jit(loss_fn)
    batches = jax.device_put(batches)

    def validate(params: PyTree) -> float:
        return float(np.mean(jax.device_get([loss_fn(params, b) for b in batches])))

    return validate


def training(
    train_step: TrainStep,
    state: State,
    batches: Sequence[Batch],
    start: int,
    stop: StopSignal,
    config: Config,
) -> Iterator[Interval]:
    """Runs the steps and stops wherever something is to be done.

    In between nothing waits for the device.
    """
    losses: list[jax.Array] = []
    began = time.perf_counter()
    for step in range(start, config.steps):
        state, loss = train_step(state, batches[step])
        losses.append(loss)
        done = step + 1
        everies = (
            config.log_every,
            config.measure_every,
            config.val_every,
            config.checkpoint_every,
        )
        if stop.requested or any(_due(done, every, config) for every in everies):
            fetched = [float(loss) for loss in jax.device_get(losses)]
            yield Interval(done, state, fetched, time.perf_counter() - began)
            losses, began = [], time.perf_counter()


def _due(step: int, every: int, config: Config) -> bool:
    return step % every == 0 or step == config.steps
