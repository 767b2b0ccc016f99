"""Parameters of every kind, and plain NumPy views of the matrices in them."""

import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers as Blocks

# Name: shape, dimension numbers, and the list of matrices, written out by hand.
KINDS = {
    "tall": ((24, 10), Dims(0, 1), lambda x: [x]),
    "wide": ((10, 24), Dims(0, 1), lambda x: [x]),
    "square": ((16, 16), Dims(0, 1), lambda x: [x]),
    "transposed": ((16, 9), Dims(1, 0), lambda x: [x.T]),
    "convolution": ((3, 3, 4, 8), Dims((0, 1, 2), 3), lambda x: [x.reshape(36, 8)]),
    "query": ((12, 3, 5), Dims(0, (1, 2)), lambda x: [x.reshape(12, 15)]),
    "out": ((3, 5, 12), Dims((0, 1), 2), lambda x: [x.reshape(15, 12)]),
    "layers": ((4, 8, 12), Dims(1, 2), lambda x: [x[i] for i in range(4)]),
    "experts": (
        (2, 3, 8, 6),
        Dims(-2, -1),
        lambda x: [x[i, j] for i in range(2) for j in range(3)],
    ),
    "middle": ((8, 3, 6), Dims(0, 2), lambda x: [x[:, i] for i in range(3)]),
    "scanned_query": (
        (2, 12, 3, 4),
        Dims(1, (2, 3)),
        lambda x: [x[i].reshape(12, 12) for i in range(2)],
    ),
    "fused": (
        (8, 30),
        Blocks(0, 1, block_axis=1, blocks=3),
        lambda x: [x[:, :10], x[:, 10:20], x[:, 20:]],
    ),
    "grouped_query": (
        (2, 16, 32),
        Blocks(1, 2, block_axis=-1, blocks=(20, 6, 6)),
        lambda x: [m for y in x for m in (y[:, :20], y[:, 20:26], y[:, 26:])],
    ),
    "interleaved": (  # Heads of query, key and value: (embed, heads, 3 · head_dim).
        (12, 2, 15),
        Blocks(0, (1, 2), block_axis=2, blocks=3),
        lambda x: [x[:, :, i : i + 5].reshape(12, 10) for i in (0, 5, 10)],
    ),
    "fused_rows": (  # The axis that counts blocks is where theirs is, before the layers.
        (28, 2, 6),
        Blocks(0, 2, block_axis=0, blocks=(16, 12)),
        lambda x: [x[rows, i] for rows in (slice(16), slice(16, 28)) for i in range(2)],
    ),
    "equal_rows": (
        (24, 3, 8),
        Blocks(0, 2, block_axis=0, blocks=2),
        lambda x: [x[rows, i] for rows in (slice(12), slice(12, 24)) for i in range(3)],
    ),
}
BATCHES = {
    "layers": (4,),
    "experts": (2, 3),
    "middle": (3,),
    "scanned_query": (2,),
    "fused": (3,),
    "grouped_query": (2, 3),
    "interleaved": (3,),
    "fused_rows": (2, 2),
    "equal_rows": (2, 3),
}
SHAPES = {name: shape for name, (shape, _, _) in KINDS.items()} | {
    "bias": (12,),
    "gain": (),
    "embedding": (11, 6),
}
DIMENSIONS = {name: dims for name, (_, dims, _) in KINDS.items()} | {
    "bias": None,
    "gain": None,
    "embedding": None,
}


# A tall, a turned, a merged and a stacked one, blocks of several sizes, and a vector.
FEW = ("tall", "transposed", "out", "layers", "grouped_query", "bias")


def matrices(name, leaf):
    """The matrices of a leaf as float64 arrays, in the order of its batch."""
    return KINDS[name][2](np.asarray(leaf, np.float64))


def random_tree(seed, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(scale * rng.normal(size=shape), dtype)
        for name, shape in SHAPES.items()
    }


def relative_error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def some(*names):
    """A tree of a few leaves by its seed, and their dimension numbers."""

    def tree(seed, scale=1.0):
        everything = random_tree(seed, scale)
        return {name: everything[name] for name in names}

    return tree, {name: DIMENSIONS[name] for name in names}
