"""A schedule that is switched while the run goes on, by `optax.inject_hyperparams`.

The rate is constant until the loss no longer falls, and then goes down to zero. It is a
number in the optimizer's state, which the loop writes: nothing is compiled again.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from orscale_jax import by_path, orscale

RATE, COOLDOWN, PATIENCE = 0.02, 100, 50

# inject_hyperparams takes every function for a schedule that is not named here.
optimizer = optax.inject_hyperparams(orscale, static_args="weight_dimension_numbers")(
    learning_rate=RATE,
    adam_learning_rate=RATE / 4,
    weight_decay=0.0,
    weight_dimension_numbers=by_path({"up|down": "matrix"}),
)


def init(key: jax.Array, width: int) -> optax.Params:
    keys = jax.random.split(key)
    return {
        "up": jax.random.normal(keys[0], (width, 4 * width)) / width**0.5,
        "down": jax.random.normal(keys[1], (4 * width, width)) / (4 * width) ** 0.5,
        "bias": jnp.zeros(width),
    }


def loss_fn(params: optax.Params, key: jax.Array) -> jax.Array:
    """The network learns to sort its input, of which it sees noise, too."""
    width = len(params["bias"])
    x, noise = jax.random.normal(key, (2, 64, width))
    y = jax.nn.gelu(x @ params["up"]) @ params["down"] + params["bias"]
    return jnp.mean((y - jnp.sort(x) - 0.1 * noise) ** 2)


@jax.jit
def train_step(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(params, key)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def main(limit: int = 1000, width: int = 16) -> tuple[list[float], list[float], int]:
    """The losses and rates of all steps, and the step at which the rate began to fall."""
    params = init(jax.random.key(0), width)
    state = optimizer.init(params)
    losses, rates = [], []
    best, best_step, switched = float("inf"), 0, None
    schedule = optax.constant_schedule(RATE)
    for step in range(limit):
        rate = float(schedule(step))
        if switched is not None and rate == 0:
            break
        state.hyperparams["learning_rate"] = jnp.asarray(rate)
        state.hyperparams["adam_learning_rate"] = jnp.asarray(rate / 4)
        params, state, loss = train_step(params, state, jax.random.key(step))
        losses.append(float(loss))
        rates.append(rate)
        smooth = sum(losses[-PATIENCE:]) / len(losses[-PATIENCE:])
        if smooth < best:
            best, best_step = smooth, step
        if switched is None and step - best_step >= PATIENCE:
            switched = step + 1
            schedule = optax.linear_schedule(
                RATE, 0.0, COOLDOWN, transition_begin=switched
            )
    return losses, rates, switched or limit


if __name__ == "__main__":
    losses, rates, switched = main()
    at_switch = sum(losses[switched - PATIENCE : switched]) / PATIENCE
    print(f"constant for {switched} steps, loss {losses[0]:.3f} → {at_switch:.3f}")
    end = sum(losses[-10:]) / 10
    print(f"rate {rates[switched - 1]:g} → {rates[-1]:g} in {COOLDOWN} more: {end:.3f}")
