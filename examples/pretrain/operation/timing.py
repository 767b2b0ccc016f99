"""How long a step takes, and how much of it is the optimizer's."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any
REPEATS, SECONDS = 9, 0.5  # Both at least.


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Medians, in seconds.

    Attributes:
      step: The whole training step.
      optimizer: Its optimizer, run alone.
    """

    step: float
    optimizer: float


def time_step(
    train_step: Callable[[PyTree, Any], tuple[PyTree, Any]],
    optimizer: optax.GradientTransformation,
    state: PyTree,
    batch: Any,
) -> StepTime:
    """Times both in turn, so that what else the machine does slows both alike.

    Args:
      train_step: Compiled; donates the state.
      optimizer: What the step updates with.
      state: The training state; used up.
      batch: Any batch.
    """

    def optimizer_step(state: PyTree, grads: PyTree) -> PyTree:
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    grads = jax.tree.map(jnp.copy, state["params"])  # The time is the same for any.
    alone = {
        name: jax.tree.map(jnp.copy, state[name]) for name in ("params", "opt_state")
    }
    optimizer_step = jax.jit(optimizer_step, donate_argnums=0)
    optimizer_step = optimizer_step.lower(alone, grads).compile()
    steps: list[float] = []
    optimizers: list[float] = []
    while len(steps) < REPEATS or sum(steps) < SECONDS:
        began = time.perf_counter()
        state, _ = jax.block_until_ready(train_step(state, batch))
        between = time.perf_counter()
        alone = jax.block_until_ready(optimizer_step(alone, grads))
        steps.append(between - began)
        optimizers.append(time.perf_counter() - between)
    return StepTime(statistics.median(steps), statistics.median(optimizers))
