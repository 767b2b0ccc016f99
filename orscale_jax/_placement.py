"""Where on a mesh each matrix is orthogonalized, decided before there is any array.

Every device should hold whole matrices during Newton–Schulz, so that nothing is reduced
inside an iteration and nobody computes what another one does. Arrays whose matrices have
one shape and are sharded alike travel together: each device sends its pieces to the
matrices' owners, by one all-to-all, orthogonalizes the matrices that it owns, and sends
the pieces of the results back by another. Devices that hold copies need the way back
alone, and matrices that lie whole on their devices do not travel.

What is left over when all devices have had the same number would leave most of them idle.
It may be shared, each matrix among several devices that hold some of its columns and add
up their Gram matrices in every iteration; and it may travel with what is left over of
other shapes, all padded with zeros to one: Newton–Schulz keeps zeros. Then the widest
alone may be shared, by devices that would be idle. Whatever costs least is done, by the
count of operations and of bytes.
"""

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Axes = tuple[str, ...]

# What plans are compared by. An H100 multiplies at 989 TFLOP/s and sends 450 GB/s to its
# neighbours, a TPU v5p 459 TFLOP/s and 300 GB/s; Newton–Schulz has five steps.
FLOPS_PER_BYTE = 2000
STEPS = 5


class Sharded(NamedTuple):
    """What decides where an array of matrices goes.

    Attributes:
      shape: ``(*batch, m, n)``, of the whole array.
      dtype: Of the entries.
      axes: For each axis, those of the mesh that it is sharded over.
      turns: Whether square matrices may travel as their transposes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[Axes, ...]
    turns: bool = True

    @property
    def is_wide(self) -> bool:
        """Whether m is below n; squares that turn are wide by how they are sharded.

        Those that are sharded like each other's transposes can travel together then, and
        with wide ones that are sharded by rows.
        """
        *_, m, n = self.shape
        *_, rows, columns = self.axes
        by_rows = (bool(columns), rows) <= (bool(rows), columns)
        return m < n or (m == n and (by_rows or not self.turns))

    @property
    def transposed(self) -> "Sharded":
        """Of the transposed matrices."""
        *batch, m, n = range(len(self.shape))
        order = (*batch, n, m)
        return self._replace(
            shape=tuple(self.shape[i] for i in order),
            axes=tuple(self.axes[i] for i in order),
        )

    def over(self, names: Container[str]) -> "Sharded":
        """Over these axes of the mesh alone."""
        kept = (tuple(name for name in axes if name in names) for axes in self.axes)
        return self._replace(axes=tuple(kept))


class Part(NamedTuple):
    """Some of an array's matrices.

    Attributes:
      array: Index of the array.
      start: The first, of those that a device has a part in.
      stop: After the last.
      transposed: Whether they travel as their transposes.
    """

    array: int
    start: int
    stop: int
    transposed: bool

    @property
    def matrices(self) -> int:
        return self.stop - self.start


class Leg(NamedTuple):
    """Matrices of a journey whose pieces lie alike.

    Attributes:
      parts: The matrices.
      rows: Axes of the mesh over which their rows are sharded.
      columns: Axes over which their columns are.
      sharers: How many devices share the columns of one matrix.
    """

    parts: tuple[Part, ...]
    rows: Axes
    columns: Axes
    sharers: int = 1

    @property
    def matrices(self) -> int:
        return sum(part.matrices for part in self.parts)

    @property
    def axes(self) -> tuple[Axes, Axes]:
        """Of the mesh, which divide them into pieces; where equal, of one shape."""
        return self.rows, self.columns

    @property
    def places(self) -> int:
        """How many devices take a matrix, or columns of one."""
        return self.matrices * self.sharers


class Journey(NamedTuple):
    """Matrices that go through Newton–Schulz together, and between which devices.

    The devices fall into groups that hold the same matrices, and every group does the
    same with its own.

    Attributes:
      legs: Of the matrices, in the order of the devices that they go to: shared ones
        first, all by as many devices.
      shape: ``(m, n)`` of a matrix, or of a device's columns of one; smaller ones are
        padded. Those that travel are wide.
      dtype: Of the entries.
      axes: Axes of the mesh over which matrices are in pieces.
      copies: Axes along which the devices of a group hold copies.
      owners: How many devices are in a group.
      pieces: How many of them hold pieces of one matrix, without copies.
    """

    legs: tuple[Leg, ...]
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    axes: Axes
    copies: Axes
    owners: int
    pieces: int

    @property
    def parts(self) -> Iterator[Part]:
        """Of all legs."""
        return itertools.chain.from_iterable(leg.parts for leg in self.legs)

    @property
    def matrices(self) -> int:
        """How many a group of devices has."""
        return sum(leg.matrices for leg in self.legs)

    @property
    def sharers(self) -> int:
        """How many devices share the columns of one matrix, where any do."""
        return max(leg.sharers for leg in self.legs)

    @property
    def shared_places(self) -> int:
        """How many devices of a group have some columns of a matrix."""
        return sum(leg.places for leg in self.legs if leg.sharers > 1)

    @property
    def rounds(self) -> int:
        """How many matrices each device orthogonalizes; of the last some are zeros."""
        return math.ceil(sum(leg.places for leg in self.legs) / self.owners)

    @property
    def nbytes(self) -> int:
        """Of the stack on each device."""
        return self.rounds * math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_sent(self) -> int:
        """By each device, there and back, and for sums of Gram matrices.

        What it keeps for itself is not counted.
        """
        all_to_all = self.nbytes * (self.pieces - 1) // self.pieces
        gathered = self.nbytes * (self.owners // self.pieces - 1)
        # Gram matrices are added in the accumulator's dtype, and gathered in the other.
        entry = max(4, self.dtype.itemsize) + self.dtype.itemsize
        gram = self._gram**2 * entry * (self.sharers - 1) // self.sharers
        return 2 * all_to_all + gathered + STEPS * gram

    @property
    def flops(self) -> int:
        """Of each device."""
        m = self._gram
        return STEPS * self.rounds * (4 * m * math.prod(self.shape) + 2 * m**3)

    @property
    def _gram(self) -> int:
        """Rows of the Gram matrices; some columns of a wide matrix need not be wide."""
        m, n = self.shape
        return min(m, n * self.sharers)

    @property
    def cost(self) -> int:
        """Of each device, in FLOPs."""
        return self.flops + FLOPS_PER_BYTE * self.bytes_sent


def plan(
    arrays: Sequence[Sharded], sizes: Mapping[str, int], max_bytes: int
) -> tuple[Journey, ...]:
    """Which matrices travel together.

    Args:
      arrays: The arrays of matrices, tall or wide.
      sizes: The lengths of the mesh's axes.
      max_bytes: What the stack of a device may have. An array that has more is alone.

    Returns:
      Journeys, each matrix in one of them, ordered by their first arrays.
    """
    # An axis of one device divides nothing, and would keep apart what lies alike.
    sizes = {name: size for name, size in sizes.items() if size > 1}
    kinds = _kinds([array.over(sizes) for array in arrays], sizes)
    divided = [_divided(kind) for kind in kinds]
    rests = [rest for _, rest in divided if rest.matrices]
    merged = _merged(rests, sizes)
    journeys = [journey for journey in merged if journey not in rests]
    for kind, (full, rest) in zip(kinds, divided, strict=True):
        # A rest for which there is nothing better stays with its kind.
        journeys += _stacks(kind if rest in merged else full, max_bytes)
    return tuple(sorted(journeys))


def local_matrices(array: Sharded, sizes: Mapping[str, int]) -> int:
    """How many matrices of the array a device has a part in."""
    batch = len(array.shape) - 2
    whole = math.prod(array.shape[:batch])
    return whole // math.prod(devices(axes, sizes) for axes in array.axes[:batch])


def devices(axes: Axes, sizes: Mapping[str, int]) -> int:
    """How many devices there are along axes of the mesh."""
    return math.prod(sizes[name] for name in axes)


def _kinds(arrays: Sequence[Sharded], sizes: Mapping[str, int]) -> list[Journey]:
    """All matrices of one shape that are sharded alike."""
    alike: dict[Any, list[Part]] = {}
    for index, array in enumerate(arrays):
        apart = frozenset(name for axes in array.axes[:-2] for name in axes)
        # Transposing what stays where it is would cost a copy and gain nothing.
        transposed = not (apart.issuperset(sizes) or array.is_wide)
        sent = array.transposed if transposed else array
        *_, rows, columns = sent.axes
        key = (sent.shape[-2:], array.dtype, apart, rows, columns)
        part = Part(index, 0, local_matrices(array, sizes), transposed)
        alike.setdefault(key, []).append(part)
    return [_kind(key, tuple(parts), sizes) for key, parts in alike.items()]


def _kind(key: Any, parts: tuple[Part, ...], sizes: Mapping[str, int]) -> Journey:
    shape, dtype, apart, rows, columns = key
    axes = tuple(name for name in sizes if name in {*rows, *columns})
    copies = tuple(name for name in sizes if name not in {*apart, *axes})
    pieces = devices(axes, sizes)
    owners = pieces * devices(copies, sizes)
    legs = (Leg(parts, rows, columns),)
    return Journey(legs, shape, dtype, axes, copies, owners, pieces)


def _divided(kind: Journey) -> tuple[Journey, Journey]:
    """As many matrices as all devices can have alike, and the rest."""
    [leg] = kind.legs
    count = leg.matrices // kind.owners * kind.owners
    before, after = [], []
    for part in leg.parts:
        middle = part.start + min(max(count, 0), part.matrices)
        before.append(part._replace(stop=middle))
        after.append(part._replace(start=middle))
        count -= part.matrices
    return _with_parts(kind, before), _with_parts(kind, after)


def _with_parts(kind: Journey, parts: Iterable[Part]) -> Journey:
    [leg] = kind.legs
    filled = tuple(part for part in parts if part.matrices)
    return kind._replace(legs=(leg._replace(parts=filled),))


class _Round(NamedTuple):
    """What one journey of one round is made of."""

    kinds: tuple[Journey, ...]
    journey: Journey


def _merged(rests: Sequence[Journey], sizes: Mapping[str, int]) -> list[Journey]:
    """Two of them in one as long as that saves anything, the best saving first."""
    rounds = [_Round((rest,), _cheapest((rest,), sizes) or rest) for rest in rests]
    while True:
        pairs = [
            (one.journey.cost + other.journey.cost - both.cost, one, other, both)
            for one, other in itertools.combinations(rounds, 2)
            if (both := _cheapest(one.kinds + other.kinds, sizes))
        ]
        best = max(pairs, key=lambda pair: pair[0], default=None)
        if best is None or best[0] <= 0:
            return [found.journey for found in rounds]
        _, one, other, both = best
        rounds = [found for found in rounds if found not in (one, other)]
        rounds.append(_Round(one.kinds + other.kinds, both))


def _cheapest(kinds: Sequence[Journey], sizes: Mapping[str, int]) -> Journey | None:
    """One round of all kinds, if they travel between the same devices and fit."""
    first = kinds[0]
    between = {(kind.dtype, kind.axes, kind.copies, kind.owners) for kind in kinds}
    if len(between) > 1:
        return None
    m = max(kind.shape[0] for kind in kinds)
    counts = range(1, first.owners + 1)
    candidates = (
        _in_shape(kinds, (m, kind.shape[1] // share), count)
        for count in counts
        if first.owners % count == 0 == m % count
        for kind in kinds
        for share in {1, count}
        if kind.shape[1] % share == 0
    )
    fitting = [journey for journey in candidates if journey and _fits(journey, sizes)]
    return min(fitting, key=lambda journey: journey.cost, default=None)


def _in_shape(
    kinds: Sequence[Journey], shape: tuple[int, int], sharers: int
) -> Journey | None:
    """A journey of all kinds, where those with more columns are shared, if that does."""
    _, n = shape
    parts: dict[Any, list[Part]] = {}
    for kind in kinds:
        [leg] = kind.legs
        needed = 1 if kind.shape[1] <= n else sharers
        if kind.shape[1] > n * needed:
            return None
        parts.setdefault((leg.rows, leg.columns, needed), []).extend(leg.parts)
    legs = [Leg(tuple(sorted(theirs)), *key) for key, theirs in parts.items()]
    ordered = sorted(legs, key=lambda leg: (-leg.sharers, leg))
    return kinds[0]._replace(legs=tuple(ordered), shape=shape)


def _fits(journey: Journey, sizes: Mapping[str, int]) -> bool:
    return journey.rounds == 1 and all(
        size % devices(axes, sizes) == 0
        for leg in journey.legs
        for size, axes in zip(journey.shape, (leg.rows, leg.columns), strict=True)
    )


def _stacks(kind: Journey, max_bytes: int) -> Iterator[Journey]:
    """As few stacks as there can be, of about one length.

    All but the last are full: where a stack is not, a device computes zeros.
    """
    nbytes = max(1, math.prod(kind.shape) * kind.dtype.itemsize)
    capacity = max(1, max_bytes // nbytes) * kind.owners
    stacks = max(1, math.ceil(kind.matrices / capacity))
    length = math.ceil(kind.matrices / stacks / kind.owners) * kind.owners
    stack: list[Part] = []
    held = 0
    for part in kind.parts:
        if stack and held + part.matrices > length:
            yield _with_parts(kind, stack)
            stack, held = [], 0
        stack.append(part)
        held += part.matrices
    if stack:
        yield _with_parts(kind, stack)
