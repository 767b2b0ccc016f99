"""A whole training step of GPT-2 124M, and the optimizer's share of it.

    python -m examples.benchmarks.training            # two turns; some minutes on a CPU

The demo's decoder in GPT-2's sizes, 8,192 tokens a step, everything in float32. The
gradient and each optimizer are programs of their own, timed in turns in one process; a
share is the optimizer's median over the sum with the gradient's.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from examples.pretrain.model import Decoder, cross_entropy
from orscale_jax import muon, orscale


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run."""

    turns: int = 2
    """Timed steps of each."""
    layers: int = 12
    """Of GPT-2's 12."""
    sequences: int = 16
    """Of 512 tokens each."""


def optimizers(matrices: Any) -> dict[str, optax.GradientTransformation]:
    numbers = jax.tree.map(lambda is_matrix: Dims(0, 1) if is_matrix else None, matrices)
    return {
        "optax.adamw": optax.adamw(1e-3, weight_decay=0.1),
        "optax.contrib.muon": optax.contrib.muon(
            1e-3,
            weight_decay=0.1,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=numbers,
        ),
        "muon": muon(1e-3, weight_dimension_numbers=numbers),
        "orscale": orscale(1e-3, weight_dimension_numbers=numbers),
    }


def seconds_of(run: Callable[[], Any], turns: int) -> float:
    jax.block_until_ready(run())  # Compiles.
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def stepping(
    optimizer: optax.GradientTransformation, params: Any, grads: Any
) -> Callable[[], Any]:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    held = [jax.tree.map(jnp.copy, params), jax.jit(optimizer.init)(params)]

    def run() -> Any:
        held[:] = step(*held, grads)
        return held

    return run


def main(options: Options) -> None:
    model = Decoder(
        vocab_size=50257,
        width=768,
        layers=options.layers,
        heads=12,
        rngs=nnx.Rngs(0),
    )
    graph, params = nnx.split(model, nnx.Param)
    tokens = jax.random.randint(jax.random.key(0), (options.sequences, 513), 0, 50257)

    @jax.jit
    def gradient(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return cross_entropy(nnx.merge(graph, params)(tokens[:, :-1]), tokens[:, 1:])

        return jax.grad(loss)(params)

    grads = gradient(params, tokens)
    matrices = jax.tree.map(lambda p: p.ndim == 2 and max(p.shape) < 50257, params)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    model_seconds = seconds_of(lambda: gradient(params, tokens), options.turns)
    print(f"{count / 1e6:.0f}M parameters; gradient {model_seconds:.2f} s", flush=True)
    print("| optimizer | its own seconds | whole step | share |\n|---|--:|--:|--:|")
    for name, optimizer in optimizers(matrices).items():
        seconds = seconds_of(stepping(optimizer, params, grads), options.turns)
        total = model_seconds + seconds
        print(f"| {name} | {seconds:.2f} | {total:.2f} | {100 * seconds / total:.1f} % |")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
