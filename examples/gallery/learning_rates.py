"""A population of networks, one for each learning rate, trained at once by jax.vmap.

The learning rate is an argument of the traced function, so that one compiled program
trains them all.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from orscale_jax import muon, orscale

Params = list[jax.Array]
OPTIMIZERS = {"orscale": orscale, "muon": muon, "adamw": optax.adamw}


def init(key: jax.Array, width: int) -> Params:
    shapes = [(4, width), (width, width), (width, 1)]
    normal = jax.nn.initializers.lecun_normal()
    keys = jax.random.split(key, len(shapes))
    return [normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    hidden = x
    for kernel in params[:-1]:
        hidden = jax.nn.gelu(hidden @ kernel)
    target = x[:, 0] * x[:, 1]
    return jnp.mean(((hidden @ params[-1])[:, 0] - target) ** 2)


def train(name: str, rate: jax.Array, steps: int, width: int) -> jax.Array:
    """The mean loss of the last tenth of the steps."""
    schedule = optax.cosine_decay_schedule(rate, steps)
    optimizer = OPTIMIZERS[name](schedule, weight_decay=0.01)
    params = init(jax.random.key(0), width)

    def step(
        carry: tuple[Params, optax.OptState], key: jax.Array
    ) -> tuple[tuple[Params, optax.OptState], jax.Array]:
        params, state = carry
        x = jax.random.normal(key, (128, 4))
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    keys = jax.random.split(jax.random.key(1), steps)
    _, losses = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    return losses[-max(1, steps // 10) :].mean()


def main(steps: int = 300, width: int = 32, rates: int = 8) -> dict[str, jax.Array]:
    """The rates, and for each optimizer the losses at these."""
    learning_rates = jnp.logspace(-3.5, 0, rates)
    table = {"rate": learning_rates}
    for name in OPTIMIZERS:
        of_rate = functools.partial(train, name, steps=steps, width=width)
        table[name] = jax.jit(jax.vmap(of_rate))(learning_rates)
    return table


if __name__ == "__main__":
    table = main()
    print(*(f"{name:>9}" for name in table))
    for row in zip(*table.values(), strict=True):
        print(*(f"{value:9.4f}" for value in row))
