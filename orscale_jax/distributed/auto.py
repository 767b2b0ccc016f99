"""Arrays on Auto axes whose shardings only XLA's partitioner knows.

The partitioner calls back for the program of one device, with the shardings that it has
chosen, by the names of a mesh's axes. Where it cannot (libtpu's does not, and exported
programs may not call back into Python), it spreads stacks of whole matrices itself.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from orscale_jax.distributed.exchange import on_each_device, sharded_array
from orscale_jax.distributed.plan import (
    MeshAxes,
    MeshShape,
    count_devices,
    slices_of_axes,
    slices_of_devices,
)
from orscale_jax.distributed.platforms import Platform
from orscale_jax.distributed.slow_links import slice_of_each
from orscale_jax.distributed.stacks import StackKey, plan_stacks, stack, unstack
from orscale_jax.newton_schulz.polar import newton_schulz
from orscale_jax.sharding import typed_sharding

# Arrays to arrays; the first results have the types of the first operands.
Function: TypeAlias = Callable[..., Sequence[jax.Array]]


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
        mesh, shardings = named(operands[:count], mesh)
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
    exported: Function,
    mesh: AbstractMesh,
    count: int,
    slice_of: np.ndarray | None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Add the rules that partitioned operations lack, for vmap and differentiation."""
    whole = operation.fun

    @jax.custom_batching.custom_vmap
    def mapped(*operands: jax.Array) -> tuple[jax.Array, ...]:
        operands = (*operands, _fingerprint(whole, operands, slice_of))
        return _partitioned_unless_exported(operands, mesh, operation, exported, count)

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


def named(arrays: Sequence[Any], mesh: Mesh) -> tuple[Mesh, tuple[NamedSharding, ...]]:
    """The partitioner's choices, on the mesh or on one with its axes split into factors.

    Where 64 columns over 4 devices become (2, 32), the partitioner shards each of the two
    axes over 2 of the 4 devices, which no axis of the mesh describes.
    """

    def axes_of_all(mesh: Mesh) -> list[tuple[MeshAxes | None, ...]]:
        return [axes_on(mesh, array.sharding, len(array.shape)) for array in arrays]

    axes_of_arrays = axes_of_all(mesh)
    if any(None in axes for axes in axes_of_arrays):
        mesh = in_prime_axes(mesh)
        axes_of_arrays = axes_of_all(mesh)
    return mesh, tuple(
        _even(array.shape, axes, mesh)
        for array, axes in zip(arrays, axes_of_arrays, strict=True)
    )


@functools.lru_cache(maxsize=256)
def axes_on(mesh: Mesh, sharding: Sharding, rank: int) -> tuple[MeshAxes | None, ...]:
    """For each axis of an array, the mesh axes over which it is sharded, or None."""
    length = mesh.size  # Every sharding divides this length.
    indices = sharding.devices_indices_map((length,) * rank)
    starts = np.array(
        [[index.start or 0 for index in indices[device]] for device in mesh.devices.flat]
    ).reshape(*mesh.devices.shape, rank)
    places = np.indices(mesh.devices.shape)

    def axes_of(starts: np.ndarray) -> MeshAxes | None:
        # The larger the step between neighbours along a mesh axis, the more major it is.
        steps = [np.diff(starts, axis=i).max(initial=0) for i in range(starts.ndim)]
        order = [i for i in np.argsort(steps, stable=True)[::-1] if steps[i]]
        expected, each = np.zeros_like(starts), length
        for i in order:
            each //= starts.shape[i]
            expected = expected + each * places[i]
        named = tuple(mesh.axis_names[i] for i in order)
        return named if np.array_equal(starts, expected) else None

    return tuple(axes_of(starts[..., axis]) for axis in range(rank))


def in_prime_axes(mesh: Mesh) -> Mesh:
    """The mesh with axes of prime lengths, so that parts of its axes have names."""
    lengths = {
        f"{name}.{place}": prime
        for name, size in mesh.shape.items()
        for place, prime in enumerate(primes(size))
    }
    return Mesh(mesh.devices.reshape(*lengths.values()), tuple(lengths))


def primes(number: int) -> list[int]:
    """The prime factors of a number, ascending."""
    smallest = next((k for k in range(2, number) if number % k == 0), number)
    return [number] if smallest == number else [smallest, *primes(number // smallest)]


def _even(
    shape: Sequence[int], axes: Sequence[MeshAxes | None], mesh: Mesh
) -> NamedSharding:
    """The sharding without axes that would need padding, or that have no name."""
    spec = [
        names if names and size % count_devices(names, mesh.shape) == 0 else None
        for size, names in zip(shape, axes, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def spread_out(
    platform: Platform,
    packed: Sequence[jax.Array],
    mesh: AbstractMesh,
    slices: Mapping[str, int],
) -> list[jax.Array]:
    """Polar factors of packed matrices: stacks are spread, batches stay as they are.

    The sharding of a batch is unknown, and may be the right one: experts by expert.
    Stacks are not spread along axes that only lead to other slices.
    """
    if platform.normalizes == "matrix":  # A loop over matrices would gather each of them.
        packed = platform.normalized(packed)
    whole = [typed_sharding.gather(x, (x.ndim - 2, x.ndim - 1)) for x in packed]
    single = [i for i, x in enumerate(whole) if x.ndim == 2]
    batches = [i for i, x in enumerate(whole) if x.ndim > 2]
    mapped = typed_sharding.mapped_axes()
    axes = tuple(
        name
        for name in mesh.auto_axes
        if name not in mapped and slices.get(name, 1) < mesh.shape[name]
    )
    of_single = _of_single(platform, [whole[i] for i in single], mesh, axes)
    of_batches = _of_batches(platform, [whole[i] for i in batches])
    qs = dict(zip(single + batches, of_single + of_batches, strict=True))
    return [typed_sharding.shard_like(qs[i], x) for i, x in enumerate(packed)]


def _of_single(
    platform: Platform,
    xs: Sequence[jax.Array],
    mesh: AbstractMesh,
    axes: tuple[str, ...],
) -> list[jax.Array]:
    """Polar factors of arrays that are one matrix each, spread along axes of a mesh."""
    limits = platform.limits
    devices = count_devices(axes, mesh.shape)
    nbytes = min(limits.stack_bytes, limits.chunk_bytes) * devices
    plan = plan_stacks([StackKey.of(x) for x in xs], nbytes)
    results = []
    for stacked in stack(xs, plan):
        [q] = newton_schulz([_spread(stacked, mesh, axes)], platform.iteration)
        results.append(_collect(q, mesh, axes, stacked.shape))
    return unstack(results, plan, xs)


def _of_batches(platform: Platform, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Polar factors of arrays with batch axes."""
    plan = plan_stacks([StackKey.of(x) for x in xs], platform.limits.stack_bytes)
    results = [newton_schulz([x], platform.iteration)[0] for x in stack(xs, plan)]
    return unstack(results, plan, xs)


def _spread(x: jax.Array, mesh: AbstractMesh, axes: tuple[str, ...]) -> jax.Array:
    """Matrices ``(m, n)`` or ``(k, m, n)``, evenly over the devices, padded by zeros."""
    by_rows, by_matrices = _shardings(mesh, axes)
    count = math.prod(x.shape[:-2])
    missing = -count % count_devices(axes, mesh.shape)
    padded = jnp.pad(x.reshape(count, *x.shape[-2:]), [(0, missing), (0, 0), (0, 0)])
    # First by rows: the partitioner would otherwise replicate whole stacks.
    rows = jax.lax.with_sharding_constraint(padded, by_rows)
    return jax.lax.with_sharding_constraint(rows, by_matrices)


def _collect(
    stacked: jax.Array,
    mesh: AbstractMesh,
    axes: tuple[str, ...],
    shape: Sequence[int],
) -> jax.Array:
    """Invert :func:`_spread`."""
    by_rows, by_matrices = _shardings(mesh, axes)
    matrices = jax.lax.with_sharding_constraint(stacked, by_matrices)
    rows = jax.lax.with_sharding_constraint(matrices, by_rows)
    return rows[: math.prod(shape[:-2])].reshape(shape)


def _shardings(
    mesh: AbstractMesh, axes: tuple[str, ...]
) -> tuple[NamedSharding, NamedSharding]:
    """By rows, and by matrices, over axes of the mesh."""
    by_rows, by_matrices = PartitionSpec(None, axes), PartitionSpec(axes)
    return NamedSharding(mesh, by_rows), NamedSharding(mesh, by_matrices)


_choice_p = Primitive("partitioned_unless_exported")
_choice_p.multiple_results = True


def _partitioned_unless_exported(
    operands: Sequence[jax.Array],
    mesh: AbstractMesh,
    operation: Function,
    exported: Function,
    results: int,
) -> tuple[jax.Array, ...]:
    """Apply an operation that calls back for the program of one device.

    It is lowered for devices, but their number alone enters its program. JAX, if it knew
    of the operation, would refuse programs with several meshes over the same devices.

    Args:
      operands: The operands.
      mesh: The mesh that they are on.
      operation: A function made by ``jax.experimental.custom_partitioning``.
      exported: The same function for programs that are exported, or lowered for more
        devices than there are.
      results: The number of results, of the types of the first operands.
    """
    chosen = {"mesh": mesh, "operation": operation, "exported": exported}
    return tuple(_choice_p.bind(*operands, **chosen, results=results))


def _lower_choice(
    ctx: Any,
    *operands: Any,
    mesh: AbstractMesh,
    operation: Function,
    exported: Function,
    results: int,
) -> Any:
    on_devices = (
        None
        if bool(ctx.module_context.lowering_parameters.for_export)
        else _on_devices(ctx, mesh)
    )
    if on_devices is None:
        return mlir.lower_fun(exported)(ctx, *operands)
    return mlir.lower_fun(operation)(on_devices, *operands)


def _on_devices(ctx: Any, mesh: AbstractMesh) -> Any:
    """The context with devices and a mesh; None if there are too few devices."""
    module = ctx.module_context
    if not isinstance(module.axis_context, mlir.ShardingContext):
        return ctx
    count = module.axis_context.num_devices
    devices = () if module.backend is None else tuple(module.backend.devices()[:count])
    if len(devices) < count:
        return None
    named = mesh if mesh.size == count else AbstractMesh((count,), ("devices",))
    context = mlir.ShardingContext(count, devices, named)
    return ctx.replace(module_context=module.replace(axis_context=context))


_choice_p.def_impl(lambda *operands, operation, **_: operation(*operands))
_choice_p.def_abstract_eval(lambda *operands, results, **_: operands[:results])
mlir.register_lowering(_choice_p, _lower_choice)
