"""The shardings of an optimizer's state, from those of the parameters."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import name_and_shape


def state_shardings(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """The shardings of an optimizer's whole state, derived from the parameters'.

    Arrays shaped like a parameter (momentum, moments) are sharded like it. Arrays of
    :func:`orscale` with one entry per matrix are sharded like the parameter's batch axes.
    Counts and other scalars are replicated. This works for Optax optimizers that make
    their state from the parameters: ``init`` is traced on a mesh of Explicit axes, where
    JAX itself propagates the shardings. Nothing is computed.

    Args:
      optimizer: The optimizer.
      params: The parameters: arrays, or :class:`jax.ShapeDtypeStruct` with shardings.
        Those with a :class:`jax.sharding.NamedSharding` are all on one mesh; the others
        are replicated.

    Returns:
      A tree like ``optimizer.init(params)`` of :class:`jax.sharding.NamedSharding`, for
      ``jax.jit(optimizer.init, out_shardings=...)``, ``jax.device_put``, or the abstract
      state that a checkpoint is restored into. ``jax.tree.map(lambda s: s.spec, ...)``
      gives partition specs. On Auto axes, give them to the training step, too, with those
      of the parameters (``out_shardings``): where the two differ, as in ZeRO-1, the
      partitioner otherwise returns updates and parameters sharded like the state.

    Raises:
      ValueError: If no parameter has a NamedSharding, or they are on different meshes.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> from optax.contrib import MuonDimensionNumbers
      >>> from orscale_jax import orscale, state_shardings
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> spec = P("data", None, "model")
      >>> experts = jax.ShapeDtypeStruct(
      ...     (8, 16, 32), jnp.float32, sharding=NamedSharding(mesh, spec)
      ... )
      >>> optimizer = orscale(1e-3, weight_dimension_numbers=MuonDimensionNumbers(1, 2))
      >>> shardings = state_shardings(optimizer, {"experts": experts})
      >>> tuple(optax.tree.get(shardings, "trace")["experts"].spec)
      ('data', None, 'model')
      >>> tuple(optax.tree.get(shardings, "trust_ratio")["experts"].spec)
      ('data',)
    """
    mesh = _mesh(params)
    specs = typed_sharding.inferred(optimizer.init, params, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _mesh(params: PyTree) -> Any:
    """The one mesh of all shardings that have one."""
    meshes: dict[Any, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            meshes.setdefault(sharding.mesh, name_and_shape(path, leaf))
    if not meshes:
        raise ValueError(
            "no parameter has a jax.sharding.NamedSharding: pass params that are placed "
            "on a mesh, or jax.ShapeDtypeStruct(shape, dtype, sharding=...) for them."
        )
    if len(meshes) > 1:
        raise ValueError(
            f"parameters are on different meshes: {' and '.join(meshes.values())}: "
            "place all of them on one."
        )
    return next(iter(meshes))
