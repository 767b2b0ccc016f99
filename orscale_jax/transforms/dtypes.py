"""The dtype in which norms and ratios are computed."""

from typing import Any

import jax
import jax.numpy as jnp


def compute_dtype(tree: Any) -> jnp.dtype:
    """The dtype of norms and ratios: float64 if any leaf is float64, else float32."""
    double = any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(tree))
    return jnp.dtype(jnp.float64 if double else jnp.float32)
