"""Arrays on Auto axes whose shardings only XLA's partitioner knows."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from orscale_jax.distributed import lowering, named_shardings
from orscale_jax.distributed.buckets import count_devices
from orscale_jax.distributed.shards import PerDevice, sharded_array
from orscale_jax.sharding import meshes

# spread_out(mesh, arrays, scalars) returns results of the arrays' shapes.
SpreadOut: TypeAlias = Callable[
    [AbstractMesh, Sequence[jax.Array], Mapping[str, jax.Array]], Sequence[jax.Array]
]


def on_unknown_shards(
    per_device: PerDevice,
    spread_out: SpreadOut,
    arrays: Sequence[jax.Array],
    scalars: Mapping[str, jax.Array],
    mesh: AbstractMesh,
) -> list[jax.Array]:
    """Apply a function to the shards that the partitioner chooses.

    The partitioner calls back for the program of one device.

    Args:
      per_device: The function of one device. It must not close over traced values.
      spread_out: The same function of whole arrays on a mesh of Auto axes, for exported
        programs, which cannot call back. It must not close over traced values either.
      arrays: The arrays.
      scalars: Traced values, replicated on every device.
      mesh: The mesh of the arrays.

    Returns:
      Arrays of the shapes, dtypes and shardings of ``arrays``.
    """
    count, names = len(arrays), tuple(scalars)
    auto = AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )

    def exported(*operands: jax.Array) -> Sequence[jax.Array]:
        scalars = dict(zip(names, operands[count:], strict=False))
        with jax.sharding.use_abstract_mesh(auto):
            return spread_out(auto, operands[:count], scalars)

    operation = _partitioned(per_device, count, names)
    call = _transformable(operation, exported, auto, count)
    operands = (*arrays, *scalars.values())
    if AxisType.Explicit not in mesh.axis_types:
        return list(call(*operands))
    specs = tuple(jax.typeof(array).sharding.spec for array in arrays)
    # auto_axes makes all axes Auto if the context has the mesh, not if types alone do.
    with jax.sharding.use_abstract_mesh(mesh):
        return list(jax.sharding.auto_axes(call, out_sharding=specs)(*operands))


def spread(
    fn: Callable[[jax.Array], jax.Array], mesh: AbstractMesh, x: jax.Array
) -> jax.Array:
    """Apply ``fn`` to matrices that the partitioner spreads evenly over the devices.

    Args:
      fn: A function that keeps the shape ``(k, m, n)``, treats each matrix separately,
        and maps 0 to 0.
      mesh: The mesh over whose Auto axes to spread them.
      x: Shape ``(m, n)`` or ``(k, m, n)``.
    """
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    mapped = meshes.mapped_axes()
    axes = tuple(
        name for name, kind in types if kind == AxisType.Auto and name not in mapped
    )
    count = math.prod(x.shape[:-2])
    missing = -count % count_devices(axes, mesh.shape)
    stack = jnp.pad(x.reshape(count, *x.shape[-2:]), [(0, missing), (0, 0), (0, 0)])
    # First by rows: the partitioner would otherwise replicate whole stacks.
    by_rows = NamedSharding(mesh, PartitionSpec(None, axes))
    by_matrices = NamedSharding(mesh, PartitionSpec(axes))
    for sharding in (by_rows, by_matrices):
        stack = jax.lax.with_sharding_constraint(stack, sharding)
    result = fn(stack)
    for sharding in (by_matrices, by_rows):
        result = jax.lax.with_sharding_constraint(result, sharding)
    return result[:count].reshape(x.shape)


def _partitioned(
    per_device: PerDevice, count: int, names: tuple[str, ...]
) -> custom_partitioning:
    """The partitioned operation of ``count`` arrays, named scalars, and a fingerprint."""

    def call(operands: Any, whole: Any, sizes: Mapping[str, int]) -> Any:
        scalars = dict(zip(names, operands[count:], strict=False))
        return tuple(per_device(operands[:count], whole, sizes, **scalars))

    @custom_partitioning
    def operation(*operands: jax.Array) -> tuple[jax.Array, ...]:
        whole = [sharded_array(array, PartitionSpec()) for array in operands[:count]]
        return call(operands, whole, {})

    def partition(mesh: Mesh, operands: Any, _: Any) -> Any:
        mesh, shardings = named_shardings.named(operands[:count], mesh)
        whole = [
            sharded_array(array, sharding.spec)
            for array, sharding in zip(operands, shardings, strict=False)
        ]
        everywhere = (NamedSharding(mesh, PartitionSpec()),) * (len(operands) - count)

        def lowered(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # One device's program is on no mesh, whatever the context.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return call(operands, whole, mesh.shape)

        return mesh, lowered, shardings, shardings + everywhere

    # Decoding shardings fails where an array axis is sharded over part of a mesh axis.
    operation.def_partition(
        partition, sharding_rule=_same_shardings, decode_shardings=False
    )
    return operation


def _transformable(
    operation: custom_partitioning,
    exported: lowering.Function,
    mesh: AbstractMesh,
    count: int,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Add the rules that partitioned operations lack, for vmap and differentiation."""
    whole = operation.fun

    @jax.custom_batching.custom_vmap
    def mapped(*operands: jax.Array) -> tuple[jax.Array, ...]:
        operands = (*operands, _fingerprint(whole, operands))
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


def _fingerprint(fn: Callable[..., Any], operands: Sequence[jax.Array]) -> jax.Array:
    """An operand that differs between programs whose partitioned operations differ.

    The key of JAX's persistent compilation cache has only the operands of such an
    operation, and a pointer that ``jax_remove_custom_partitioning_ptr_from_cache_key``
    removes.
    """
    jaxpr = jax.make_jaxpr(fn)(*map(jax.typeof, operands))
    digest = hashlib.sha256(str(jaxpr).encode()).digest()
    return jnp.asarray(np.frombuffer(digest, np.uint32))


def _same_shardings(_: Any, operands: Sequence[Any], results: Sequence[Any]) -> str:
    """Shard every result as its operand, in the notation of Shardy's rules."""
    factors = [
        " ".join(f"x{index}y{axis}" for axis in range(len(operand.shape)))
        for index, operand in enumerate(operands)
    ]
    return f"{', '.join(factors)} -> {', '.join(factors[: len(results)])}"
