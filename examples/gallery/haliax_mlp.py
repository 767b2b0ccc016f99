"""An MLP in Haliax, whose axes have names: rows and columns are found by them.

It learns the distance of two points from their coordinates.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax

from orscale_jax import orscale
from orscale_jax.haliax import dimension_numbers

Batch, Input = hax.make_axes(batch=256, input=4)


class MLP(eqx.Module):
    first: hax.nn.Linear
    stack: hax.nn.Linear  # With an axis for the layers.
    last: hax.nn.Linear

    @staticmethod
    def init(hidden: int, layers: int, key: jax.Array) -> "MLP":
        # In and Out of a layer are two axes, so they have two names.
        Hidden, Out, Layers = hax.make_axes(hidden=hidden, out=hidden, layers=layers)
        keys = jax.random.split(key, 3)
        build = hax.vmap(lambda key: hax.nn.Linear.init(Hidden, Out, key=key), Layers)
        return MLP(
            hax.nn.Linear.init(Input, Hidden, key=keys[0]),
            build(jax.random.split(keys[1], layers)),
            hax.nn.Linear.init(Hidden, (), key=keys[2]),
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        x = self.first(x)
        Layers = self.stack.weight.resolve_axis("layers")

        def layer(x: hax.NamedArray, linear: hax.nn.Linear) -> hax.NamedArray:
            return x + linear(hax.nn.gelu(x)).rename({"out": "hidden"})

        return self.last(hax.fold(layer, Layers)(x, self.stack))


def loss_fn(model: MLP, x: hax.NamedArray) -> jax.Array:
    a, b = x.array[:, :2], x.array[:, 2:]
    distance = jnp.linalg.norm(a - b, axis=1)
    return jnp.mean((model(x).array - distance) ** 2)


def main(
    steps: int = 300, hidden: int = 64, layers: int = 3
) -> tuple[list[float], MLP, optax.OptState]:
    """The losses, and model and optimizer's state after the last step."""
    model = MLP.init(hidden, layers, jax.random.key(0))
    schedule = optax.cosine_decay_schedule(0.02, steps)
    optimizer = orscale(schedule, weight_dimension_numbers=dimension_numbers(model))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(
        model: MLP, state: optax.OptState, key: jax.Array
    ) -> tuple[MLP, optax.OptState, jax.Array]:
        x = hax.random.uniform(key, (Batch, Input))
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        model, state, loss = train_step(model, state, key)
        losses.append(float(loss))
    return losses, model, state


if __name__ == "__main__":
    losses, model, _ = main()
    numbers = dimension_numbers(model)(eqx.filter(model, eqx.is_inexact_array))
    print(f"loss {losses[0]:.4f} → {losses[-1]:.4f}")
    names = [axis.name for axis in model.stack.weight.axes]
    print(f"stack.weight {names}: {numbers.stack.weight}")
