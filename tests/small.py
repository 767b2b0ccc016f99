"""A tree of a matrix, a stack of three matrices and a bias."""

import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers as Dims

SHAPES = {"w": (6, 4), "stack": (3, 4, 5), "b": (4,)}
NUMBERS = {"w": Dims(0, 1), "stack": Dims(1, 2), "b": None}


def tree(seed, dtype=jnp.float32, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {key: jnp.asarray(rng.normal(size=s), dtype) for key, s in shapes.items()}
