"""Checks of the arguments of ``update``, before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax.trees.boxes import PyTree
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
      ValueError: If a gradient has another shape than its parameter, or is not real.
    """

    def check(path: Any, param: jax.Array, update: jax.Array) -> None:
        shape, dtype = np.shape(update), jnp.result_type(update)
        trainable = jnp.issubdtype(jnp.result_type(param), jnp.floating)
        real = jnp.issubdtype(dtype, jnp.floating)
        if shape != np.shape(param) or (trainable and not real):
            raise ValueError(
                f"the gradient of parameter {quoted(path)} has shape {shape} and dtype "
                f"{dtype}, but the parameter has shape {np.shape(param)} and dtype "
                f"{jnp.result_type(param)}: pass a real gradient of that shape."
            )

    # Trees of different structures fail later, with the error of jax.tree.map.
    structures: list[Any] = [jax.tree.structure(tree) for tree in (updates, params)]
    if structures[0] == structures[1]:
        jax.tree_util.tree_map_with_path(check, params, updates)


def where_gradients_are(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap ``inner`` so that it is given only the parameters that have gradients.

    The others may be anything, such as functions and settings among a module's fields.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        if params is not None:
            params = jax.tree.map(
                lambda update, param: None if update is None else param,
                updates,
                params,
                is_leaf=lambda node: node is None,
            )
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)
