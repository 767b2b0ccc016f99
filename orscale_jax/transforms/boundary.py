"""The boundary between what users pass and what stages compute on.

Outside: trees whose parameters may be in boxes, of any floating dtype, some of them
without gradients. Inside: bare arrays of one dtype, and the matrices among them. A whole
optimizer crosses it once, and so does each stage that is used by itself.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from orscale_jax.distributed.horizontal_fusion import slices_of_stacks
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree, rebox, unbox
from orscale_jax.trees.checks import (
    require_fitting,
    require_shapes,
    require_state,
    where_gradients_are,
)

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
# Makes a transformation of bare arrays, given the matrices of the tree.
Stage: TypeAlias = Callable[[Matrices], optax.GradientTransformation]


def on_parameters(
    optimizer_of: Callable[[PyTree], Optimizer], mu_dtype: DTypeLike | None
) -> Optimizer:
    """The whole optimizer that ``optimizer_of(parameters)`` is for given parameters.

    It is given bare arrays in float32 (float64 if any leaf is float64), and only
    parameters that have gradients. As in Optax, updates have the dtype to which gradient,
    parameter and momentum promote, so that nothing is rounded on the way to the weights.
    Every leaf of the state keeps its dtype, its sharding and its box. On Explicit axes
    updates are sharded like the parameters.

    Args:
      optimizer_of: Makes the optimizer of bare parameters or, without them, of updates.
      mu_dtype: The momentum's dtype; None: the parameter's.
    """

    def init(params: PyTree) -> PyTree:
        return optimizer_of(unbox(params)).init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        bare, old, weights = unbox((updates, state, params))
        if weights is not None:
            weights = where_gradients_are(bare, weights)
            require_fitting(bare, weights)
        place = bare if weights is None else weights
        abstract = jax.tree.map(_abstract, place)
        require_state(old, jax.eval_shape(init, abstract), abstract)
        dtype = compute_dtype((bare, weights))
        wide, wide_state, wide_weights = (
            _widened(tree, dtype) for tree in (bare, old, weights)
        )
        optimizer = optimizer_of(wide if weights is None else wide_weights)
        new, new_state = optimizer.update(
            _together(wide), wide_state, wide_weights, **extra_args
        )
        promoted = jax.tree.map(lambda u, w: _promoted(u, w, mu_dtype), bare, place)
        new, new_state = _cast(new, promoted, place), _cast(new_state, old, old)
        return rebox(new, updates), rebox(new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def on_matrices(
    weight_dimension_numbers: WeightDimensionNumbers, stage: Stage
) -> optax.GradientTransformationExtraArgs:
    """A stage for the matrices of the trees that it is given, which hold nothing else."""

    def init(params: PyTree) -> PyTree:
        return stage(Matrices.only(weight_dimension_numbers, params)).init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        bare, old, weights = jax.tree.map(_as_jax, unbox((updates, state, params)))
        matrices = Matrices.only(weight_dimension_numbers, bare)
        if weights is not None:
            weights = where_gradients_are(bare, weights)
            require_shapes(bare, matrices.replace(bare, matrices.leaves(weights)))
        inner = stage(matrices)
        abstract = jax.tree.map(_abstract, bare if weights is None else weights)
        wanted = jax.eval_shape(inner.init, abstract)
        if jax.tree.leaves((old, wanted)):  # Of a stage without state, anything will do.
            require_state(old, wanted, abstract)
        inner = optax.with_extra_args_support(inner)
        new, new_state = inner.update(bare, old, weights, **extra_args)
        return rebox(new, updates), rebox(new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The leaf without values and sharding: JAX keeps what it traces for equal ones."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf))


def _as_jax(leaf: Any) -> Any:
    """JAX's array for a NumPy array, which may have a dtype that JAX has not."""
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def _widened(tree: PyTree, dtype: jnp.dtype) -> PyTree:
    def widened(leaf: Any) -> Any:
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.asarray(leaf, dtype) if floating else _as_jax(leaf)

    return jax.tree.map(widened, tree)


def _together(tree: PyTree) -> PyTree:
    """The same tree; on GPUs XLA computes small leaves of one shape in one kernel."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, slices_of_stacks(leaves))


def _promoted(update: Any, param: Any, mu_dtype: DTypeLike | None) -> np.ndarray:
    """An empty array of the dtype that an update has."""
    dtype = jnp.promote_types(jnp.result_type(update), jnp.result_type(param))
    if mu_dtype is not None:
        dtype = jnp.promote_types(dtype, mu_dtype)
    return np.empty(0, dtype)


def _cast(tree: PyTree, like: PyTree, place: PyTree) -> PyTree:
    """Cast to the dtypes of ``like``, and reshard like ``place``."""

    def cast(leaf: jax.Array, old: Any, placed: Any) -> jax.Array:
        cast = leaf.astype(jnp.result_type(old))
        return typed_sharding.shard_like(cast, jnp.asarray(placed))

    return jax.tree.map(cast, tree, like, place)
