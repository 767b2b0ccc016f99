"""Fine-tuning of adapters in Flax NNX (LoRA): the base weights stay as they are.

    python -m examples.gallery.lora     # 20 seconds; the loss falls to 1e-8

A kernel W becomes W + A B, where A starts random and B at zero. The trust ratio needs the
initial norm of each matrix. B has none: its ratio stays 1, and it takes the steps of
Muon+Moonlight. A has no gradient until B has moved: it waits, and its ratio is anchored
at the second step.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from orscale_jax import orscale
from orscale_jax.flax import nnx_dimension_numbers

ADAPTERS = nnx.DiffState(0, nnx.LoRAParam)  # Differentiate by these alone.


class MLP(nnx.Module):
    def __init__(self, width: int, rank: int, rngs: nnx.Rngs):
        self.layers = nnx.List(
            nnx.LoRALinear(width, width, lora_rank=rank, rngs=rngs) for _ in range(3)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + nnx.relu(layer(x))
        return x


def calibration(optimizer: nnx.Optimizer) -> tuple[float, float]:
    """c of the first layer's A and B: 0 if unset, infinity without an initial scale."""
    state = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"]
    [(_, c)] = optax.tree.get_all_with_path(state, "calibration")
    adapter = c["layers"][0]["lora"]
    return float(adapter["lora_a"]), float(adapter["lora_b"])


@nnx.jit
def train_step(
    model: MLP, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array
) -> jax.Array:
    def loss_fn(model: MLP) -> jax.Array:
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn, argnums=ADAPTERS)(model)
    optimizer.update(model, grads)
    return loss


def main(
    steps: int = 300, width: int = 64, rank: int = 4
) -> tuple[list[float], list[tuple[float, float]], MLP]:
    """The losses and calibrations of all steps, and the model after the last."""
    model, target = (MLP(width, rank, nnx.Rngs(0)) for _ in range(2))
    for number, layer in enumerate(target.layers):  # To imitate: with a B that is not 0.
        b = layer.lora.lora_b
        b.set_value(0.1 * jax.random.normal(jax.random.key(number), b.shape))
    rate = optax.cosine_decay_schedule(0.01, steps)
    numbers = nnx_dimension_numbers(model)
    tx = orscale(rate, weight_decay=0.0, weight_dimension_numbers=numbers)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    losses, seen = [], []
    for step in range(steps):
        x = jax.random.normal(jax.random.key(step), (256, width))
        losses.append(float(train_step(model, optimizer, x, target(x))))
        seen.append(calibration(optimizer))
    return losses, seen, model


if __name__ == "__main__":
    losses, seen, _ = main()
    print(f"loss {losses[0]:.1e} → {losses[-1]:.1e}")
    a = ", ".join(f"{a:.3f}" for a, _ in (seen[0], seen[1], seen[-1]))
    print(f"c of A after steps 1, 2 and {len(seen)}: {a}; of B: {seen[-1][1]}")
