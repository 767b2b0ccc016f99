"""The plan of a mesh: which devices orthogonalize which matrices, and what that costs.

Every device should hold whole matrices during Newton–Schulz, so that nothing is reduced
inside an iteration and no device repeats the work of another. Matrices of one shape that
are sharded alike share a bucket: by one all-to-all each device sends its shards to the
devices that orthogonalize them, and by another the results return. Replicas need only the
way back, and matrices that are whole on their devices are not sent.

After all devices have received equally many matrices, a remainder is left that would keep
a few devices busy and the others idle. Its matrices may have their columns sharded over
several devices, which add up their Gram matrices in every iteration. Remainders of
several shapes may also share a bucket, padded to one shape with zeros, which
Newton–Schulz keeps; only the widest may then be sharded. Devices that hold replicas need
not share the work: where that costs less, they all do it, and send nothing, or a few
neighbours share what the others repeat. The plan is the one that costs least, counting
operations, bytes and messages.

Links inside a slice of a TPU pod, or inside a node of GPUs, are ten times or more as fast
as those between slices or nodes. An axis that crosses slow links part of the way has two
factors: a slow one, outermost, and a fast one. Plans are made in terms of factors.

Nothing here imports JAX.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orscale_jax.newton_schulz.hardware import VIRTUAL, Hardware
from orscale_jax.newton_schulz.restarts import is_cheaper

MeshAxes = tuple[str, ...]


# Of an axis of fast links at least so many neighbours share work. In parts of four, GPT-2
# on eight v5e chips sent 5 % less, and took a fifth more temporaries.
SMALLEST_PART = 8


class DeviceGroup(NamedTuple):
    """The devices along some factors of a mesh, and how collectives name them."""

    axes: tuple[str, ...]  # Of the mesh, to which the factors belong.
    lengths: tuple[int, ...]  # Of all factors of these axes, one perhaps in two parts.
    order: tuple[int, ...]  # The group's factors among them, the most major first.

    @property
    def size(self) -> int:
        """The number of devices in the group."""
        return math.prod(self.lengths[i] for i in self.order)

    @property
    def is_whole(self) -> bool:
        """Whether it is all devices along the axes, in their order."""
        return self.order == tuple(range(len(self.lengths)))

    def index_groups(self, size: int | None = None) -> list[list[int]] | None:
        """The ``axis_index_groups`` of a collective along ``axes``; None for all devices.

        ``size`` is the number of neighbours in a part of the group; None for all of it.
        """
        if self.is_whole and size is None:
            return None
        others = [i for i in range(len(self.lengths)) if i not in self.order]
        devices = np.arange(math.prod(self.lengths)).reshape(self.lengths)
        ordered = devices.transpose(*others, *self.order)
        return ordered.reshape(-1, self.size if size is None else size).tolist()


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The lengths of a mesh's axes, and the number of slices along those that cross any.

    The slices along an axis are consecutive parts of it, of one length.
    """

    sizes: Mapping[str, int]
    slices: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def factors(self) -> dict[str, int]:
        """The lengths of the factors, slow ones first, without those of length 1."""
        lengths = {k: v for name in self.sizes for k, v in self._lengths(name).items()}
        ordered = sorted(lengths, key=lambda factor: factor not in self.slow)
        return {factor: lengths[factor] for factor in ordered if lengths[factor] > 1}

    @functools.cached_property
    def slow(self) -> frozenset[str]:
        """The factors whose links are slow."""
        return frozenset(
            next(iter(self._lengths(name))) for name, n in self.slices.items() if n > 1
        )

    def factors_of(self, axes: Iterable[str]) -> MeshAxes:
        """The factors of axes of the mesh, the most major first."""
        lengths = (self._lengths(name) for name in axes if name in self.sizes)
        return tuple(
            factor for each in lengths for factor in each if factor in self.factors
        )

    def group(self, factors: Sequence[str], size: int) -> DeviceGroup:
        """``size`` neighbours along factors, of which the first is the most major.

        They are all devices along the others, and along the first all or a part.
        """
        axis_of = {factor: name for name in self.sizes for factor in self._lengths(name)}
        axes = tuple(dict.fromkeys(axis_of[factor] for factor in factors))
        every = self.factors_of(axes)
        lengths = [self.factors[factor] for factor in every]
        first, *others = (every.index(factor) for factor in factors)
        part = size // count_devices(factors[1:], self.factors)
        if part < lengths[first]:  # It counts as two factors.
            lengths[first : first + 1] = lengths[first] // part, part
            first, *others = (i + (i >= first) for i in (first, *others))
        return DeviceGroup(axes, tuple(lengths), (first, *others))

    def _lengths(self, name: str) -> dict[str, int]:
        size, slices = self.sizes[name], self.slices.get(name, 1)
        if slices in (1, size):
            return {name: size}
        return {f"{name} over slices": slices, name: size // slices}


class Traffic(NamedTuple):
    """What each device sends: over fast links, inside a slice, and over slow ones."""

    fast_bytes: int = 0
    slow_bytes: int = 0
    fast_messages: int = 0
    slow_messages: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes over links of both kinds."""
        return self.fast_bytes + self.slow_bytes

    def plus(self, other: "Traffic") -> "Traffic":
        """The traffic of both."""
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
        """The time of a cost."""
        return cost / self.hardware.flops_per_second


DEFAULT_COSTS = CostModel()


class ShardedArray(NamedTuple):
    """An array of matrices ``(*batch, m, n)`` on a mesh, in the dtype that is sent."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[MeshAxes, ...]  # For each of its axes, those over which it is sharded.
    may_transpose: bool = True  # Whether square matrices may be sent transposed.

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


class MatrixSlice(NamedTuple):
    """Consecutive matrices of one array, of those of which a device holds a shard."""

    array: int
    start: int
    stop: int
    transposed: bool

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, order=True)
class LayoutGroup:
    """Matrices of a bucket that are sharded alike, over axes of the mesh."""

    slices: tuple[MatrixSlice, ...]
    row_axes: MeshAxes
    column_axes: MeshAxes
    column_shards: int = 1  # The devices that share the columns of one matrix.

    @functools.cached_property
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
      replica_axes: The axes along which devices that hold replicas share the work: along
        the first perhaps only some neighbours.
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
    cost_model: CostModel = DEFAULT_COSTS

    @property
    def slices(self) -> Iterator[MatrixSlice]:
        """The slices of all layout groups."""
        return itertools.chain.from_iterable(layout.slices for layout in self.layouts)

    @property
    def matrices(self) -> int:
        """The number of matrices of a group of devices."""
        return sum(layout.matrices for layout in self.layouts)

    @property
    def replicas(self) -> int:
        """The number of replicas in a group of devices."""
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
        if neighbours % self.column_shards > 0:
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


class Group(NamedTuple):
    """Matrices that go through Newton–Schulz together, as :func:`describe` shows them.

    On a mesh the devices form groups. Each group holds the shards of different matrices
    (experts that are sharded by expert), or there is one group, which holds all of them.

    Attributes:
      names: The names of the leaves, or of their blocks.
      matrices: ``(count, m, n, devices)`` for each kind of matrix in a group of devices:
        how many they are, their shape, and how many devices share the columns of each.
        Smaller ones are padded to this shape; ``m <= n`` if they are stacked or sent.
      devices: The number of devices in a group.
      matrices_per_device: The number of matrices on a device, with padding by zeros.
      bytes_sent: The bytes that each device sends: both ways, and during the iteration if
        matrices are shared.
      slow_bytes_sent: Those of the bytes that go to another slice.
    """

    names: tuple[str, ...]
    matrices: tuple[tuple[int, int, int, int], ...]
    devices: int = 1
    matrices_per_device: int = 0
    bytes_sent: int = 0
    slow_bytes_sent: int = 0


class Plan(NamedTuple):
    """What goes through Newton–Schulz together, and what a step of it costs on a mesh.

    Without a mesh there are only groups, the stacks of one device. Times are estimates
    from the rates in ``orscale_jax/distributed/plan.py``. They know of nothing but
    products of matrices and transfers: not of AdamW's parameters, launches of kernels, or
    the gradient and its collectives, which may compete for links or run beside all this.

    How much of the transfers a device waits for is the compiler's choice: at least
    ``exposed_seconds``, if they run one at a time beside products of other groups; all
    ``transfer_seconds``, if none is asynchronous, as on TPUs without compiler options.

    Attributes:
      groups: The matrices that are computed together, in the order of their first leaves.
      flops: The FLOPs of the busiest device.
      median_flops: The FLOPs of the median device that are not spent on padding.
      fast_bytes: The bytes that each device sends over fast links, inside its slice.
      slow_bytes: The bytes that each device sends to other slices.
      seconds: The time of the busiest device, with all transfers.
      median_seconds: That of the median device.
      transfer_seconds: The time of the transfers alone, which is that of every device.
      exposed_seconds: What of that no schedule hides behind products.
    """

    groups: tuple[Group, ...]
    flops: int = 0
    median_flops: int = 0
    fast_bytes: int = 0
    slow_bytes: int = 0
    seconds: float = 0.0
    median_seconds: float = 0.0
    transfer_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @classmethod
    def of(
        cls,
        buckets: Sequence[Bucket],
        names: Sequence[Sequence[str]],
        mesh: MeshShape,
        cost_model: CostModel,
    ) -> "Plan":
        """The buckets of a mesh, given the names of the arrays of each."""
        groups, flops, traffic = [], 0, Traffic()
        for bucket, own in zip(buckets, names, strict=True):
            counts: dict[int, int] = {}
            for layout in sorted(bucket.layouts, key=lambda layout: layout.column_shards):
                shards = layout.column_shards
                counts[shards] = counts.get(shards, 0) + layout.matrices
            m, n = bucket.shape
            group = Group(
                tuple(dict.fromkeys(own[part.array] for part in bucket.slices)),
                tuple((count, m, n * shards, shards) for shards, count in counts.items()),
                bucket.group_size,
                bucket.matrices_per_device,
                bucket.traffic.nbytes,
                bucket.traffic.slow_bytes,
            )
            groups.append(group)
            flops += bucket.flops
            traffic = traffic.plus(bucket.traffic)
        median = median_flops(buckets, mesh)
        costs = [cost_model.cost(each, traffic) for each in (flops, median, 0)]
        costs.append(_exposed_cost(buckets, cost_model))
        of_links = traffic.fast_bytes, traffic.slow_bytes
        return cls(
            tuple(groups), flops, median, *of_links, *map(cost_model.seconds, costs)
        )


class _Division(NamedTuple):
    """A bucket in two parts: as many matrices as all devices get equally, the rest."""

    whole: Bucket
    even: Bucket
    remainder: Bucket  # Its replicas have not been left out.


class _Merged(NamedTuple):
    """Remainders, the cheapest bucket that holds them all, and what it costs."""

    remainders: tuple[Bucket, ...]
    bucket: Bucket | None  # None where nothing improves one: it stays with its own.
    cost: int


def count_devices(axes: Iterable[str], mesh_shape: Mapping[str, int]) -> int:
    """The number of devices along axes of the mesh."""
    return math.prod(mesh_shape[name] for name in axes)


def plan_buckets(
    arrays: Sequence[ShardedArray],
    mesh: MeshShape,
    stack_bytes: int,
    cost_model: CostModel = DEFAULT_COSTS,
) -> tuple[Bucket, ...]:
    """Plan which matrices are sent together, and between which devices.

    An array that exceeds ``stack_bytes``, the largest stack of a device, is alone. The
    buckets, by factors of the mesh's axes, are in the order of their first arrays; each
    matrix is in one of them.
    """
    arrays = [
        array._replace(axes=tuple(map(mesh.factors_of, array.axes))) for array in arrays
    ]
    alike = _group_alike(arrays, mesh, cost_model)
    divisions = [_cheapest_division(bucket, mesh) for bucket in alike]
    merged = _merge([each for each in divisions if each.remainder.matrices], mesh)
    staying = {entry.remainders for entry in merged if entry.bucket is None}
    buckets = [entry.bucket for entry in merged if entry.bucket]
    buckets += [
        each.whole if (each.remainder,) in staying else each.even for each in divisions
    ]
    forms = [part for bucket in buckets for part in _as_they_are(bucket, stack_bytes)]
    return tuple(sorted(part for j in forms for part in _split(j, stack_bytes)))


def median_flops(buckets: Iterable[Bucket], mesh: MeshShape) -> int:
    """The FLOPs of the median device, without those that it spends on padding."""
    lengths = list(mesh.factors.values())
    flops = np.zeros(lengths)
    place_along = dict(zip(mesh.factors, np.indices(lengths, sparse=True), strict=True))
    for bucket in buckets:
        place: Any = 0
        for factor in bucket.replica_axes + bucket.shard_axes:
            place = place * mesh.factors[factor] + place_along[factor]
        place = place % bucket.group_size
        slots = sum(layout.slots for layout in bucket.layouts)
        most = bucket.matrices_per_device
        own = np.clip(slots - place * most, 0, most)
        flops = flops + own * (bucket.flops // max(1, most))
    return int(np.median(flops))


def slices_of_axes(names: Sequence[str], slice_of: np.ndarray) -> dict[str, int]:
    """The number of slices along each axis of a mesh that leads from one to another.

    ``slice_of`` is the slice of each device, in the shape of the mesh. An axis whose
    neighbours are in other slices at every step is wholly slow.
    """
    counts = {}
    for axis, name in enumerate(names):
        along = np.moveaxis(slice_of, axis, 0)
        size, together = len(along), 1
        for length in range(1, size + 1):
            if size % length == 0:
                blocks = along.reshape(-1, length, *along.shape[1:])
                together = length if (blocks == blocks[:, :1]).all() else together
        if together < size:
            counts[name] = size // together
    return counts


def slices_of_devices(sizes: Mapping[str, int], slices: Mapping[str, int]) -> Any:
    """A slice for each device of a mesh, from the number of slices along its axes."""
    index = np.zeros(tuple(sizes.values()), int)
    for axis, (name, size) in enumerate(sizes.items()):
        count = slices.get(name, 1)
        shape = [-1 if i == axis else 1 for i in range(len(sizes))]
        index = index * count + (np.arange(size) // (size // count)).reshape(shape)
    return index


def _exposed_cost(buckets: Sequence[Bucket], cost_model: CostModel) -> int:
    """The cost of transfers that no order of the buckets hides behind products."""
    work = sum(bucket.flops for bucket in buckets)
    sent = [[cost_model.cost(0, way) for way in bucket.ways] for bucket in buckets]
    exceeding = [sum(map(sum, sent)) - work]
    for bucket, ways in zip(buckets, sent, strict=True):  # Only others' hide its own.
        exceeding.append(sum(ways) - (work - bucket.flops))
    # All wait for the first bucket to arrive, and for the last one to return.
    first, last = (
        sorted((ways[at], index) for index, ways in enumerate(sent))[:2] for at in (0, 2)
    )
    ends = [
        before + after
        for (before, i), (after, j) in itertools.product(first, last)
        if i != j or before + after == 0  # What stays can be computed first and last.
    ]
    return max(0, *exceeding, min(ends, default=0))


def _group_alike(
    arrays: Sequence[ShardedArray], mesh: MeshShape, cost_model: CostModel
) -> list[Bucket]:
    """One bucket for all matrices of one shape and one sharding."""
    alike: dict[Any, list[MatrixSlice]] = {}
    for index, array in enumerate(arrays):
        batch_axes = frozenset(name for axes in array.axes[:-2] for name in axes)
        held = math.prod(array.shape[:-2]) // count_devices(batch_axes, mesh.factors)
        # Transposing matrices that stay where they are would cost a copy for nothing.
        transposed = not (batch_axes.issuperset(mesh.factors) or array.is_wide)
        shape, sides = array.shape[-2:], array.axes[-2:]
        if transposed:
            shape, sides = shape[::-1], sides[::-1]
        part = MatrixSlice(index, 0, held, transposed)
        alike.setdefault((shape, array.dtype, batch_axes, sides), []).append(part)
    buckets = []
    for (shape, dtype, batch_axes, (rows, columns)), slices in alike.items():
        shard_axes = tuple(name for name in mesh.factors if name in {*rows, *columns})
        shards = count_devices(shard_axes, mesh.factors)
        bucket = Bucket(
            layouts=(LayoutGroup(tuple(slices), rows, columns),),
            shape=shape,
            dtype=dtype,
            shard_axes=shard_axes,
            replica_axes=(),
            group_size=shards,
            shards=shards,
            slice_counts=(_slices(shard_axes, mesh), 1),
            cost_model=cost_model,
        )
        sharded = {*batch_axes, *shard_axes}
        replica_axes = tuple(name for name in mesh.factors if name not in sharded)
        buckets.append(_shared_along(bucket, replica_axes, mesh))
    return buckets


def _shared_along(
    bucket: Bucket, replica_axes: MeshAxes, mesh: MeshShape, groups: int = 1
) -> Bucket:
    """The bucket whose work is shared by the replicas along these axes.

    ``groups`` is the number of parts of the first axis, each of which repeats it.
    """
    slices = _slices(replica_axes, mesh)
    replicas = count_devices(replica_axes, mesh.factors)
    return bucket._replace(
        replica_axes=replica_axes,
        group_size=bucket.shards * replicas // groups,
        slice_counts=(bucket.slice_counts[0], max(1, slices // groups)),
    )


def _slices(factors: Sequence[str], mesh: MeshShape) -> int:
    """The number of slices among which devices along these factors are."""
    slow = tuple(factor for factor in factors if factor in mesh.slow)
    return count_devices(slow, mesh.factors)


def _repeated(bucket: Bucket, mesh: MeshShape) -> Iterator[Bucket]:
    """The bucket, and those whose work replicas repeat along axes, or parts of one."""
    # Where messages are free, matrices stand for larger ones: these share fast links.
    free = not bucket.cost_model.hardware.fast.seconds_per_message
    optional = [name for name in bucket.replica_axes if name in mesh.slow or not free]
    ways = [
        tuple(name for name in bucket.replica_axes if name not in repeated)
        for count in range(len(optional) + 1)
        for repeated in itertools.combinations(optional, count)
    ]
    for sharing in ways:
        yield _shared_along(bucket, sharing, mesh)
    for first, *others in filter(None, ways):
        length, least = mesh.factors[first], 2 if first in mesh.slow else SMALLEST_PART
        for groups in _divisors(length)[1:] if first in optional else ():
            if length // groups >= least:
                yield _shared_along(bucket, (first, *others), mesh, groups)


@functools.cache
def _divisors(n: int) -> list[int]:
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


def _cheapest_division(bucket: Bucket, mesh: MeshShape) -> _Division:
    """The bucket in two parts, the even one repeated along some axes or none."""
    [layout] = bucket.layouts
    cheapest = functools.cache(lambda remainder: _cheapest((remainder,), mesh))
    divisions = []
    for whole in _repeated(bucket, mesh):
        count = layout.matrices // whole.group_size * whole.group_size
        before, after = [], []
        for part in layout.slices:
            middle = part.start + min(max(count, 0), part.matrices)
            before.append(part._replace(stop=middle))
            after.append(part._replace(start=middle))
            count -= part.matrices
        even, remainder = _with_slices(whole, before), _with_slices(bucket, after)
        alone = cheapest(remainder) if remainder.matrices else None
        cost = min(whole.cost, even.cost + alone.cost) if alone else whole.cost
        divisions.append((cost, _Division(whole, even, remainder)))
    return min(divisions, key=lambda each: each[0])[1]


def _with_slices(bucket: Bucket, slices: Iterable[MatrixSlice]) -> Bucket:
    [layout] = bucket.layouts
    filled = tuple(part for part in slices if part.matrices)
    return bucket._replace(layouts=(dataclasses.replace(layout, slices=filled),))


def _merge(divisions: Sequence[_Division], mesh: MeshShape) -> list[_Merged]:
    """Merge pairs of remainders as long as that saves anything, the most first."""

    @functools.cache
    def cheapest(remainders: tuple[Bucket, ...]) -> _Merged | None:
        bucket = _cheapest(remainders, mesh)
        return bucket and _Merged(remainders, bucket, bucket.cost)

    merged = []
    for division in divisions:
        remainders = (division.remainder,)
        stays = _Merged(remainders, None, division.whole.cost - division.even.cost)
        alone = cheapest(remainders)
        merged.append(alone if alone and alone.cost < stays.cost else stays)
    while True:
        pairs = [
            (one.cost + other.cost - both.cost, one, other, both)
            for one, other in itertools.combinations(merged, 2)
            if (both := cheapest(one.remainders + other.remainders))
        ]
        best = max(pairs, key=lambda pair: pair[0], default=None)
        if best is None or best[0] <= 0:
            return merged
        _, one, other, both = best
        merged = [entry for entry in merged if entry not in (one, other)]
        merged.append(both)


def _cheapest(remainders: tuple[Bucket, ...], mesh: MeshShape) -> Bucket | None:
    """The cheapest bucket of all remainders; None if they cannot share one."""
    groups = {(r.dtype, r.shard_axes, r.replica_axes, r.group_size) for r in remainders}
    if len(groups) > 1:
        return None
    m = max(remainder.shape[0] for remainder in remainders)
    group_size = remainders[0].group_size
    shared = (
        _in_shape(remainders, (m, remainder.shape[1] // share), column_shards, mesh)
        for column_shards in _divisors(math.gcd(group_size, m))
        for remainder in remainders
        for share in {1, column_shards}
        if remainder.shape[1] % share == 0
    )
    fitting = [
        candidate
        for bucket in filter(None, shared)
        for candidate in _repeated(bucket, mesh)
        # Devices have one matrix where any is shared.
        if candidate.group_size % candidate.column_shards == 0
        and (
            candidate.matrices_per_device == 1
            or len(candidate.layouts) == 1 == candidate.column_shards
        )
    ]
    return min(fitting, key=lambda bucket: bucket.cost, default=None)


def _in_shape(
    remainders: Sequence[Bucket],
    shape: tuple[int, int],
    column_shards: int,
    mesh: MeshShape,
) -> Bucket | None:
    """A bucket of this shape, with column shards of wider matrices, if that fits."""
    _, n = shape
    slices: dict[Any, list[MatrixSlice]] = {}
    for remainder in remainders:
        [layout] = remainder.layouts
        needed = 1 if remainder.shape[1] <= n else column_shards
        if remainder.shape[1] > n * needed:
            return None
        key = (layout.row_axes, layout.column_axes, needed)
        slices.setdefault(key, []).extend(layout.slices)
    layouts = [LayoutGroup(tuple(sorted(some)), *key) for key, some in slices.items()]
    sides = (side for layout in layouts for side in zip(shape, layout.axes, strict=True))
    if any(size % count_devices(axes, mesh.factors) for size, axes in sides):
        return None  # Shards would be of unequal sizes.
    ordered = sorted(layouts, key=lambda layout: (-layout.column_shards, layout))
    return remainders[0]._replace(layouts=tuple(ordered), shape=shape)


def _as_they_are(bucket: Bucket, stack_bytes: int) -> Iterator[Bucket]:
    """The bucket or, of one that stays and exceeds a stack, the wide and the tall ones.

    Transposing matrices that stay where they are costs a copy, for fewer stacks at best.
    """
    by_form: dict[bool, list[MatrixSlice]] = {}
    for part in bucket.slices:
        by_form.setdefault(part.transposed, []).append(part)
    if bucket.group_size > 1 or bucket.nbytes <= stack_bytes or True not in by_form:
        yield bucket
        return
    for transposed, slices in by_form.items():
        own = _with_slices(bucket, [part._replace(transposed=False) for part in slices])
        yield own._replace(shape=bucket.shape[::-1]) if transposed else own


def _split(bucket: Bucket, stack_bytes: int) -> Iterator[Bucket]:
    """Split into as few stacks as the limit allows, of about one length.

    All but the last are full: where a stack is not, a device orthogonalizes zeros. An
    array is cut for that alone: more stacks are more products and exchanges to compile.
    """
    if len(bucket.layouts) > 1 or bucket.column_shards > 1:
        yield bucket  # It has one matrix for each device.
        return
    nbytes = max(1, math.prod(bucket.shape) * bucket.dtype.itemsize)
    capacity = max(1, stack_bytes // nbytes) * bucket.group_size
    stacks = max(1, math.ceil(bucket.matrices / capacity))
    per_device = math.ceil(bucket.matrices / stacks / bucket.group_size)
    length = per_device * bucket.group_size
    stack: list[MatrixSlice] = []
    held = 0
    for part in bucket.slices:
        missing = -held % bucket.group_size
        if stack and held + part.matrices > max(length, held + missing):
            middle = part.start + missing
            yield _with_slices(bucket, [*stack, part._replace(stop=middle)])
            part, stack, held = part._replace(start=middle), [], 0
        stack.append(part)
        held += part.matrices
    if stack:
        yield _with_slices(bucket, stack)
