"""An MLP in Flax NNX learns two interleaved spirals with Muon, in seconds."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from orscale_jax import muon


def spirals(n: int) -> tuple[jax.Array, jax.Array]:
    radius, label = jnp.sqrt(jnp.linspace(0.02, 1, n)), jnp.arange(n) % 2
    turn = 10 * radius + jnp.pi * label
    return (radius * jnp.stack([jnp.cos(turn), jnp.sin(turn)])).T, label


def loss_fn(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(model(x)[:, 0], y).mean()


@nnx.jit
def train_step(
    model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


rngs = nnx.Rngs(0)
layers = [nnx.Linear(m, n, rngs=rngs) for m, n in [(2, 64), (64, 64), (64, 1)]]
model = nnx.Sequential(layers[0], nnx.relu, layers[1], nnx.relu, layers[2])
schedule = optax.cosine_decay_schedule(0.03, decay_steps=300)  # A language model: 2e-3
transform = optax.chain(optax.clip_by_global_norm(1.0), muon(schedule))
optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
x, y = spirals(512)
for step in range(1, 301):
    loss = train_step(model, optimizer, x, y)
    if step % 100 == 0:
        print(step, loss)
