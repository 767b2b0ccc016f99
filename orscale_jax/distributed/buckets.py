"""The parts of a plan: which matrices are sent together, and between which devices.

The devices of a mesh fall into groups of equal size. The devices of one group hold the
shards of the same matrices, and all groups do the same with theirs.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from orscale_jax.distributed.costs import (
    CostModel,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
)
from orscale_jax.distributed.mesh_shape import MeshShape

MeshAxes = tuple[str, ...]


class ShardedArray(NamedTuple):
    """An array of matrices on a mesh.

    Attributes:
      shape: ``(*batch, m, n)``, of the whole array.
      dtype: The dtype in which its matrices are sent.
      axes: For each axis of the array, the axes of the mesh over which it is sharded.
      may_transpose: Whether square matrices may be sent transposed.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[MeshAxes, ...]
    may_transpose: bool = True

    @property
    def is_wide(self) -> bool:
        """Whether its matrices are sent as they are, and not as their transposes.

        Squares sharded by columns are sent transposed, so that they can share a bucket
        with wide matrices. So are those sharded by both whose mesh axes are out of order.
        """
        *_, m, n = self.shape
        *_, rows, columns = self.axes
        by_columns_alone = bool(columns) and not rows
        out_of_order = bool(columns) and rows > columns
        transposed = self.may_transpose and (by_columns_alone or out_of_order)
        return m < n or (m == n and not transposed)

    @property
    def transposed(self) -> "ShardedArray":
        """The array of the transposed matrices."""
        *batch, m, n = range(len(self.shape))
        order = (*batch, n, m)
        return self._replace(
            shape=tuple(self.shape[i] for i in order),
            axes=tuple(self.axes[i] for i in order),
        )

    def over(self, mesh: MeshShape) -> "ShardedArray":
        """The same array, sharded over factors of the mesh's axes."""
        return self._replace(axes=tuple(map(mesh.factors_of, self.axes)))


class MatrixSlice(NamedTuple):
    """Consecutive matrices of one array.

    Attributes:
      array: The index of the array.
      start: The first of them, counting the matrices of which a device holds a shard.
      stop: The one after the last.
      transposed: Whether they are sent transposed.
    """

    array: int
    start: int
    stop: int
    transposed: bool

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return self.stop - self.start


class LayoutGroup(NamedTuple):
    """Matrices of a bucket that are sharded alike.

    Attributes:
      slices: The matrices.
      row_axes: The axes of the mesh over which their rows are sharded.
      column_axes: The axes of the mesh over which their columns are sharded.
      column_shards: The number of devices that share the columns of one matrix during
        Newton–Schulz; 1 for matrices that are whole on one device.
    """

    slices: tuple[MatrixSlice, ...]
    row_axes: MeshAxes
    column_axes: MeshAxes
    column_shards: int = 1

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return sum(part.matrices for part in self.slices)

    @property
    def axes(self) -> tuple[MeshAxes, MeshAxes]:
        """The axes of the mesh over which rows and columns are sharded."""
        return self.row_axes, self.column_axes

    @property
    def slots(self) -> int:
        """The number of devices that take a matrix, or a column shard of one."""
        return self.matrices * self.column_shards


class Bucket(NamedTuple):
    """Matrices that go through Newton–Schulz together.

    Attributes:
      layouts: The matrices, in the order of the devices to which they go: first those
        with column shards, which all have the same number of them.
      shape: ``(m, n)`` of a matrix, or of one column shard; smaller ones are padded.
        Matrices that are sent are wide.
      dtype: The dtype of the entries.
      shard_axes: The axes of the mesh over which the matrices are sharded.
      replica_axes: The axes of the mesh along which a group holds replicas. Along other
        axes, devices repeat the work of one another, which is then cheaper.
      group_size: The number of devices in a group.
      shards: The number of shards of a matrix in a group, without replicas.
      slice_counts: The numbers of slices among which its shards and its replicas are.
      cost_model: The costs by which the bucket is compared with others.
    """

    layouts: tuple[LayoutGroup, ...]
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    shard_axes: MeshAxes
    replica_axes: MeshAxes
    group_size: int
    shards: int
    slice_counts: tuple[int, int] = (1, 1)
    cost_model: CostModel = CostModel()

    @property
    def slices(self) -> Iterator[MatrixSlice]:
        """The slices of all layout groups."""
        return itertools.chain.from_iterable(layout.slices for layout in self.layouts)

    @property
    def matrices(self) -> int:
        """The number of matrices of a group of devices."""
        return sum(layout.matrices for layout in self.layouts)

    @property
    def column_shards(self) -> int:
        """The number of devices that share each shared matrix; 1 if none is shared."""
        return max(layout.column_shards for layout in self.layouts)

    @property
    def active_devices(self) -> int:
        """The number of devices of a group that hold a column shard."""
        return sum(layout.slots for layout in self.layouts if layout.column_shards > 1)

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
        """What each device sends: both ways, and for sums of Gram matrices.

        Bytes that stay on the device are not counted.
        """
        if not self.matrices:
            return Traffic()
        of_shards, of_replicas = self.slice_counts
        replicas = self.group_size // self.shards
        exchanged = all_to_all(self.nbytes, of_shards, self.shards // of_shards).times(2)
        gathered = all_gather(self.nbytes, of_replicas, replicas // of_replicas)
        # Gram matrices are added in the accumulator's dtype, gathered in the bucket's.
        entries = self._gram**2
        added = all_reduce(
            entries * max(4, self.dtype.itemsize),
            entries * self.dtype.itemsize,
            self.column_shards,
            slow=self._crosses_slices,
        )
        return exchanged.plus(gathered).plus(added.times(self._segments))

    @property
    def flops(self) -> int:
        """The FLOPs of each device, counted as in ``newton_schulz/restarts.py``."""
        m, segments = self._gram, self._segments
        square_products = 4 * self.cost_model.steps - 3 * segments
        one = 4 * segments * m * math.prod(self.shape) + 2 * square_products * m**3
        return self.matrices_per_device * one

    @property
    def _gram(self) -> int:
        """The rows of the Gram matrices; a column shard need not be wide."""
        m, n = self.shape
        return min(m, n * self.column_shards)

    @property
    def _segments(self) -> int:
        m, n = self.shape
        return self.cost_model.segments(m, n * self.column_shards)

    @property
    def _crosses_slices(self) -> bool:
        """Whether devices of several slices share the columns of one matrix."""
        of_shards, of_replicas = self.slice_counts
        neighbours = self.group_size if of_shards == 1 else self.shards
        neighbours //= of_replicas if of_shards == 1 else of_shards
        return neighbours % self.column_shards > 0

    @property
    def cost(self) -> int:
        """The cost of each device, in FLOPs."""
        return self.cost_model.cost(self.flops, self.traffic)


def count_devices(axes: MeshAxes, mesh_shape: Mapping[str, int]) -> int:
    """The number of devices along axes of the mesh."""
    return math.prod(mesh_shape[name] for name in axes)
