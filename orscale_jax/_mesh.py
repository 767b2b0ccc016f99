"""Functions of what one device holds, run on all devices of the arrays' mesh."""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from orscale_jax import _named_shardings, _sharding
from orscale_jax._placement import Sharded, devices

PerDevice = Callable[..., Sequence[jax.Array]]


def mesh_of(
    arrays: Sequence[jax.Array], given: Mesh | AbstractMesh | None
) -> AbstractMesh | None:
    """The mesh that arrays are on; None where there is none, or one device without types.

    Their types name it, inside of ``jax.jit`` as well; else it is the given one, or that
    of the context. None where an axis is manual: devices go their own ways there.

    Args:
      arrays: The arrays.
      given: The mesh for arrays whose types name none.

    Raises:
      ValueError: If types name another mesh than the given one.
    """
    wanted = given.abstract_mesh if isinstance(given, Mesh) else given
    named = [jax.typeof(array).sharding.mesh for array in arrays]
    found = next(filter(_matters, named), None)
    if found is None:
        context = jax.sharding.get_abstract_mesh()
        found = wanted or (context if _matters(context) else None)
    elif wanted is not None and wanted.size > 1 and found.shape != wanted.shape:
        raise ValueError(
            f"mesh={dict(wanted.shape)}, and the arrays are on a mesh "
            f"{dict(found.shape)}: pass the mesh of the parameters, or None."
        )
    if found is None:
        return None
    if AxisType.Manual in found.axis_types:
        _refuse_mixed_with_manual(arrays, found)
        return None
    return found if _matters(found) else None


def _refuse_mixed_with_manual(arrays: Sequence[jax.Array], mesh: AbstractMesh) -> None:
    """Within shard_map, matrices may not be in pieces that only types know of."""
    for array in arrays:
        spec = jax.typeof(array).sharding.spec
        pieces = [name for names in _sharding.axes_of(spec, array.ndim) for name in names]
        if pieces:
            manual = [
                name
                for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
                if kind == AxisType.Manual
            ]
            raise ValueError(
                f"within jax.shard_map over {manual} a matrix of shape {array.shape} is "
                f"still sharded over {pieces}, which are Explicit: name these in "
                "axis_names of shard_map as well, or call the optimizer outside of it."
            )


def _matters(mesh: AbstractMesh) -> bool:
    return mesh.size > 1 or AxisType.Explicit in mesh.axis_types


def mapped_axes() -> frozenset[Any]:
    """The axes of the mesh over which ``jax.vmap`` maps here.

    They are named by its ``spmd_axis_name``, or are those of a sharded Explicit axis that
    it maps over. JAX has no public way to ask.
    """
    env = core.get_axis_env()
    return env.spmd_axis_names | env.explicit_mesh_axis_names


def is_typed(mesh: AbstractMesh) -> bool:
    """Whether all shardings are part of types."""
    return set(mesh.axis_types) == {AxisType.Explicit}


def is_auto(mesh: AbstractMesh) -> bool:
    """Whether no sharding is part of types."""
    return set(mesh.axis_types) == {AxisType.Auto}


def on_shards(
    per_device: PerDevice,
    arrays: Sequence[jax.Array],
    scalars: Mapping[str, jax.Array],
    mesh: AbstractMesh,
    specs: Sequence[PartitionSpec] | None,
) -> list[jax.Array]:
    """Arrays of the shapes, dtypes and shardings of the given ones.

    On Auto axes shardings may be known to the partitioner alone, which then calls back
    for the program of one device.

    Args:
      per_device: ``per_device(shards, whole, sizes, **scalars)`` makes shards of the same
        shapes. ``whole`` holds a :class:`Sharded` for each, ``sizes`` the lengths of the
        mesh's axes. It must not close over traced values.
      arrays: What it is given the shards of.
      scalars: Traced values that every device has.
      mesh: The mesh of the arrays.
      specs: How they are sharded, if that is known.
    """
    if specs is not None:
        return _on_known_shards(per_device, arrays, scalars, mesh, tuple(specs))
    count = len(arrays)
    call = _transformable(_partitioned(per_device, count, tuple(scalars), mesh), count)
    operands = (*arrays, *scalars.values())
    if AxisType.Explicit not in mesh.axis_types:
        return list(call(*operands))
    specs = tuple(jax.typeof(array).sharding.spec for array in arrays)
    # All axes are Auto in there if the context has the mesh, and not if types alone do.
    with jax.sharding.use_abstract_mesh(mesh):
        return list(jax.sharding.auto_axes(call, out_sharding=specs)(*operands))


def spread(
    fn: Callable[[jax.Array], jax.Array], mesh: AbstractMesh, x: jax.Array
) -> jax.Array:
    """``fn`` of matrices, as many on each device, put there by the partitioner.

    Args:
      fn: Keeps the shape ``(k, m, n)``, treats each matrix alone, and keeps zeros.
      mesh: The mesh, over whose Auto axes they are spread.
      x: Shape ``(m, n)`` or ``(k, m, n)``.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    apart = mapped_axes()
    axes = tuple(
        name for name, kind in kinds if kind == AxisType.Auto and name not in apart
    )
    count = math.prod(x.shape[:-2])
    missing = -count % devices(axes, mesh.shape)
    stack = jnp.pad(x.reshape(count, *x.shape[-2:]), [(0, missing), (0, 0), (0, 0)])
    # By way of rows over all devices, or the partitioner goes by way of whole stacks.
    by_rows = NamedSharding(mesh, PartitionSpec(None, axes))
    by_matrices = NamedSharding(mesh, PartitionSpec(axes))
    for sharding in (by_rows, by_matrices):
        stack = jax.lax.with_sharding_constraint(stack, sharding)
    result = fn(stack)
    for sharding in (by_matrices, by_rows):
        result = jax.lax.with_sharding_constraint(result, sharding)
    return result[:count].reshape(x.shape)


def _on_known_shards(
    per_device: PerDevice,
    arrays: Sequence[jax.Array],
    scalars: Mapping[str, jax.Array],
    mesh: AbstractMesh,
    specs: tuple[PartitionSpec, ...],
) -> list[jax.Array]:
    whole = list(map(_sharded, arrays, specs))

    # Along an axis that jax.vmap maps over, devices hold different matrices, not copies.
    apart = mapped_axes()
    sizes = {name: size for name, size in mesh.shape.items() if name not in apart}

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,
    )
    def mapped(shards: Any, scalars: Any) -> tuple[jax.Array, ...]:
        return tuple(per_device(shards, whole, sizes, **scalars))

    return list(mapped(tuple(arrays), dict(scalars)))


def _partitioned(
    per_device: PerDevice, count: int, names: tuple[str, ...], abstract: AbstractMesh
) -> custom_partitioning:
    """Of ``count`` arrays, the named scalars, and what else there is."""

    def call(operands: Any, whole: Any, sizes: Mapping[str, int]) -> Any:
        scalars = dict(zip(names, operands[count:], strict=False))
        return tuple(per_device(operands[:count], whole, sizes, **scalars))

    @custom_partitioning
    def operation(*operands: jax.Array) -> tuple[jax.Array, ...]:
        whole = [_sharded(array, PartitionSpec()) for array in operands[:count]]
        return call(operands, whole, {})

    def partition(mesh: Mesh, operands: Any, _: Any) -> Any:
        if mesh.empty:  # Of arrays that are nowhere yet JAX has the devices alone.
            mesh = _named_shardings.mesh_of_devices(operands[0], abstract)
        mesh, shardings = _named_shardings.named(operands[:count], mesh)
        whole = [
            _sharded(array, sharding.spec)
            for array, sharding in zip(operands, shardings, strict=False)
        ]
        everywhere = (NamedSharding(mesh, PartitionSpec()),) * (len(operands) - count)

        def lowered(*operands: jax.Array) -> tuple[jax.Array, ...]:
            # The mesh of the context is not that of one device's program.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return call(operands, whole, mesh.shape)

        return mesh, lowered, shardings, shardings + everywhere

    # Not what decoding makes of shardings: it fails where they are by parts of axes.
    operation.def_partition(
        partition, sharding_rule=_same_shardings, decode_shardings=False
    )
    return operation


def _transformable(
    operation: custom_partitioning, count: int
) -> Callable[..., tuple[jax.Array, ...]]:
    """With rules that partitioned operations lack: to be mapped and differentiated."""
    whole = operation.fun

    @jax.custom_batching.custom_vmap
    def mapped(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return operation(*operands, _fingerprint(whole, operands))

    @mapped.def_vmap
    def _(axis_size: int, batched: Any, *operands: jax.Array) -> Any:
        # One more axis that counts matrices, if it is of all arrays and nothing else.
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
    """Numbers that tell programs apart whose partitioned operations do different things.

    A persistent cache of compiled programs sees of such an operation its operands, and a
    pointer that ``jax_remove_custom_partitioning_ptr_from_cache_key`` takes away.
    """
    jaxpr = jax.make_jaxpr(fn)(*map(jax.typeof, operands))
    digest = hashlib.sha256(str(jaxpr).encode()).digest()
    return jnp.asarray(np.frombuffer(digest, np.uint32))


def _same_shardings(_: Any, operands: Sequence[Any], results: Sequence[Any]) -> str:
    """Every result as its operand, in the notation of Shardy's rules."""
    factors = [
        " ".join(f"x{index}y{axis}" for axis in range(len(operand.shape)))
        for index, operand in enumerate(operands)
    ]
    return f"{', '.join(factors)} -> {', '.join(factors[: len(results)])}"


def _sharded(array: Any, spec: PartitionSpec) -> Sharded:
    return Sharded(array.shape, array.dtype, _sharding.axes_of(spec, len(array.shape)))
