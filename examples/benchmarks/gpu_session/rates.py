"""The card's rate of matrix products, and shares of it."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from examples.benchmarks.gpu_session.card import this_card
from examples.benchmarks.gpu_session.stage import Measured
from examples.benchmarks.timing import Quartiles, seconds_of
from examples.pretrain.operation.peaks import peak_flops


@functools.cache
def product_rate(size: int, dtype: str = "bfloat16") -> float:
    """The best median of FLOPs per second of products of square matrices.

    Args:
      size: Of the largest that are tried; the others have a half and a quarter of it.
      dtype: Of the operands; the sums are float32.
    """
    return max(_rate(size // part, dtype) for part in (1, 2, 4))


def _rate(size: int, dtype: str) -> float:
    # Random entries: a card multiplies constant ones faster, since they cost less power.
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    jax.block_until_ready(multiply(x))
    return 2 * size**3 / seconds_of(lambda: multiply(x)).median


def shares(flops: float, seconds: Quartiles, largest: int) -> Iterator[Measured]:
    """FLOPs over a time, in percent of the product rate and, where known, of the peak.

    Args:
      flops: What is counted as done.
      seconds: The time.
      largest: As of :func:`product_rate`.
    """
    rates = {"product rate": product_rate(largest)}
    if peak := peak_flops(this_card().name):
        rates["peak"] = peak
    for name, rate in rates.items():
        yield Measured(f"share of the {name}", "%", seconds.dividing(100 * flops / rate))
