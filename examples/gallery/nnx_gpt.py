"""A GPT in Flax NNX on one device, with AdamW and with muon.

python -m examples.gallery.nnx_gpt            # a minute
python -m examples.gallery.nnx_gpt FILE.png   # the same, and a figure of the losses
"""

import argparse as module_to_learn
import inspect
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

from orscale_jax import Description, describe, muon
from orscale_jax.flax import nnx_dimension_numbers


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norms = nnx.List(nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, width: int, layers: int, length: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.position = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List(Block(width, rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.readout = nnx.Linear(width, 256, rngs=rngs)  # AdamW trains it: the output.

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def main(
    steps: int = 150, width: int = 64, layers: int = 2
) -> tuple[dict[str, list[float]], Description]:
    """The losses of each optimizer, and how muon trains each parameter."""
    text = jnp.array(list(inspect.getsource(module_to_learn).encode()), jnp.int32)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 8e-3, 10, steps)
    doubled = optax.warmup_cosine_decay_schedule(0.0, 16e-3, 10, steps)

    def train(tx: optax.GradientTransformation) -> list[float]:
        model, losses = GPT(width, layers, 64, nnx.Rngs(0)), []
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for key in jax.random.split(jax.random.key(0), steps):
            starts = jax.random.randint(key, (16, 1), 0, len(text) - 65)
            tokens = text[starts + jnp.arange(65)]
            losses.append(float(train_step(model, optimizer, tokens)))
        return losses

    model = GPT(width, layers, 64, nnx.Rngs(0))
    numbers = nnx_dimension_numbers(model, jnp.zeros((1, 64), jnp.int32))
    ours = muon(doubled, weight_decay=0.1, weight_dimension_numbers=numbers)
    theirs = optax.adamw(schedule, weight_decay=0.1)
    return {"AdamW": train(theirs), "muon": train(ours)}, describe(model, ours)


if __name__ == "__main__":
    losses, description = main()
    for row in description.select(r"^(?!blocks.1).*(kernel|embedding)$").rows:
        print(f"{row.path:<31} {row.shape!s:<12} {row.rule:<6} {row.why}")
    for name, curve in losses.items():
        print(f"{name}: {sum(curve[-10:]) / 10:.3f} nats per byte, mean of 10 steps")
    if sys.argv[1:]:
        figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
        for name, curve in losses.items():
            axes.plot(curve, label=name)
        axes.set(xlabel="step", ylabel="training loss, nats per byte")
        axes.legend()
        figure.savefig(sys.argv[1], dpi=150)
