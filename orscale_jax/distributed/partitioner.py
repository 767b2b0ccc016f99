"""Arrays on Auto axes whose shardings only XLA's partitioner knows."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from orscale_jax.distributed import lowering, named_shardings
from orscale_jax.distributed.mesh_shape import (
    MeshShape,
    slices_of_axes,
    slices_of_devices,
)
from orscale_jax.distributed.platforms import Platform
from orscale_jax.distributed.shards import on_each_device, sharded_array
from orscale_jax.distributed.slow_links import slice_of_each
from orscale_jax.distributed.spreading import spread_out


def on_unknown_shards(
    platform: Platform,
    packed: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
    mesh: AbstractMesh,
    slices: Mapping[str, int] | None,
) -> list[jax.Array]:
    """Polar factors of packed matrices, by the shards that the partitioner chooses.

    The partitioner calls back for the program of one device. Exported programs cannot
    call back, and some compilers do not: there, the partitioner spreads whole arrays. So
    it does for arrays of 64 bits: the thread that calls back knows nothing of
    ``with jax.enable_x64(True)``.

    Args:
      platform: The platform.
      packed: The matrices, as the platform packs them to be sent.
      traced: The traced settings of the iteration, replicated on every device.
      mesh: The mesh of the matrices.
      slices: The number of slices along each axis that crosses slow links; None to ask
        the devices of the partitioner's mesh.

    Returns:
      Arrays of the shapes, dtypes and shardings of ``packed``.
    """
    of_64_bits = any(x.dtype.itemsize == 8 for x in (*packed, *traced.values()))
    if of_64_bits or not platform.partitioner_calls_back:
        return spread_out(platform.with_traced(traced), packed, mesh, slices or {})
    count, names = len(packed), tuple(traced)
    auto = AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )

    def exported(*operands: jax.Array) -> Sequence[jax.Array]:
        traced = dict(zip(names, operands[count:], strict=False))
        with jax.sharding.use_abstract_mesh(auto):
            on_traced = platform.with_traced(traced)
            return spread_out(on_traced, operands[:count], auto, slices or {})

    declared = None if slices is None else slices_of_devices(mesh.shape, slices)
    operation = _partitioned(platform, count, names, declared)
    call = _transformable(operation, exported, auto, count, declared)
    operands = (*packed, *traced.values())
    if AxisType.Explicit not in mesh.axis_types:
        return list(call(*operands))
    specs = tuple(jax.typeof(array).sharding.spec for array in packed)
    # auto_axes makes all axes Auto if the context has the mesh, not if types alone do.
    with jax.sharding.use_abstract_mesh(mesh):
        return list(jax.sharding.auto_axes(call, out_sharding=specs)(*operands))


def _partitioned(
    platform: Platform,
    count: int,
    names: tuple[str, ...],
    slice_of: np.ndarray | None,
) -> custom_partitioning:
    """The partitioned operation of ``count`` arrays, named scalars, and a fingerprint."""

    def call(operands: Any, whole: Any, shape: MeshShape) -> Any:
        traced = dict(zip(names, operands[count:], strict=False))
        shards = operands[:count]
        return tuple(on_each_device(platform.with_traced(traced), shards, whole, shape))

    @custom_partitioning
    def operation(*operands: jax.Array) -> tuple[jax.Array, ...]:
        whole = [sharded_array(array, PartitionSpec()) for array in operands[:count]]
        return call(operands, whole, MeshShape({}))

    def partition(mesh: Mesh, operands: Any, _: Any) -> Any:
        mesh, shardings = named_shardings.named(operands[:count], mesh)
        whole = [
            sharded_array(array, sharding.spec)
            for array, sharding in zip(operands, shardings, strict=False)
        ]
        shape = MeshShape(mesh.shape, _slices(mesh, slice_of))
        everywhere = (NamedSharding(mesh, PartitionSpec()),) * (len(operands) - count)

        def lowered(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # One device's program is on no mesh, whatever the context.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return call(operands, whole, shape)

        return mesh, lowered, shardings, shardings + everywhere

    # Decoding shardings fails where an array axis is sharded over part of a mesh axis.
    operation.def_partition(
        partition, sharding_rule=_same_shardings, decode_shardings=False
    )
    return operation


def _slices(mesh: Mesh, declared: np.ndarray | None) -> dict[str, int]:
    """The slices along the axes of the partitioner's mesh, which may be split axes."""
    if declared is None or declared.size != mesh.size:
        slice_of = slice_of_each(mesh)
    else:
        slice_of = declared.reshape(mesh.devices.shape)
    return slices_of_axes(mesh.axis_names, slice_of)


def _transformable(
    operation: custom_partitioning,
    exported: lowering.Function,
    mesh: AbstractMesh,
    count: int,
    slice_of: np.ndarray | None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Add the rules that partitioned operations lack, for vmap and differentiation."""
    whole = operation.fun

    @jax.custom_batching.custom_vmap
    def mapped(*operands: jax.Array) -> tuple[jax.Array, ...]:
        operands = (*operands, _fingerprint(whole, operands, slice_of))
        return lowering.partitioned(operands, mesh, operation, exported, count)

    @mapped.def_vmap
    def _(axis_size: int, batched: Any, *operands: jax.Array) -> Any:
        # An axis that all arrays have, and no scalar, is one more batch axis.
        if any(batched[count:]) or not all(batched[:count]):
            axes = [0 if is_batched else None for is_batched in batched]
            return jax.vmap(whole, in_axes=axes)(*operands), (True,) * count
        return mapped(*operands), (True,) * count

    @jax.custom_jvp
    def differentiable(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return mapped(*operands)

    @differentiable.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        _, tangents = jax.jvp(whole, primals, tangents)
        return differentiable(*primals), tangents

    return differentiable


def _fingerprint(
    fn: Callable[..., Any], operands: Sequence[jax.Array], slice_of: np.ndarray | None
) -> jax.Array:
    """An operand that differs between programs whose partitioned operations differ.

    The key of JAX's persistent compilation cache has only the operands of such an
    operation, and a pointer that ``jax_remove_custom_partitioning_ptr_from_cache_key``
    removes.
    """
    jaxpr = jax.make_jaxpr(fn)(*map(jax.typeof, operands))
    declared = "" if slice_of is None else str(slice_of.tolist())
    digest = hashlib.sha256(f"{jaxpr}{declared}".encode()).digest()
    return jnp.asarray(np.frombuffer(digest, np.uint32))


def _same_shardings(_: Any, operands: Sequence[Any], results: Sequence[Any]) -> str:
    """Shard every result as its operand, in the notation of Shardy's rules."""
    factors = [
        " ".join(f"x{index}y{axis}" for axis in range(len(operand.shape)))
        for index, operand in enumerate(operands)
    ]
    return f"{', '.join(factors)} -> {', '.join(factors[: len(results)])}"
