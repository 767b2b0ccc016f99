"""What one step of an optimizer takes: time, share of the product rate, memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.benchmarks.contenders import contenders, relatives, step_of
from examples.benchmarks.gpu_session.card import peak_bytes
from examples.benchmarks.gpu_session.rates import shares
from examples.benchmarks.gpu_session.stage import Measured
from examples.benchmarks.models import Leaves
from examples.benchmarks.shapes import nominal_flops
from examples.benchmarks.timing import TURNS, Quartiles, repeated, seconds_of

TIME, MIB = "time of a step", 2**20
OPTIMIZERS = ("optax.adamw", "optax.contrib.muon", "muon", "orscale", "normuon")


def optimizers(numbers: Any) -> dict[str, optax.GradientTransformation]:
    """The five of ``OPTIMIZERS``; products of ours are in the platform's default dtype.

    Those of `optax.contrib.muon` are in the dtype of the gradients, which for float32
    means TF32 on GPUs.
    """
    known = contenders(numbers, None) | relatives(numbers, None)
    return {name: known[name] for name in OPTIMIZERS}


def step_measured(
    name: str, leaves: Leaves, largest_product: int, turns: int = TURNS
) -> Iterator[Measured]:
    """A step on random float32 parameters and gradients.

    The shares are of the nominal FLOPs of Newton–Schulz. The peak of the memory is that
    of the process up to here, and thus of a case before this one if that had more.

    Args:
      name: Of the optimizer.
      leaves: The parameters.
      largest_product: Of those that look for the card's rate.
      turns: That are timed.
    """
    optimizer = optimizers({key: leaf.numbers for key, leaf in leaves.items()})[name]
    params, grads = (_random(leaves, seed) for seed in (0, 1))
    held = [params, jax.jit(optimizer.init)(params)]
    del params
    step = jax.jit(step_of(optimizer), donate_argnums=(0, 1))
    compiled = step.lower(*held, grads).compile()
    seconds = seconds_of(repeated(compiled, held, grads), turns)
    yield Measured(TIME, "ms", seconds.times(1e3))
    if name != "optax.adamw":
        shapes = {key: leaf.shape for key, leaf in leaves.items() if leaf.numbers}
        yield from shares(nominal_flops(shapes), seconds, largest_product)
    if (memory := compiled.memory_analysis()) is not None:
        temporaries = memory.temp_size_in_bytes / MIB
        yield Measured("temporaries", "MiB", Quartiles.of([temporaries]))
    if (peak := peak_bytes()) is not None:
        yield Measured("peak of the process", "MiB", Quartiles.of([peak / MIB]))


def _random(leaves: Leaves, seed: int) -> Mapping[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return {
        name: jax.random.normal(key, leaf.shape, jnp.float32) * 0.02
        for key, (name, leaf) in zip(keys, leaves.items(), strict=True)
    }
