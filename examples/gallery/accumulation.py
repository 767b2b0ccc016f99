"""Gradient accumulation, clipping, an average of the weights (EMA); killed and resumed.

    python -m examples.gallery.accumulation     # half a minute

The run is killed after 25 steps and resumed from the checkpoint of step 20: it ends bit
for bit like one that was never killed.
"""

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

from orscale_jax import muon

STEPS, MICRO_BATCHES, WIDTH, EMA_DECAY = 60, 4, 32, 0.9
RATE = optax.cosine_decay_schedule(0.02, STEPS)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), muon(RATE))


def initial_state() -> dict[str, Any]:
    up, down = jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) / WIDTH**0.5
    params = {"up": up, "down": down, "bias": jnp.zeros(WIDTH)}
    return {"params": params, "average": params, "opt": OPTIMIZER.init(params)}


def loss_fn(params: optax.Params, key: jax.Array) -> jax.Array:
    """The network learns to reverse its input."""
    x = jax.random.normal(key, (32, WIDTH))
    y = jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]
    return jnp.mean((y - x[:, ::-1]) ** 2)


@jax.jit
def train_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    def add(total: Any, key: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, key)), None

    params = state["params"]
    keys = jax.random.split(jax.random.key(step), MICRO_BATCHES)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), keys)
    grads = jax.tree.map(lambda x: x / MICRO_BATCHES, total)
    updates, opt = OPTIMIZER.update(grads, state["opt"], params)
    params = optax.apply_updates(params, updates)
    average = optax.incremental_update(params, state["average"], 1 - EMA_DECAY)
    return {"params": params, "average": average, "opt": opt}


def train(folder: Path, kill_after: int | None = None) -> dict[str, Any]:
    """The state after all steps, from the newest checkpoint in the folder on."""
    with ocp.CheckpointManager(folder) as checkpoints:
        state, done = initial_state(), checkpoints.latest_step() or 0
        if done:
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
        for step in range(done, STEPS):
            state = train_step(state, step)
            if (step + 1) % 10 == 0:
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
            if step + 1 == kill_after:
                checkpoints.wait_until_finished()  # So that there is one.
                os.kill(os.getpid(), signal.SIGKILL)
    return state


def main() -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The killed run's exit code; its state once resumed, and the undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        command = [sys.executable, "-m", "examples.gallery.accumulation", str(killed)]
        return subprocess.call(command), train(killed), train(whole)


if __name__ == "__main__":
    if sys.argv[1:]:
        train(Path(sys.argv[1]), kill_after=25)
    code, resumed, whole = main()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), resumed, whole)
    key = jax.random.key(STEPS)
    before, after = (loss_fn(s["params"], key) for s in (initial_state(), whole))
    print(f"exit code of the killed run: {code}; loss {before:.3f} → {after:.3f}")
    print(f"the resumed run ends the same: {all(jax.tree.leaves(same))}")
