"""What the buckets of a plan hold, and what they cost: operations, bytes, messages.

Nothing here imports JAX.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from orscale_jax.distributed.mesh import MeshAxes, MeshShape, count_devices
from orscale_jax.newton_schulz.hardware import VIRTUAL, Hardware
from orscale_jax.newton_schulz.restarts import is_cheaper


class Traffic(NamedTuple):
    """What each device sends: over fast links, inside a slice, and over slow ones."""

    fast_bytes: int = 0
    slow_bytes: int = 0
    fast_messages: int = 0
    slow_messages: int = 0

    @property
    def nbytes(self) -> int:
        return self.fast_bytes + self.slow_bytes

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


class CostModel(NamedTuple):
    """The costs by which plans are compared.

    ``gram_segments`` is the number of times that the Gram form computes a Gram matrix of
    X, where that form is cheaper; None for the plain iteration.
    """

    hardware: Hardware = VIRTUAL
    steps: int = 5
    gram_segments: int | None = None

    def segments(self, m: int, n: int) -> int:
        """How often the Gram matrix of an m×n matrix is computed from it."""
        if self.gram_segments is None or not is_cheaper(m, n):
            return self.steps
        return self.gram_segments

    def cost(self, flops: int, traffic: Traffic) -> int:
        """The FLOPs of the time that operations and traffic take, one after another.

        Integers, so that all processes find the same plan.
        """
        rate, fast, slow = self.hardware
        each = (
            rate / fast.bytes_per_second,
            rate / slow.bytes_per_second,
            rate * fast.seconds_per_message,
            rate * slow.seconds_per_message,
        )
        return flops + sum(
            count * round(flops_of_each)
            for count, flops_of_each in zip(traffic, each, strict=True)
        )

    def seconds(self, cost: int) -> float:
        return cost / self.hardware.flops_per_second


class ShardedArray(NamedTuple):
    """An array of matrices ``(*batch, m, n)`` on a mesh, in the dtype that is sent."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[MeshAxes, ...]  # For each of its axes, those over which it is sharded.


class MatrixRange(NamedTuple):
    """Consecutive matrices of one array, of those of which a device holds a shard."""

    array: int
    start: int
    stop: int
    transposed: bool

    @property
    def matrices(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, order=True)
class LayoutGroup:
    """Matrices of a bucket that are sharded alike, over axes of the mesh."""

    slices: tuple[MatrixRange, ...]
    axes: tuple[MeshAxes, MeshAxes]  # Over which rows and columns are sharded.
    column_shards: int = 1  # The devices that share the columns of one matrix.

    @functools.cached_property
    def matrices(self) -> int:
        return sum(part.matrices for part in self.slices)

    @property
    def slots(self) -> int:
        """The number of devices that take a matrix, or a column shard of one."""
        return self.matrices * self.column_shards


class Bucket(NamedTuple):
    """Matrices that go through Newton–Schulz together."""

    # In the order of the devices to which they go: first those with column shards, which
    # all have the same number of them.
    layouts: tuple[LayoutGroup, ...]
    # (m, n) of a matrix, or of one column shard; smaller ones are padded. Matrices that
    # are sent are wide.
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    shard_axes: MeshAxes  # Those over which the matrices are sharded.
    # Those along which devices that hold replicas share the work: along the first perhaps
    # only some neighbours.
    replica_axes: MeshAxes
    group_size: int  # The number of devices in a group.
    shards: int  # The number of shards of a matrix in a group, without replicas.
    cost_model: CostModel
    # The numbers of slices among which its shards and its replicas are.
    slice_counts: tuple[int, int] = (1, 1)

    @property
    def slices(self) -> Iterator[MatrixRange]:
        return itertools.chain.from_iterable(layout.slices for layout in self.layouts)

    @property
    def matrices(self) -> int:
        return sum(layout.matrices for layout in self.layouts)

    @property
    def replicas(self) -> int:
        return self.group_size // self.shards

    @property
    def column_shards(self) -> int:
        """The number of devices that share each shared matrix; 1 if none is shared."""
        return max(layout.column_shards for layout in self.layouts)

    @property
    def matrices_per_device(self) -> int:
        """The number of matrices that each device orthogonalizes, padding included."""
        slots = sum(layout.slots for layout in self.layouts)
        return math.ceil(slots / self.group_size)

    @property
    def nbytes(self) -> int:
        """The bytes of the stack on each device."""
        return self.matrices_per_device * math.prod(self.shape) * self.dtype.itemsize

    @property
    def traffic(self) -> Traffic:
        """What each device sends in all."""
        return functools.reduce(Traffic.plus, self.ways)

    @property
    def ways(self) -> tuple[Traffic, Traffic, Traffic]:
        """What each device sends: before, for sums of Gram matrices, and afterwards.

        Messages go to one device in every other slice, which passes them on to the others
        there. Bytes that stay on the device are not counted.
        """
        if not self.matrices:
            return Traffic(), Traffic(), Traffic()
        of_shards, of_replicas = self.slice_counts
        shards, nbytes = self.shards // of_shards, self.nbytes  # In one slice.
        replicas = self.replicas // of_replicas
        exchanged = Traffic(
            fast_bytes=nbytes * (shards - 1) // shards,
            slow_bytes=nbytes * (of_shards - 1) // of_shards,
            fast_messages=shards - 1,
            slow_messages=of_shards - 1,
        )
        gathered = Traffic(
            fast_bytes=nbytes * of_replicas * (replicas - 1),
            slow_bytes=nbytes * (of_replicas - 1),
            fast_messages=replicas - 1,
            slow_messages=of_replicas - 1,
        )
        # Gram matrices are added in the accumulator's dtype, gathered in the bucket's,
        # around a ring: where one of its links is slow, all bytes pass over it.
        m, segments = self._gram
        others, itemsize = self.column_shards - 1, self.dtype.itemsize
        summed = m**2 * (max(4, itemsize) + itemsize) * others // self.column_shards
        ring = (segments * summed, segments * 2 * others)
        neighbours = shards if of_shards > 1 else self.group_size // of_replicas
        crosses_slices = neighbours % self.column_shards > 0
        if crosses_slices:
            added = Traffic(slow_bytes=ring[0], slow_messages=ring[1])
        else:
            added = Traffic(fast_bytes=ring[0], fast_messages=ring[1])
        return exchanged, added, exchanged.plus(gathered)

    @property
    def flops(self) -> int:
        """The FLOPs of each device, counted as in ``newton_schulz/restarts.py``."""
        m, segments = self._gram
        square_products = 4 * self.cost_model.steps - 3 * segments
        one = 4 * segments * m * math.prod(self.shape) + 2 * square_products * m**3
        return self.matrices_per_device * one

    @property
    def _gram(self) -> tuple[int, int]:
        """The rows of a Gram matrix, and how often it is computed from its matrix."""
        m, n = self.shape[0], self.shape[1] * self.column_shards
        return min(m, n), self.cost_model.segments(m, n)

    @property
    def cost(self) -> int:
        """The cost of each device, in FLOPs."""
        return self.cost_model.cost(self.flops, self.traffic)

    def with_slices(self, slices: Iterable[MatrixRange]) -> "Bucket":
        """The bucket, of one layout, with these of the slices that are not empty."""
        [layout] = self.layouts
        filled = tuple(part for part in slices if part.matrices)
        return self._replace(layouts=(dataclasses.replace(layout, slices=filled),))

    def shared_along(
        self, replica_axes: MeshAxes, mesh: MeshShape, groups: int = 1
    ) -> "Bucket":
        """The bucket whose work is shared by the replicas along these axes.

        ``groups`` is the number of parts of the first axis, each of which repeats it.
        """
        replicas = count_devices(replica_axes, mesh.factors)
        slices = max(1, mesh.slices_along(replica_axes) // groups)
        return self._replace(
            replica_axes=replica_axes,
            group_size=self.shards * replicas // groups,
            slice_counts=(self.slice_counts[0], slices),
        )
