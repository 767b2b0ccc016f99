"""A whole training step of GPT-2 124M, and the optimizer's share of it.

    python -m examples.benchmarks.training            # some minutes on a CPU

The demo's model in GPT-2's sizes, 8,192 tokens a step, everything in float32. The
gradient is accumulated over micro-batches, which bounds the memory. It and each optimizer
are programs of their own in one process, the optimizers' timed in turns; a share is the
optimizer's median over the sum with the gradient's.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from examples.benchmarks.contenders import contenders, step_of
from examples.benchmarks.gradients import gradient_of
from examples.benchmarks.timing import in_turns, repeated
from examples.pretrain.models.dense import Dense, DenseConfig


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    turns: int = 2
    """Timed gradients; each optimizer takes three steps to one."""
    layers: int = 12
    """Of GPT-2's 12."""
    sequences: int = 16
    """Of 512 tokens each."""
    at_once: int = 4
    """Sequences whose gradient is taken together; divides their number."""


def stepping(
    optimizer: optax.GradientTransformation, params: Any, grads: Any
) -> Callable[[], Any]:
    step = jax.jit(step_of(optimizer), donate_argnums=(0, 1))
    held = (jax.tree.map(jnp.copy, params), jax.jit(optimizer.init)(params))
    run = repeated(step, held, grads)
    jax.block_until_ready(run())  # Compiles.
    return run


def main(options: Options) -> None:
    config = DenseConfig(
        vocab_size=50257,
        width=768,
        layers=options.layers,
        heads=12,
        fused_qkv=False,
        scan=False,
    )
    graph, params = nnx.split(Dense(config, nnx.Rngs(0)), nnx.Param)
    batches = (options.sequences // options.at_once, options.at_once)
    tokens = jax.random.randint(jax.random.key(0), (*batches, 513), 0, 50257)
    gradient = gradient_of(graph)
    grads = jax.block_until_ready(gradient(params, tokens))
    numbers = jax.tree.map(
        lambda p: Dims(0, 1) if p.ndim == 2 and max(p.shape) < 50257 else None, params
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    gradients = {"gradient": lambda: gradient(params, tokens)}
    found = in_turns(gradients, range(options.turns))
    model_seconds = statistics.median(found["gradient"])
    print(f"{count / 1e6:.0f}M parameters; gradient {model_seconds:.2f} s", flush=True)
    runs = {
        name: stepping(optimizer, params, grads)
        for name, optimizer in contenders(numbers, None).items()
    }
    print("| optimizer | its own seconds | whole step | share |\n|---|--:|--:|--:|")
    for name, times in in_turns(runs, range(3 * options.turns)).items():
        seconds = statistics.median(times)
        total = model_seconds + seconds
        print(f"| {name} | {seconds:.2f} | {total:.2f} | {100 * seconds / total:.1f} % |")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
