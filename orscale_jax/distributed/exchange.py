"""The exchange that carries out a plan: shards to whole matrices, and back.

All of it runs inside ``jax.shard_map``, which :func:`on_shards` enters: shapes are those
of one device.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from orscale_jax.distributed.collectives import (
    ColumnGroup,
    all_gather,
    all_to_all,
    axis_index,
)
from orscale_jax.distributed.costs import (
    Bucket,
    CostModel,
    LayoutGroup,
    MatrixRange,
    ShardedArray,
)
from orscale_jax.distributed.mesh import MeshShape, count_devices
from orscale_jax.distributed.placement import Placement
from orscale_jax.distributed.plan import plan_buckets
from orscale_jax.newton_schulz.platforms import Platform
from orscale_jax.newton_schulz.stacks import polar_in_chunks
from orscale_jax.sharding import typed_sharding


class _Packing:
    """How the shards of one layout group of a bucket are packed for the exchange."""

    def __init__(self, layout: LayoutGroup, bucket: Bucket, mesh: MeshShape) -> None:
        self.layout, self.bucket, self.mesh = layout, bucket, mesh
        rows, columns = (count_devices(axes, mesh.factors) for axes in layout.axes)
        m, n = self.shape = bucket.shape[0] // rows, bucket.shape[1] // columns
        # Shards of several layouts are sent in one shape, in which a TPU would pad short
        # axes: tall ones are transposed.
        several = len({other.axes for other in bucket.layouts}) > 1
        self.is_transposed = several and m > n
        self.sent_shape = (n, m) if self.is_transposed else (m, n)
        self.sent_axes = layout.axes[::-1] if self.is_transposed else layout.axes

    @property
    def order(self) -> list[int]:
        """The order of axes that leads from (*mesh axes, k, m, n) to matrices."""
        rows, columns = (
            [self.bucket.shard_axes.index(name) for name in axes]
            for axes in self.sent_axes
        )
        k = len(self.bucket.shard_axes)
        return [k, *rows, k + 1, *columns, k + 2]

    def pack(self, shards: Sequence[jax.Array], platform: Platform) -> jax.Array:
        """This device's shards of the matrices, ready to be sent."""
        m, n = self.shape
        padded = []
        for part in self.layout.slices:
            shard = shards[part.array]
            x = shard.reshape(math.prod(shard.shape[:-2]), *shard.shape[-2:])
            x = x[part.start : part.stop]
            x = x.mT if part.transposed else x
            # Zero rows and columns change nothing in the others' results.
            wide = n * self.layout.column_shards - x.shape[-1]
            padded.append(jnp.pad(x, [(0, 0), (0, m - x.shape[-2]), (0, wide)]))
        stays = self.bucket.group_size == 1
        x = platform.concatenate(padded) if stays else jnp.concatenate(padded)
        x = x.reshape(len(x), m, self.layout.column_shards, -1).swapaxes(1, 2)
        x = x.reshape(-1, m, n)
        return x.mT if self.is_transposed else x

    def unpack(
        self, packed: jax.Array, shards: Sequence[jax.Array]
    ) -> dict[MatrixRange, jax.Array]:
        """Invert :meth:`pack`."""
        m, n = self.shape
        x = packed.reshape(-1, *self.sent_shape)
        x = x.mT if self.is_transposed else x
        x = x.reshape(-1, self.layout.column_shards, m, n).swapaxes(1, 2)
        x = x.reshape(-1, m, n * self.layout.column_shards)
        slices, first = {}, 0
        for part in self.layout.slices:
            *_, rows, columns = shards[part.array].shape
            if part.transposed:
                rows, columns = columns, rows
            matrices = x[first : first + part.matrices, :rows, :columns]
            slices[part] = matrices.mT if part.transposed else matrices
            first += part.matrices
        return slices

    def to_matrices(self, arrived: jax.Array) -> jax.Array:
        """Matrices, or column shards, from what each device of the group has sent."""
        lengths = [self.mesh.factors[name] for name in self.bucket.shard_axes]
        k = self.bucket.matrices_per_device
        x = arrived.reshape(*lengths, k, *self.sent_shape).transpose(self.order)
        m, n = self.bucket.shape
        whole = x.reshape(-1, *((n, m) if self.is_transposed else (m, n)))
        return whole.mT if self.is_transposed else whole

    def to_shards(self, whole: jax.Array) -> jax.Array:
        """Invert :meth:`to_matrices`."""
        rows, columns = (
            [self.mesh.factors[name] for name in axes] for axes in self.sent_axes
        )
        m, n = self.sent_shape
        x = whole.mT if self.is_transposed else whole
        x = x.reshape(-1, *rows, m, *columns, n)
        return x.transpose(sorted(range(x.ndim), key=self.order.__getitem__))


def on_shards(
    platform: Platform,
    packed: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
    placement: Placement,
) -> list[jax.Array]:
    """Polar factors of packed matrices."""
    mesh, slices, specs = placement
    specs = tuple(specs)
    whole = [
        ShardedArray(x.shape, x.dtype, typed_sharding.axes_of(spec, x.ndim))
        for x, spec in zip(packed, specs, strict=True)
    ]
    # Along an axis that jax.vmap maps over, devices hold different matrices, not copies.
    mapped = typed_sharding.mapped_axes()
    sizes = {name: size for name, size in mesh.shape.items() if name not in mapped}
    shape = MeshShape(sizes, {name: slices[name] for name in slices if name in sizes})

    run = jax.shard_map(
        functools.partial(on_each_device, platform, whole, shape),
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        check_vma=False,
    )
    return list(run(tuple(packed), dict(traced)))


def on_each_device(
    platform: Platform,
    arrays: Sequence[ShardedArray],
    mesh: MeshShape,
    shards: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> tuple[jax.Array, ...]:
    """Shards of polar factors, from this device's shards of packed matrices."""
    platform = platform.with_traced(traced)
    packings = [
        [_Packing(layout, bucket, mesh) for layout in bucket.layouts]
        for bucket in plan_exchange(platform, arrays, mesh)
    ]
    shards = platform.layout(shards)
    stacks = [_send(shards, group, platform) for group in packings]
    # The largest first: neighbours then have like sizes.
    order = sorted(range(len(stacks)), key=lambda i: -stacks[i].size)
    columns: dict[int, ColumnGroup | None] = dict.fromkeys(order)
    for i in order:
        bucket = packings[i][0].bucket
        if bucket.column_shards > 1:
            group = mesh.group(bucket.replica_axes + bucket.shard_axes, bucket.group_size)
            active = [each.slots for each in bucket.layouts if each.column_shards > 1]
            columns[i] = ColumnGroup(group, bucket.column_shards, sum(active))
            stacks[i] = stacks[i][0]  # A column shard has no batch axis.
    qs = polar_in_chunks(platform, [stacks[i] for i in order], [*columns.values()])
    of_bucket = dict(zip(order, qs, strict=True))
    slices: dict[MatrixRange, jax.Array] = {}
    for i, in_bucket in enumerate(packings):
        slices |= _return(of_bucket[i], in_bucket, shards)
    factors = []
    by_array = itertools.groupby(sorted(slices), key=lambda part: part.array)
    for shard, (_, parts) in zip(shards, by_array, strict=True):
        joined = jnp.concatenate([slices[part] for part in parts])
        factors.append(joined.reshape(shard.shape))
    return tuple(platform.layout(factors))


def plan_exchange(
    platform: Platform, arrays: Sequence[ShardedArray], mesh: MeshShape
) -> tuple[Bucket, ...]:
    """The plan of a mesh for arrays of packed matrices."""
    return plan_buckets(arrays, mesh, platform.limits.stack_bytes, cost_model(platform))


def cost_model(platform: Platform) -> CostModel:
    """The cost model of the iteration; of five plain steps where it is traced."""
    restarts = platform.restarts
    if restarts is None:
        return CostModel(platform.hardware)
    return CostModel(platform.hardware, int(platform.settings.steps), len(restarts) + 1)


def _send(
    shards: Sequence[jax.Array], packings: Sequence[_Packing], platform: Platform
) -> jax.Array:
    """Exchange shards of all matrices for whole matrices, or column shards, of some.

    The last devices of the group receive zeros where there are too few matrices.
    """
    bucket, mesh = packings[0].bucket, packings[0].mesh
    shape = packings[0].sent_shape
    packed = jnp.concatenate(
        [packing.pack(shards, platform).reshape(-1, *shape) for packing in packings]
    )
    slots = bucket.matrices_per_device * bucket.group_size
    packed = jnp.pad(packed, [(0, slots - len(packed)), (0, 0), (0, 0)])
    if bucket.replica_axes:
        share = slots // bucket.replicas
        start = axis_index(mesh.group(bucket.replica_axes, bucket.replicas)) * share
        packed = jax.lax.dynamic_slice_in_dim(packed, start, share)
    if bucket.shards == 1:
        return packed
    packed = packed.reshape(bucket.shards, -1, *shape)
    arrived = all_to_all(packed, bucket.shard_axes, mesh).reshape(-1, *shape)
    return _as_sharded(packings, lambda packing: packing.to_matrices(arrived))


def _return(
    q: jax.Array, packings: Sequence[_Packing], shards: Sequence[jax.Array]
) -> dict[MatrixRange, jax.Array]:
    """Invert :func:`_send`. Zeros must have stayed zeros."""
    bucket, mesh = packings[0].bucket, packings[0].mesh
    shape = packings[0].sent_shape
    x = q.reshape(-1, *q.shape[-2:])
    if bucket.shards > 1:
        x = _as_sharded(packings, lambda each: each.to_shards(x).reshape(-1, *shape))
        x = x.reshape(bucket.shards, -1, *shape)
        x = all_to_all(x, bucket.shard_axes, mesh).reshape(-1, *shape)
    if bucket.replica_axes:
        x = all_gather(x, bucket.replica_axes, bucket.replicas, mesh)
    slices: dict[MatrixRange, jax.Array] = {}
    first = 0
    for packing in packings:
        after = first + packing.layout.slots
        slices |= packing.unpack(x[first:after], shards)
        first = after
    return slices


def _as_sharded(
    packings: Sequence[_Packing], fn: Callable[[_Packing], jax.Array]
) -> jax.Array:
    """``fn`` of a packing of this device's matrix: those sharded alike share a result."""
    bucket, mesh = packings[0].bucket, packings[0].mesh
    result, before = None, 0
    for _, run in itertools.groupby(packings, lambda packing: packing.layout.axes):
        alike = list(run)
        whole = fn(alike[0])
        if result is not None:
            group = mesh.group(bucket.replica_axes + bucket.shard_axes, bucket.group_size)
            whole = jnp.where(axis_index(group) < before, result, whole)
        result = whole
        before += sum(packing.layout.slots for packing in alike)
    assert result is not None
    return result
