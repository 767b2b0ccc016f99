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
from orscale_jax.distributed.slow_links import slice_of_each
from orscale_jax.newton_schulz.iteration import newton_schulz
from orscale_jax.newton_schulz.platforms import (
    Platform,
    StackKey,
    plan_stacks,
    stack,
    unstack,
)
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

    ``slices`` are None to ask the devices of the partitioner's mesh. The results have the
    types of ``packed``.
    """
    # The thread that calls back knows nothing of ``with jax.enable_x64(True)``.
    of_64_bits = any(x.dtype.itemsize == 8 for x in (*packed, *traced.values()))
    if of_64_bits or not platform.partitioner_calls_back:
        return spread_out(platform.with_traced(traced), packed, mesh, slices or {})
    count, names = len(packed), tuple(traced)
    types = (AxisType.Auto,) * len(mesh.axis_names)
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, types)

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
        # In the shape of the partitioner's mesh, which may be that of split axes.
        if slice_of is not None and slice_of.size == mesh.size:
            each = slice_of.reshape(mesh.devices.shape)
        else:
            each = slice_of_each(mesh)
        shape = MeshShape(mesh.shape, slices_of_axes(mesh.axis_names, each))
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
        # One more operand tells apart programs whose operations differ: the key of JAX's
        # persistent compilation cache has only an operation's operands, and a pointer
        # that jax_remove_custom_partitioning_ptr_from_cache_key removes.
        jaxpr = jax.make_jaxpr(whole)(*map(jax.typeof, operands))
        declared = "" if slice_of is None else str(slice_of.tolist())
        digest = hashlib.sha256(f"{jaxpr}{declared}".encode()).digest()
        fingerprint = jnp.asarray(np.frombuffer(digest, np.uint32))
        chosen: Any = {"mesh": mesh, "operation": operation, "exported": exported}
        return tuple(_choice_p.bind(*operands, fingerprint, **chosen, results=count))

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
    axes_of_arrays = [axes_on(mesh, x.sharding, len(x.shape)) for x in arrays]
    if any(None in axes for axes in axes_of_arrays):
        mesh = in_prime_axes(mesh)
        axes_of_arrays = [axes_on(mesh, x.sharding, len(x.shape)) for x in arrays]
    shardings = []
    for array, axes in zip(arrays, axes_of_arrays, strict=True):
        # Without axes that would need padding, or that have no name.
        entries = [
            names if names and size % count_devices(names, mesh.shape) == 0 else None
            for size, names in zip(array.shape, axes, strict=True)
        ]
        shardings.append(NamedSharding(mesh, PartitionSpec(*entries)))
    return mesh, tuple(shardings)


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


def spread_out(
    platform: Platform,
    packed: Sequence[jax.Array],
    mesh: AbstractMesh,
    slices: Mapping[str, int],
) -> list[jax.Array]:
    """Polar factors of packed matrices: stacks are spread, batches stay as they are.

    The sharding of a batch may be the right one: experts by expert. Stacks are not spread
    along axes that only lead to other slices.
    """
    if platform.normalizes == "matrix":  # A loop over matrices would gather each of them.
        packed = platform.normalized(packed)
    whole = [typed_sharding.gather(x, (x.ndim - 2, x.ndim - 1)) for x in packed]
    mapped = typed_sharding.mapped_axes()
    axes = tuple(
        name
        for name in mesh.auto_axes
        if name not in mapped and slices.get(name, 1) < mesh.shape[name]
    )
    devices = count_devices(axes, mesh.shape)
    constrained: Any = jax.lax.with_sharding_constraint
    by_rows = NamedSharding(mesh, PartitionSpec(None, axes))
    by_matrices = NamedSharding(mesh, PartitionSpec(axes))

    def spread(x: jax.Array) -> jax.Array:
        """Of matrices (m, n) or (k, m, n): evenly over the devices, padded by zeros."""
        count = math.prod(x.shape[:-2])
        padded = x.reshape(count, *x.shape[-2:])
        padded = jnp.pad(padded, [(0, -count % devices), (0, 0), (0, 0)])
        # First by rows: the partitioner would otherwise replicate whole stacks.
        stacked = constrained(constrained(padded, by_rows), by_matrices)
        [q] = newton_schulz([stacked], platform.iteration)
        rows = constrained(constrained(q, by_matrices), by_rows)
        return rows[:count].reshape(x.shape)

    stack_bytes, chunk_bytes, *_ = platform.limits
    of_all = min(stack_bytes, chunk_bytes) * devices
    qs: dict[int, jax.Array] = {}
    for is_batch, nbytes in ((False, of_all), (True, stack_bytes)):
        members = [i for i, x in enumerate(whole) if (x.ndim > 2) == is_batch]
        xs = [whole[i] for i in members]
        plan = plan_stacks([StackKey.of(x) for x in xs], nbytes)
        stacks = stack(xs, plan)
        if is_batch:
            of_stacks = [newton_schulz([x], platform.iteration)[0] for x in stacks]
        else:
            of_stacks = [*map(spread, stacks)]
        qs |= dict(zip(members, unstack(of_stacks, plan, xs), strict=True))
    return [typed_sharding.shard_like(qs[i], x) for i, x in enumerate(packed)]


# The choice between an operation that calls back for the program of one device, and the
# same function for programs that are exported, or lowered for more devices than there
# are. It is lowered for devices, but their number alone enters its program. JAX, if it
# knew of the operation, would refuse programs with several meshes over the same devices.
_choice_p = Primitive("partitioned_unless_exported")
_choice_p.multiple_results = True


def _lower_choice(
    ctx: Any,
    *operands: Any,
    mesh: AbstractMesh,
    operation: Function,
    exported: Function,
    results: int,
) -> Any:
    module = ctx.module_context
    if bool(module.lowering_parameters.for_export):
        return mlir.lower_fun(exported)(ctx, *operands)
    if isinstance(module.axis_context, mlir.ShardingContext):
        count = module.axis_context.num_devices
        known = () if module.backend is None else module.backend.devices()
        if len(known) < count:
            return mlir.lower_fun(exported)(ctx, *operands)
        named = mesh if mesh.size == count else AbstractMesh((count,), ("devices",))
        context = mlir.ShardingContext(count, tuple(known[:count]), named)
        ctx = ctx.replace(module_context=module.replace(axis_context=context))
    return mlir.lower_fun(operation)(ctx, *operands)


_choice_p.def_impl(lambda *operands, operation, **_: operation(*operands))
_choice_p.def_abstract_eval(lambda *operands, results, **_: operands[:results])
mlir.register_lowering(_choice_p, _lower_choice)
