"""The exchange that carries out a plan: shards to whole matrices, and back.

All of it runs inside ``jax.shard_map``, which :func:`on_shards` enters: shapes are those
of one device. Collectives run over slow links before fast ones; some are sums over the
devices that share a matrix, each with some of its columns.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from orscale_jax.distributed.plan import (
    Bucket,
    DeviceGroup,
    LayoutGroup,
    MatrixSlice,
    MeshAxes,
    MeshShape,
    ShardedArray,
    count_devices,
    plan_buckets,
)
from orscale_jax.distributed.platforms import Platform, polar_in_chunks
from orscale_jax.newton_schulz.arithmetic import may_transpose_squares
from orscale_jax.sharding import typed_sharding


@dataclasses.dataclass(frozen=True)
class ColumnGroup:
    """Devices of a mesh over which the columns of wide matrices are sharded.

    Attributes:
      group: The devices among which those that share a matrix are neighbours.
      shards: The number of neighbouring devices that share a matrix.
      active: The number of devices that hold a column shard, the first of the group. The
        others hold whole matrices; they take part in the collectives, whose results they
        discard.
    """

    group: DeviceGroup
    shards: int
    active: int

    @property
    def _groups(self) -> list[list[int]] | None:
        return self.group.index_groups(self.shards)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that share a matrix."""
        return self._if_active(
            jax.lax.psum(x, self.group.axes, axis_index_groups=self._groups), x
        )

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over the devices that share a matrix."""
        return self._if_active(
            jax.lax.pmax(x, self.group.axes, axis_index_groups=self._groups), x
        )

    def sum_matrices(
        self, x: jax.Array, rounded: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """The sum of matrices of shape (m, n): added as they are, gathered rounded."""
        rows = jax.lax.psum_scatter(
            x, self.group.axes, axis_index_groups=self._groups, tiled=True
        )
        gathered = jax.lax.all_gather(
            rounded(rows), self.group.axes, axis_index_groups=self._groups, tiled=True
        )
        return self._if_active(gathered.astype(x.dtype), x)

    def _if_active(self, reduced: jax.Array, x: jax.Array) -> jax.Array:
        """``reduced`` where the device holds a column shard, else ``x``."""
        if self.active == self.group.size:
            return reduced
        return jnp.where(axis_index(self.group) < self.active, reduced, x)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange of shards for whole matrices, each on one device or on a few.

    Attributes:
      buckets: The plan.
      mesh: The mesh.
    """

    buckets: Sequence[Bucket]
    mesh: MeshShape

    def send(
        self,
        shards: Sequence[jax.Array],
        join: Callable[[Sequence[jax.Array]], jax.Array],
    ) -> list[jax.Array]:
        """Stacks ``(k, m, n)`` of whole matrices, and column shards ``(m, n)`` of some.

        Args:
          shards: This device's shard of each planned array.
          join: Makes a stack of matrices that stay on their device.

        Returns:
          An array for each bucket, the largest first: neighbours then have like sizes.
        """
        stacks = []
        for group in self._packings:
            packed = jnp.concatenate([packing.pack(shards, join) for packing in group])
            stacks.append(_send(packed, group))
        # A column shard has no batch axis.
        shared = [bucket.column_shards > 1 for bucket in self.buckets]
        return [stacks[i][0] if shared[i] else stacks[i] for i in self._order]

    @property
    def columns(self) -> list[ColumnGroup | None]:
        """For each result of :meth:`send`, the devices that share its matrices."""
        return [_column_group(self.buckets[i], self.mesh) for i in self._order]

    def receive(
        self, results: Sequence[jax.Array], shards: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Invert :meth:`send`.

        Args:
          results: Arrays of the shapes that ``send`` has returned.
          shards: Arrays of the shapes of this device's shards.
        """
        by_bucket = dict(zip(self._order, results, strict=True))
        arrays = (by_bucket[i] for i in range(len(self.buckets)))
        stacks = [x.reshape(-1, *x.shape[-2:]) for x in arrays]
        slices: dict[MatrixSlice, jax.Array] = {}
        for stack, group in zip(stacks, self._packings, strict=True):
            returned, first = _return(stack, group), 0
            for packing in group:
                after = first + packing.layout.slots
                slices |= packing.unpack(returned[first:after], shards)
                first = after
        return [_assemble(slices, i, shard) for i, shard in enumerate(shards)]

    @property
    def _order(self) -> list[int]:
        def entries(i: int) -> int:
            bucket = self.buckets[i]
            return bucket.matrices_per_device * math.prod(bucket.shape)

        return sorted(range(len(self.buckets)), key=lambda i: -entries(i))

    @property
    def _packings(self) -> list[list["_Packing"]]:
        return [
            [_Packing(layout, bucket, self.mesh) for layout in bucket.layouts]
            for bucket in self.buckets
        ]


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
    qs = polar_in_chunks(platform, stacks, trip.columns)
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


def axis_index(group: DeviceGroup) -> jax.Array:
    """The index of this device in its group."""
    index = jax.lax.axis_index(group.axes)
    if group.is_whole:
        return index
    places = []
    for length in reversed(group.lengths):
        places.append(index % length)
        index = index // length
    places.reverse()
    index = places[group.order[0]]
    for i in group.order[1:]:
        index = index * group.lengths[i] + places[i]
    return index


def all_to_all(x: jax.Array, factors: Sequence[str], mesh: MeshShape) -> jax.Array:
    """Send equal parts of ``x`` to all devices along factors, the slow ones first.

    Across slices each device sends one message to each other slice: all that is meant for
    its devices, which pass it on.

    Args:
      x: Shape (devices, ...): what each device is sent; the result is what each has sent.
      factors: Factors of the mesh's axes.
      mesh: The mesh.
    """
    slow, fast = _by_link(factors, mesh)
    whole = x.shape
    lengths = [group.size for group in (slow, fast) if group]
    x = x.reshape(*lengths, *whole[1:])
    for axis, group in enumerate(group for group in (slow, fast) if group):
        x = jax.lax.all_to_all(
            x,
            group.axes,
            split_axis=axis,
            concat_axis=axis,
            axis_index_groups=group.index_groups(),
        )
    return x.reshape(whole)


def all_gather(x: jax.Array, factors: Sequence[str], mesh: MeshShape) -> jax.Array:
    """Join the arrays of all devices along factors by their first axis.

    Each device receives one array from every other slice, and the rest from this one.
    """
    slow, fast = _by_link(factors, mesh)
    if slow and fast:
        x = _gathered(x, slow, axis=0, tiled=False)
        x = _gathered(x, fast, axis=1, tiled=False)
        return x.reshape(-1, *x.shape[3:])
    return _gathered(x, slow or fast, axis=0, tiled=True)


def _gathered(
    x: jax.Array, group: DeviceGroup | None, *, axis: int, tiled: bool
) -> jax.Array:
    if group is None:
        return x
    groups = group.index_groups()
    return jax.lax.all_gather(
        x, group.axes, axis=axis, tiled=tiled, axis_index_groups=groups
    )


def _by_link(
    factors: Sequence[str], mesh: MeshShape
) -> tuple[DeviceGroup | None, DeviceGroup | None]:
    """The groups along the slow factors, which come first, and along the fast ones."""
    slow = [factor for factor in factors if factor in mesh.slow]
    fast = [factor for factor in factors if factor not in mesh.slow]
    return (mesh.group(slow) if slow else None, mesh.group(fast) if fast else None)


def _column_group(bucket: Bucket, mesh: MeshShape) -> ColumnGroup | None:
    if bucket.column_shards == 1:
        return None
    group = mesh.group(bucket.replica_axes + bucket.shard_axes)
    return ColumnGroup(group, bucket.column_shards, bucket.active_devices)


def _assemble(
    slices: Mapping[MatrixSlice, jax.Array], index: int, shard: jax.Array
) -> jax.Array:
    """The slices of one array, in its shape."""
    own = [slices[part] for part in sorted(slices) if part.array == index]
    joined = own[0] if len(own) == 1 else jnp.concatenate(own)
    return joined.reshape(shard.shape)


class _Packing(NamedTuple):
    """How the shards of one layout group are packed for the exchange."""

    layout: LayoutGroup
    bucket: Bucket
    mesh: MeshShape

    @property
    def local_shape(self) -> tuple[int, int]:
        """The shape of this device's shard of a matrix, padded."""
        m, n = self.sent_shape
        return m, n * self.layout.column_shards

    @property
    def sent_shape(self) -> tuple[int, int]:
        """The shape of what is sent to each device of the group."""
        m, n = self.bucket.shape
        rows, columns = self.layout.axes
        return (
            m // count_devices(rows, self.mesh.factors),
            n // count_devices(columns, self.mesh.factors),
        )

    @property
    def is_transposed(self) -> bool:
        """Whether tall shards are sent transposed.

        Shards of several layouts are sent in one shape, in which a TPU would pad short
        axes.
        """
        m, n = self.sent_shape
        return len({layout.axes for layout in self.bucket.layouts}) > 1 and m > n

    @property
    def sides(self) -> list[tuple[MeshAxes, int]]:
        """For both axes of what is sent, the axes of the mesh and the length."""
        m, n = self.sent_shape
        sides = [(self.layout.row_axes, m), (self.layout.column_axes, n)]
        return sides[::-1] if self.is_transposed else sides

    @property
    def common_shape(self) -> list[int]:
        """The shape in which shards of all layout groups are sent."""
        first = self._replace(layout=self.bucket.layouts[0])
        return [length for _, length in first.sides]

    @property
    def order(self) -> list[int]:
        """The permutation ``(*mesh axes, k, m, n)`` to ``(k, *rows, m, *columns, n)``."""
        axes = self.bucket.shard_axes
        (first, _), (last, _) = self.sides
        k, m, n = range(len(axes), len(axes) + 3)
        return [k, *map(axes.index, first), m, *map(axes.index, last), n]

    def pack(
        self,
        shards: Sequence[jax.Array],
        join: Callable[[Sequence[jax.Array]], jax.Array],
    ) -> jax.Array:
        """This device's shards of the matrices, ready to be sent."""
        m, n = self.local_shape
        padded = []
        for part in self.layout.slices:
            shard = shards[part.array]
            x = shard.reshape(math.prod(shard.shape[:-2]), *shard.shape[-2:])
            x = x[part.start : part.stop]
            x = x.mT if part.transposed else x
            # Zero rows and columns change nothing in the others' results.
            pad = [(0, 0), (0, m - x.shape[-2]), (0, n - x.shape[-1])]
            padded.append(jnp.pad(x, pad))
        x = join(padded) if self.bucket.group_size == 1 else jnp.concatenate(padded)
        x = x.reshape(len(x), m, self.layout.column_shards, -1).swapaxes(1, 2)
        x = x.reshape(-1, *self.sent_shape)
        x = x.mT if self.is_transposed else x
        return x.reshape(-1, *self.common_shape)

    def unpack(
        self, packed: jax.Array, shards: Sequence[jax.Array]
    ) -> dict[MatrixSlice, jax.Array]:
        """Invert :meth:`pack`."""
        x = packed.reshape(-1, *(length for _, length in self.sides))
        x = x.mT if self.is_transposed else x
        x = x.reshape(-1, self.layout.column_shards, *self.sent_shape).swapaxes(1, 2)
        x = x.reshape(-1, *self.local_shape)
        slices, first = {}, 0
        for part in self.layout.slices:
            *_, rows, columns = shards[part.array].shape
            if part.transposed:
                rows, columns = columns, rows
            matrices = x[first : first + part.matrices, :rows, :columns]
            slices[part] = matrices.mT if part.transposed else matrices
            first += part.matrices
        return slices

    def join(self, arrived: jax.Array) -> jax.Array:
        """Matrices, or column shards, from what each device of the group has sent."""
        (first, m), (last, n) = self.sides
        lengths = [self.mesh.factors[name] for name in self.bucket.shard_axes]
        x = arrived.reshape(*lengths, self.bucket.matrices_per_device, m, n)
        sides = (
            m * count_devices(first, self.mesh.factors),
            n * count_devices(last, self.mesh.factors),
        )
        whole = x.transpose(self.order).reshape(-1, *sides)
        return whole.mT if self.is_transposed else whole

    def divide(self, whole: jax.Array) -> jax.Array:
        """Invert :meth:`join`."""
        (first, m), (last, n) = self.sides
        rows, columns = (
            [self.mesh.factors[name] for name in axes] for axes in (first, last)
        )
        x = whole.mT if self.is_transposed else whole
        x = x.reshape(-1, *rows, m, *columns, n)
        back = sorted(range(x.ndim), key=self.order.__getitem__)
        return x.transpose(back).reshape(-1, *self.common_shape)


def _send(packed: jax.Array, packings: Sequence[_Packing]) -> jax.Array:
    """Exchange shards of all matrices for whole matrices, or column shards, of some.

    The last devices of the group receive zeros where there are too few matrices.
    """
    bucket = packings[0].bucket
    slots = bucket.matrices_per_device * bucket.group_size
    packed = jnp.pad(packed, [(0, slots - len(packed)), (0, 0), (0, 0)])
    if bucket.replica_axes:
        share = slots * bucket.shards // bucket.group_size
        group = packings[0].mesh.group(bucket.replica_axes)
        start = axis_index(group) * share
        packed = jax.lax.dynamic_slice_in_dim(packed, start, share)
    if bucket.shards == 1:
        return packed
    arrived = _all_to_all(packed, packings[0])
    first, *others = runs = _alike(packings)
    whole = first[0].join(arrived)
    for before, run in zip(_is_before(runs), others, strict=True):
        whole = jnp.where(before, whole, run[0].join(arrived))
    return whole


def _return(whole: jax.Array, packings: Sequence[_Packing]) -> jax.Array:
    """Invert :func:`_send`. Zeros must have stayed zeros."""
    bucket = packings[0].bucket
    if bucket.shards > 1:
        first, *others = runs = _alike(packings)
        divided = first[0].divide(whole)
        for before, run in zip(_is_before(runs), others, strict=True):
            divided = jnp.where(before, divided, run[0].divide(whole))
        whole = _all_to_all(divided, packings[0])
    if bucket.replica_axes:
        whole = all_gather(whole, bucket.replica_axes, packings[0].mesh)
    return whole


def _alike(packings: Sequence[_Packing]) -> list[list[_Packing]]:
    """Runs of layout groups that are sharded alike."""
    runs = itertools.groupby(packings, lambda packing: packing.layout.axes)
    return [list(run) for _, run in runs]


def _is_before(runs: Sequence[Sequence[_Packing]]) -> Iterator[jax.Array]:
    """For each run but the first, whether this device's matrix is of an earlier one."""
    first = 0
    for run in runs[:-1]:
        first += sum(packing.layout.slots for packing in run)
        bucket, mesh = run[0].bucket, run[0].mesh
        yield axis_index(mesh.group(bucket.replica_axes + bucket.shard_axes)) < first


def _all_to_all(packed: jax.Array, packing: _Packing) -> jax.Array:
    """Send equal parts to the devices of the group, in the order of its axes."""
    bucket = packing.bucket
    sent = packed.reshape(bucket.shards, -1, *packed.shape[1:])
    return all_to_all(sent, bucket.shard_axes, packing.mesh).reshape(packed.shape)
