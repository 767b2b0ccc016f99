"""Functions of one device's shards, run on all devices by ``jax.shard_map``."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from orscale_jax.distributed.buckets import ShardedArray
from orscale_jax.sharding import meshes, typed_sharding

# per_device(shards, arrays, mesh_shape, **scalars) returns results of the shards' shapes.
# It is also given the whole arrays as the plan sees them, and the lengths of mesh axes.
PerDevice: TypeAlias = Callable[..., Sequence[jax.Array]]


def on_shards(
    per_device: PerDevice,
    arrays: Sequence[jax.Array],
    scalars: Mapping[str, jax.Array],
    mesh: AbstractMesh,
    specs: Sequence[PartitionSpec],
) -> list[jax.Array]:
    """Apply a function to the shards of arrays whose shardings are known.

    Args:
      per_device: The function of one device.
      arrays: The arrays.
      scalars: Traced values, replicated on every device.
      mesh: The mesh of the arrays.
      specs: The shardings of the arrays, and of the results.

    Returns:
      Arrays of the shapes and dtypes of ``arrays``.
    """
    specs = tuple(specs)
    whole = list(map(sharded_array, arrays, specs))
    # Along an axis that jax.vmap maps over, devices hold different matrices, not copies.
    mapped = meshes.mapped_axes()
    mesh_shape = {name: size for name, size in mesh.shape.items() if name not in mapped}

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,
    )
    def run(shards: Any, scalars: Any) -> tuple[jax.Array, ...]:
        return tuple(per_device(shards, whole, mesh_shape, **scalars))

    return list(run(tuple(arrays), dict(scalars)))


def sharded_array(array: Any, spec: PartitionSpec) -> ShardedArray:
    """An array as the plan sees it."""
    rank = len(array.shape)
    return ShardedArray(array.shape, array.dtype, typed_sharding.axes_of(spec, rank))
