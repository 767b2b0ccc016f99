"""The exchange that carries out a plan: shards to whole matrices, and back.

All of it runs inside ``jax.shard_map``: shapes are those of one device.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orscale_jax.distributed.buckets import (
    Bucket,
    LayoutGroup,
    MatrixSlice,
    MeshAxes,
    count_devices,
)
from orscale_jax.distributed.collectives import (
    ColumnGroup,
    all_gather,
    all_to_all,
    axis_index,
)
from orscale_jax.distributed.mesh_shape import MeshShape


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
