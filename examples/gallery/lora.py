"""Fine-tuning by adapters (LoRA) in Flax NNX, of weights that AdamW has trained.

    python -m examples.gallery.lora     # a minute; loss on unseen text, by optimizer

A model of bytes learns a module of the standard library with AdamW, and then another one
by its adapters alone: a kernel W becomes W + A B, where A starts random and B at zero.
Each optimizer has the best of four rates.

The trust ratio needs the initial norm of each matrix. B has none: its ratio stays 1, and
it takes the steps of `muon`. A has no gradient until B has moved: it waits, and
its ratio is anchored at the second step.
"""

import _pydecimal
import argparse
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from orscale_jax import muon, orscale
from orscale_jax.flax import nnx_dimension_numbers

CONTEXT, RATES = 16, (3e-3, 1e-2, 3e-2, 1e-1)
OPTIMIZERS: dict[str, Any] = {"AdamW": optax.adamw, "Muon": muon, "OrScale": orscale}
FROZEN = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


class Model(nnx.Module):
    """The logits of the next byte, from the last ones."""

    def __init__(self, width: int, rank: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, 16, rngs=rngs)
        sizes = ((16 * CONTEXT, width), (width, width), (width, width))
        self.layers = nnx.List(
            nnx.LoRALinear(*size, lora_rank=rank, rngs=rngs) for size in sizes
        )
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens).reshape(len(tokens), -1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)


def loss_fn(model: Model, text: jax.Array, starts: jax.Array) -> jax.Array:
    tokens = text[starts[:, None] + jnp.arange(CONTEXT + 1)]
    log_p = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(log_p, tokens[:, -1:], axis=1).mean()


def train(model: Model, tx: Any, wrt: Any, text: jax.Array, steps: int) -> nnx.Optimizer:
    """Trains what `wrt` selects, in place."""
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, key: jax.Array) -> None:
        starts = jax.random.randint(key, (256,), 0, len(text) - CONTEXT)
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, text, starts)
        optimizer.update(model, grads)

    for key in jax.random.split(jax.random.key(0), steps):
        step(model, optimizer, key)
    return optimizer


def main(steps: int = 400, width: int = 128, rank: int = 4) -> dict[str, Any]:
    """By name: the loss, and what led to it: the rate, the model, the optimizer."""
    sources = (inspect.getsource(module).encode() for module in (argparse, _pydecimal))
    old, new = (jnp.array(list(source), jnp.int32) for source in sources)
    new, unseen = jnp.split(new, [len(new) * 9 // 10])
    base, at = Model(width, rank, nnx.Rngs(0)), jnp.arange(len(unseen) - CONTEXT)
    train(base, optax.adamw(3e-3), FROZEN, old, 2 * steps)
    best: dict[str, Any] = {"no training": (loss_fn(base, unseen, at), 0.0, base, None)}
    matrices = {"weight_dimension_numbers": nnx_dimension_numbers(base)}
    for name, rate in ((name, rate) for name in OPTIMIZERS for rate in RATES):
        model, schedule = nnx.clone(base), optax.cosine_decay_schedule(rate, steps)
        arguments = {} if name == "AdamW" else matrices
        tx = OPTIMIZERS[name](schedule, weight_decay=0.0, **arguments)
        optimizer = train(model, tx, nnx.LoRAParam, new, steps)
        loss = loss_fn(model, unseen, at)
        if name not in best or loss < best[name][0]:
            best[name] = loss, rate, model, optimizer
    return best


if __name__ == "__main__":
    for name, (loss, rate, *_) in main().items():
        print(f"{name}: {loss:.3f} nats per byte at rate {rate:g}")
