"""Where on a mesh each matrix is orthogonalized, decided before there is any array.

Every device should hold whole matrices during Newton–Schulz, so that nothing is reduced
inside an iteration and nobody computes what another one does. Arrays whose matrices have
one shape and are sharded alike travel together: each device sends its pieces to the
matrices' owners, by one all-to-all, orthogonalizes the matrices that it owns, and sends
the pieces of the results back by another. Devices that hold copies need the way back
alone, and matrices that lie whole on their devices do not travel.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Axes = tuple[str, ...]


class Sharded(NamedTuple):
    """What decides where an array of matrices goes.

    Attributes:
      shape: ``(*batch, m, n)``, of the whole array.
      dtype: Of the entries.
      axes: For each axis, those of the mesh that it is sharded over.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[Axes, ...]

    @property
    def wide(self) -> "Sharded":
        """Of the transposed matrices, if they are tall."""
        if self.shape[-2] <= self.shape[-1]:
            return self
        *batch, m, n = range(len(self.shape))
        order = (*batch, n, m)
        return Sharded(
            tuple(self.shape[i] for i in order),
            self.dtype,
            tuple(self.axes[i] for i in order),
        )


class Journey(NamedTuple):
    """Matrices that go through Newton–Schulz together, and between which devices.

    The devices fall into groups that hold the same matrices, and every group does the
    same with its own.

    Attributes:
      members: Indices of the arrays.
      shape: ``(m, n)`` with ``m <= n`` where they travel: tall matrices are transposed.
      dtype: Of the entries.
      rows: Axes of the mesh over which the rows are sharded.
      columns: Axes over which the columns are.
      copies: Axes along which the devices of a group hold copies.
      matrices: How many a group has.
      owners: How many devices are in a group.
      pieces: How many of them hold pieces of one matrix, without copies.
    """

    members: tuple[int, ...]
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    rows: Axes
    columns: Axes
    copies: Axes
    matrices: int
    owners: int
    pieces: int

    @property
    def rounds(self) -> int:
        """How many matrices each device orthogonalizes; of the last some are zeros."""
        return math.ceil(self.matrices / self.owners)

    @property
    def nbytes(self) -> int:
        """Of the stack of whole matrices on each device."""
        return self.rounds * math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_sent(self) -> int:
        """By each device, there and back: what it keeps for itself is not counted."""
        all_to_all = self.nbytes * (self.pieces - 1) // self.pieces
        gathered = self.nbytes * (self.owners // self.pieces - 1)
        return 2 * all_to_all + gathered


def plan(
    arrays: Sequence[Sharded], sizes: Mapping[str, int], max_bytes: int
) -> tuple[Journey, ...]:
    """Which arrays travel together.

    Args:
      arrays: The arrays of matrices, tall or wide.
      sizes: The lengths of the mesh's axes.
      max_bytes: What the stack of a device may have. An array that has more is alone.

    Returns:
      Journeys, each array in one of them, ordered by their first members.
    """
    alike: dict[Any, list[int]] = {}
    for index, array in enumerate(arrays):
        apart = frozenset(name for axes in array.axes[:-2] for name in axes)
        # Transposing what stays where it is would cost a copy and gain nothing.
        sent = array if apart.issuperset(sizes) else array.wide
        *_, rows, columns = sent.axes
        key = (sent.shape[-2:], array.dtype, apart, rows, columns)
        alike.setdefault(key, []).append(index)
    journeys = [
        _journey(key, members, arrays, sizes)
        for key, found in alike.items()
        for members in _stacks(key, found, arrays, sizes, max_bytes)
    ]
    return tuple(sorted(journeys))


def local_matrices(array: Sharded, sizes: Mapping[str, int]) -> int:
    """How many matrices of the array a device has a part in."""
    batch = len(array.shape) - 2
    whole = math.prod(array.shape[:batch])
    return whole // math.prod(devices(axes, sizes) for axes in array.axes[:batch])


def _journey(
    key: Any, members: list[int], arrays: Sequence[Sharded], sizes: Mapping[str, int]
) -> Journey:
    shape, dtype, apart, rows, columns = key
    copies = tuple(n for n in sizes if n not in {*apart, *rows, *columns})
    pieces = devices(rows + columns, sizes)
    return Journey(
        members=tuple(members),
        shape=shape,
        dtype=dtype,
        rows=rows,
        columns=columns,
        copies=copies,
        matrices=sum(local_matrices(arrays[i], sizes) for i in members),
        owners=pieces * devices(copies, sizes),
        pieces=pieces,
    )


def _stacks(
    key: Any,
    members: list[int],
    arrays: Sequence[Sharded],
    sizes: Mapping[str, int],
    max_bytes: int,
) -> Iterator[list[int]]:
    """As few stacks as there can be, of about one length.

    All but the last are full: where a stack is not, a device computes zeros.
    """
    shape, dtype, apart, *_ = key
    owners = math.prod(size for name, size in sizes.items() if name not in apart)
    nbytes = max(1, math.prod(shape) * dtype.itemsize)
    capacity = max(1, max_bytes // nbytes) * owners
    counts = [local_matrices(arrays[index], sizes) for index in members]
    stacks = max(1, math.ceil(sum(counts) / capacity))
    length = math.ceil(sum(counts) / stacks / owners) * owners
    stack: list[int] = []
    held = 0
    for index, count in zip(members, counts, strict=True):
        if stack and held + count > length:
            yield stack
            stack, held = [], 0
        stack.append(index)
        held += count
    yield stack


def devices(axes: Axes, sizes: Mapping[str, int]) -> int:
    """How many devices there are along axes of the mesh."""
    return math.prod(sizes[name] for name in axes)
