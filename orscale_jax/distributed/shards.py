"""One device's program: its shards sent, orthogonalized and returned."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from orscale_jax.distributed.buckets import Bucket, ShardedArray
from orscale_jax.distributed.exchange import Exchange
from orscale_jax.distributed.mesh_shape import MeshShape
from orscale_jax.distributed.planner import plan_buckets
from orscale_jax.distributed.platforms import Platform
from orscale_jax.newton_schulz.arithmetic import may_transpose_squares
from orscale_jax.sharding import typed_sharding


def on_shards(
    platform: Platform,
    packed: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
    mesh: AbstractMesh,
    slices: Mapping[str, int],
    specs: Sequence[PartitionSpec],
) -> list[jax.Array]:
    """Polar factors of packed matrices whose shardings are known.

    Args:
      platform: The platform.
      packed: The matrices, as the platform packs them to be sent.
      traced: The traced settings of the iteration, replicated on every device.
      mesh: The mesh of the matrices.
      slices: The number of slices along each axis that crosses slow links.
      specs: The shardings of the matrices, and of their factors.
    """
    specs = tuple(specs)
    whole = list(map(sharded_array, packed, specs))
    # Along an axis that jax.vmap maps over, devices hold different matrices, not copies.
    mapped = typed_sharding.mapped_axes()
    sizes = {name: size for name, size in mesh.shape.items() if name not in mapped}
    shape = MeshShape(sizes, {name: slices[name] for name in slices if name in sizes})

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,
    )
    def run(shards: Any, traced: Any) -> tuple[jax.Array, ...]:
        return tuple(on_each_device(platform.with_traced(traced), shards, whole, shape))

    return list(run(tuple(packed), dict(traced)))


def on_each_device(
    platform: Platform,
    shards: Sequence[jax.Array],
    arrays: Sequence[ShardedArray],
    mesh: MeshShape,
) -> Sequence[jax.Array]:
    """Shards of polar factors, from this device's shards of packed matrices."""
    trip = Exchange(plan_exchange(platform, arrays, mesh), mesh)
    stacks = trip.send(platform.layout(shards), platform.join)
    qs = platform.polar(stacks, trip.columns)
    return platform.layout(trip.receive(qs, shards))


def plan_exchange(
    platform: Platform, arrays: Sequence[ShardedArray], mesh: MeshShape
) -> tuple[Bucket, ...]:
    """The plan of a mesh for arrays of packed matrices."""
    may_transpose = may_transpose_squares(platform.settings.preconditioning)
    arrays = [array._replace(may_transpose=may_transpose) for array in arrays]
    stack_bytes = platform.limits.stack_bytes
    return plan_buckets(arrays, mesh, stack_bytes, platform.cost_model)


def sharded_array(array: Any, spec: PartitionSpec) -> ShardedArray:
    """An array as the plan sees it."""
    rank = len(array.shape)
    return ShardedArray(array.shape, array.dtype, typed_sharding.axes_of(spec, rank))
