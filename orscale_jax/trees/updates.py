"""Checks of the arguments of ``update``, before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.differences import first_difference
from orscale_jax.trees.names import quoted


def require_params(params: PyTree | None) -> None:
    """Refuse an ``update`` without parameters.

    Raises:
      ValueError: If ``params`` is None.
    """
    if params is None:
        raise ValueError(
            "You are using a transformation that requires the current value of "
            "parameters, but you are not passing `params` when calling `update`: call "
            "optimizer.update(updates, state, params)."
        )


def require_fitting(updates: PyTree, params: PyTree) -> None:
    """Refuse gradients that would be broadcast or cast to fit their parameters.

    Raises:
      ValueError: If a gradient is missing or surplus, has another shape than its
        parameter, or is not real.
    """

    def check(path: Any, param: jax.Array, update: jax.Array) -> None:
        shape, dtype, own = np.shape(update), _dtype(update), _dtype(param)
        trainable = jnp.issubdtype(own, jnp.floating)
        is_key = jnp.issubdtype(own, jax.dtypes.extended)
        unfit = trainable and not (
            jnp.issubdtype(dtype, jnp.floating) and _promotes(dtype, own)
        )
        if shape != np.shape(param) or unfit or is_key or dtype == jax.dtypes.float0:
            raise ValueError(
                f"the gradient of parameter {quoted(path)} has shape {shape} and dtype "
                f"{dtype}, but the parameter has shape {np.shape(param)} and dtype "
                f"{own}: pass a real gradient of that shape, of a dtype that JAX "
                "promotes to the parameter's, and parameters of at least 16 bits."
            )

    structures: list[Any] = [jax.tree.structure(tree) for tree in (params, updates)]
    same = structures[0] == structures[1]
    difference = None if same else first_difference(params, updates)
    if difference is not None:
        raise ValueError(
            "the gradients do not fit the parameters: "
            f"{difference.in_words('the parameters', 'the gradients')}. Call "
            "optimizer.update(gradients, state, parameters) with trees of one structure."
        )
    jax.tree.map_with_path(check, params, updates)


def require_shapes(updates: PyTree, params: PyTree | None) -> None:
    """Refuse updates that a stage would broadcast to fit their parameters.

    Raises:
      ValueError: If ``params`` is None, or an update and its parameter differ in shape.
    """

    def check(path: Any, update: Any, param: Any) -> None:
        if np.shape(update) != np.shape(param):
            raise ValueError(
                f"the update of parameter {quoted(path)} has shape {np.shape(update)}, "
                f"but the parameter has shape {np.shape(param)}: pass one of that shape."
            )

    require_params(params)
    bare, weights = unbox((updates, params))
    jax.tree.map_with_path(check, bare, where_gradients_are(bare, weights))


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None) or jnp.result_type(leaf)


def _promotes(dtype: Any, own: Any) -> bool:
    """Whether JAX has a dtype for both: it has none for 8 bits and others."""
    try:
        return jnp.finfo(jnp.promote_types(dtype, own)).bits >= 16
    except ValueError:
        return False


def where_gradients_are(updates: PyTree, params: PyTree) -> PyTree:
    """The parameters without those that have no gradients.

    These may be anything, such as functions and settings among a module's fields.
    """
    try:
        return jax.tree.map(
            lambda update, param: None if update is None else param,
            updates,
            params,
            is_leaf=lambda update: update is None,
        )
    except ValueError:
        return params  # Of another structure: require_fitting names the difference.
