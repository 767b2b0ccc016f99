"""Gradient accumulation, clipping, a moving average of the weights, and a killed run.

A step adds up the gradients of several micro-batches, clips their mean, and moves an
exponential moving average (EMA) of the weights. Orbax saves everything while training
goes on. The program kills a run and resumes it: it ends bit for bit like one that was
never killed.
"""

import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from orscale_jax import orscale

STEPS, SAVE_EVERY = 60, 10
MICRO_BATCHES, MICRO_BATCH, WIDTH = 4, 32, 32
EMA_DECAY = 0.9

State = dict[str, Any]  # "params", their moving "average", and the optimizer's "opt".

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    orscale(optax.cosine_decay_schedule(0.02, STEPS), weight_decay=0.1),
)


def initial_state() -> State:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "up": jax.random.normal(keys[0], (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "down": jax.random.normal(keys[1], (4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
        "bias": jnp.zeros(WIDTH),
    }
    average = jax.tree.map(jnp.copy, params)  # Both are donated to the first step.
    return {"params": params, "average": average, "opt": OPTIMIZER.init(params)}


def loss_fn(params: optax.Params, key: jax.Array) -> jax.Array:
    """The loss of a micro-batch: the network learns to reverse its input."""
    x = jax.random.normal(key, (MICRO_BATCH, WIDTH))
    y = jax.nn.relu(x @ params["up"]) @ params["down"] + params["bias"]
    return jnp.mean((y - x[:, ::-1]) ** 2)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, step: int) -> tuple[State, jax.Array]:
    params = state["params"]

    def add(total: Any, key: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(
            jnp.add, total, jax.value_and_grad(loss_fn)(params, key)
        ), None

    keys = jax.random.split(jax.random.key(step), MICRO_BATCHES)
    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, nothing, keys)
    loss, grads = jax.tree.map(lambda x: x / MICRO_BATCHES, total)
    updates, opt = OPTIMIZER.update(grads, state["opt"], params)
    params = optax.apply_updates(params, updates)
    average = optax.incremental_update(params, state["average"], 1 - EMA_DECAY)
    return {"params": params, "average": average, "opt": opt}, loss


def train(folder: Path, kill_after: int | None = None) -> State:
    """The state after all steps, from the newest checkpoint in the folder on."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder, options=options) as checkpoints:
        state, done = initial_state(), checkpoints.latest_step() or 0
        if done:
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
        for step in range(done, STEPS):
            state, _ = train_step(state, step)
            if (step + 1) % SAVE_EVERY == 0:
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
            if step + 1 == kill_after:
                checkpoints.wait_until_finished()  # So that there is one.
                os.kill(os.getpid(), signal.SIGKILL)
    return state


def evaluate(params: optax.Params) -> float:
    return float(loss_fn(params, jax.random.key(STEPS)))


def main(kill_after: int = 25) -> tuple[int, State, State]:
    """The killed run's exit code and, once resumed, its state; the undisturbed state."""
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        command = [sys.executable, "-m", "examples.gallery.accumulation"]
        code = subprocess.call([*command, str(killed), str(kill_after)])
        return code, train(killed), train(whole)


if __name__ == "__main__":
    if sys.argv[1:]:
        train(Path(sys.argv[1]), kill_after=int(sys.argv[2]))
    code, resumed, whole = main()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), resumed, whole)
    print(f"exit code of the killed run: {code}")
    first, last = (evaluate(state["params"]) for state in (initial_state(), whole))
    print(f"loss {first:.3f} → {last:.3f}")
    print(f"of the averaged weights: {evaluate(whole['average']):.3f}")
    print(f"the resumed run ends the same: {all(jax.tree.leaves(same))}")
