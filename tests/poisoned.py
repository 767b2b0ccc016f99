"""Trains on a batch of NaN: ``python -m tests.poisoned <step> <options>``."""

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from examples.pretrain.__main__ import main
from examples.pretrain.loading import Batches


def poison(step: int) -> None:
    """Makes the numbers of a step's batch NaN, but for integers."""
    read_ahead = Batches.read_ahead

    def with_poison(batches: Batches, start: int, end: int) -> Iterator:
        for index, batch in enumerate(read_ahead(batches, start, end), start + 1):
            yield jax.tree.map(spoil, batch) if index == step else batch

    def spoil(x: jax.Array) -> jax.Array:
        return x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x

    Batches.read_ahead = with_poison


if __name__ == "__main__":
    poison(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
