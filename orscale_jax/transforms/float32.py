"""A wrapper that runs a transformation in float32 or wider."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from orscale_jax.sharding import typed_sharding


def in_float32(
    inner: optax.GradientTransformation, mu_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` in float32 (float64 where a leaf is float64).

    As in Optax, updates have the dtype to which gradient, parameter and momentum promote,
    so that nothing is rounded on the way to the weights. Every state leaf keeps the dtype
    and the sharding that ``inner.init`` gave it. On Explicit axes updates are sharded
    like the parameters.

    Args:
      inner: The transformation to run.
      mu_dtype: The momentum's dtype; None: the parameter's.

    Returns:
      A transformation with the state of ``inner``.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        dtype = compute_dtype((updates, params))
        new_updates, new_state = inner.update(
            _widen(updates, dtype),
            _widen(state, dtype),
            _widen(params, dtype),
            **extra_args,
        )
        place = updates if params is None else params
        promoted = jax.tree.map(
            lambda update, param: _promoted(update, param, mu_dtype), updates, place
        )
        return _cast(new_updates, promoted, place), _cast(new_state, state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def compute_dtype(tree: Any) -> jnp.dtype:
    """The dtype of norms and ratios: float64 if any leaf is float64, else float32."""
    double = any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(tree))
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def _widen(tree: Any, dtype: jnp.dtype) -> Any:
    def widen(leaf: Any) -> Any:
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.asarray(leaf, dtype) if floating else leaf

    return jax.tree.map(widen, tree)


def _promoted(update: Any, param: Any, mu_dtype: DTypeLike | None) -> np.ndarray:
    """An empty array of the dtype that an update has."""
    dtype = jnp.promote_types(jnp.result_type(update), jnp.result_type(param))
    if mu_dtype is not None:
        dtype = jnp.promote_types(dtype, mu_dtype)
    return np.empty(0, dtype)


def _cast(tree: Any, like: Any, place: Any) -> Any:
    """Cast to the dtypes of ``like``, and reshard like ``place``."""

    def cast(leaf: jax.Array, old: Any, placed: jax.Array) -> jax.Array:
        cast = leaf.astype(jnp.result_type(old))
        return typed_sharding.shard_like(cast, jnp.asarray(placed))

    return jax.tree.map(cast, tree, like, place)
