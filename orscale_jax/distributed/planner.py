"""The plan of a mesh: which devices orthogonalize which matrices.

Every device should hold whole matrices during Newton–Schulz, so that nothing is reduced
inside an iteration and no device repeats the work of another. Matrices of one shape that
are sharded alike share a bucket: by one all-to-all each device sends its shards to the
devices that orthogonalize them, and by another the results return. Replicas need only the
way back, and matrices that are whole on their devices are not sent.

After all devices have received equally many matrices, a remainder is left that would keep
a few devices busy and the others idle. Its matrices may have their columns sharded over
several devices, which add up their Gram matrices in every iteration. Remainders of
several shapes may also share a bucket, padded with zeros, which Newton–Schulz keeps, to
one shape. In such a bucket only the widest matrices may be sharded, over devices that
would be idle. The plan is the one that costs least, counting operations, bytes and
messages.

Devices that hold replicas need not share the work: along axes of the mesh where that
costs less, they all do it, and send nothing.

Nothing here imports JAX.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from orscale_jax.distributed.buckets import (
    Bucket,
    LayoutGroup,
    MatrixSlice,
    ShardedArray,
    count_devices,
)
from orscale_jax.distributed.costs import CostModel
from orscale_jax.distributed.mesh_shape import MeshShape

DEFAULT_COSTS = CostModel()


def plan_buckets(
    arrays: Sequence[ShardedArray],
    mesh: MeshShape,
    stack_bytes: int,
    cost_model: CostModel = DEFAULT_COSTS,
) -> tuple[Bucket, ...]:
    """Plan which matrices are sent together, and between which devices.

    Args:
      arrays: The arrays of matrices, tall or wide.
      mesh: The mesh, and which of its links are slow.
      stack_bytes: The largest stack of a device. An array that exceeds it is alone.
      cost_model: The costs by which plans are compared.

    Returns:
      Buckets in the order of their first arrays, by factors of the mesh's axes. Each
      matrix is in one of them.
    """
    over_mesh = [array.over(mesh) for array in arrays]
    divisions = [
        _cheapest_division(bucket, mesh)
        for bucket in _group_alike(over_mesh, mesh, cost_model)
    ]
    merged = _merge([each for each in divisions if each.remainder.matrices], mesh)
    staying = {entry.remainders for entry in merged if entry.bucket is None}
    buckets = [entry.bucket for entry in merged if entry.bucket]
    buckets += [
        each.whole if (each.remainder,) in staying else each.even for each in divisions
    ]
    return tuple(sorted(part for j in buckets for part in _split(j, stack_bytes)))


def local_matrices(array: ShardedArray, mesh: MeshShape) -> int:
    """The number of the array's matrices of which a device holds a shard."""
    batch = len(array.shape) - 2
    whole = math.prod(array.shape[:batch])
    sharded = (count_devices(axes, mesh.factors) for axes in array.axes[:batch])
    return whole // math.prod(sharded)


def median_flops(buckets: Iterable[Bucket], mesh: MeshShape) -> int:
    """The FLOPs of the median device, without those that it spends on padding."""
    lengths = list(mesh.factors.values())
    flops = np.zeros(lengths)
    place_along = dict(zip(mesh.factors, np.indices(lengths, sparse=True), strict=True))
    for bucket in buckets:
        place: Any = 0
        for factor in bucket.replica_axes + bucket.shard_axes:
            place = place * mesh.factors[factor] + place_along[factor]
        slots = sum(layout.slots for layout in bucket.layouts)
        most = bucket.matrices_per_device
        own = np.clip(slots - place * most, 0, most)
        flops = flops + own * (bucket.flops // max(1, most))
    return int(np.median(flops))


def _group_alike(
    arrays: Sequence[ShardedArray], mesh: MeshShape, cost_model: CostModel
) -> list[Bucket]:
    """One bucket for all matrices of one shape and one sharding."""
    alike: dict[Any, list[MatrixSlice]] = {}
    for index, array in enumerate(arrays):
        batch_axes = frozenset(name for axes in array.axes[:-2] for name in axes)
        # Transposing matrices that stay where they are would cost a copy for nothing.
        transposed = not (batch_axes.issuperset(mesh.factors) or array.is_wide)
        sent = array.transposed if transposed else array
        *_, rows, columns = sent.axes
        key = (sent.shape[-2:], array.dtype, batch_axes, rows, columns)
        part = MatrixSlice(index, 0, local_matrices(array, mesh), transposed)
        alike.setdefault(key, []).append(part)
    return [
        _bucket(key, tuple(slices), mesh, cost_model) for key, slices in alike.items()
    ]


def _bucket(
    key: Any, slices: tuple[MatrixSlice, ...], mesh: MeshShape, cost_model: CostModel
) -> Bucket:
    shape, dtype, batch_axes, rows, columns = key
    shard_axes = tuple(name for name in mesh.factors if name in {*rows, *columns})
    replica_axes = tuple(
        name for name in mesh.factors if name not in {*batch_axes, *shard_axes}
    )
    shards = count_devices(shard_axes, mesh.factors)
    return Bucket(
        layouts=(LayoutGroup(slices, rows, columns),),
        shape=shape,
        dtype=dtype,
        shard_axes=shard_axes,
        replica_axes=replica_axes,
        group_size=shards * count_devices(replica_axes, mesh.factors),
        shards=shards,
        slice_counts=(_slices(shard_axes, mesh), _slices(replica_axes, mesh)),
        cost_model=cost_model,
    )


def _slices(factors: Sequence[str], mesh: MeshShape) -> int:
    """The number of slices among which devices along these factors are."""
    slow = tuple(factor for factor in factors if factor in mesh.slow)
    return count_devices(slow, mesh.factors)


def _repeated(bucket: Bucket, mesh: MeshShape) -> Iterator[Bucket]:
    """The bucket, and those whose work is repeated along some axes of its replicas."""
    # Where messages are free, matrices stand for larger ones: these share fast links.
    free = not bucket.cost_model.hardware.fast.seconds_per_message
    optional = [name for name in bucket.replica_axes if name in mesh.slow or not free]
    for count in range(len(optional) + 1):
        for repeated in itertools.combinations(optional, count):
            replica_axes = tuple(
                name for name in bucket.replica_axes if name not in repeated
            )
            yield bucket._replace(
                replica_axes=replica_axes,
                group_size=bucket.shards * count_devices(replica_axes, mesh.factors),
                slice_counts=(bucket.slice_counts[0], _slices(replica_axes, mesh)),
            )


class _Division(NamedTuple):
    """A bucket in two parts.

    Attributes:
      whole: The bucket.
      even: As many of its matrices as give all devices equally many.
      remainder: The others, whose replicas have not been left out.
    """

    whole: Bucket
    even: Bucket
    remainder: Bucket

    @property
    def cost_of_staying(self) -> int:
        """The cost of the remainder in the same bucket as the rest."""
        return self.whole.cost - self.even.cost


def _cheapest_division(bucket: Bucket, mesh: MeshShape) -> _Division:
    """The bucket in two parts, the even one repeated along some axes or none."""

    def cost(division: _Division) -> int:
        remainder = division.remainder
        alone = _cheapest((remainder,), mesh) if remainder.matrices else None
        apart = [division.even.cost + alone.cost] if alone else []
        return min([division.whole.cost, *apart])

    repeated = _repeated(bucket, mesh)
    return min((_divide(whole, bucket) for whole in repeated), key=cost)


def _divide(whole: Bucket, shared: Bucket) -> _Division:
    """Divide a bucket; ``shared`` is the same one, repeated along no axes."""
    [layout] = whole.layouts
    count = layout.matrices // whole.group_size * whole.group_size
    before, after = [], []
    for part in layout.slices:
        middle = part.start + min(max(count, 0), part.matrices)
        before.append(part._replace(stop=middle))
        after.append(part._replace(start=middle))
        count -= part.matrices
    return _Division(whole, _with_slices(whole, before), _with_slices(shared, after))


def _with_slices(bucket: Bucket, slices: Iterable[MatrixSlice]) -> Bucket:
    [layout] = bucket.layouts
    filled = tuple(part for part in slices if part.matrices)
    return bucket._replace(layouts=(layout._replace(slices=filled),))


class _Merged(NamedTuple):
    """Remainders, the cheapest bucket that holds them all, and what it costs.

    A remainder that nothing improves has no bucket, and stays with the rest of its own.
    """

    remainders: tuple[Bucket, ...]
    bucket: Bucket | None
    cost: int


def _merge(divisions: Sequence[_Division], mesh: MeshShape) -> list[_Merged]:
    """Merge pairs of remainders as long as that saves anything, the most first."""

    @functools.cache
    def cheapest(remainders: tuple[Bucket, ...]) -> _Merged | None:
        bucket = _cheapest(remainders, mesh)
        return bucket and _Merged(remainders, bucket, bucket.cost)

    merged = []
    for division in divisions:
        remainders = (division.remainder,)
        stays = _Merged(remainders, None, division.cost_of_staying)
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
        _in_shape(remainders, (m, remainder.shape[1] // share), column_shards)
        for column_shards in _divisors(math.gcd(group_size, m))
        for remainder in remainders
        for share in {1, column_shards}
        if remainder.shape[1] % share == 0
    )
    fitting = [
        candidate
        for bucket in filter(None, shared)
        for candidate in _repeated(bucket, mesh)
        if _fits(candidate, mesh)
    ]
    return min(fitting, key=lambda bucket: bucket.cost, default=None)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _in_shape(
    remainders: Sequence[Bucket], shape: tuple[int, int], column_shards: int
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
    ordered = sorted(layouts, key=lambda layout: (-layout.column_shards, layout))
    return remainders[0]._replace(layouts=tuple(ordered), shape=shape)


def _fits(bucket: Bucket, mesh: MeshShape) -> bool:
    """Whether shards have equal parts, and devices one matrix where any is shared."""
    alone = len(bucket.layouts) == 1 == bucket.column_shards
    shareable = bucket.group_size % bucket.column_shards == 0
    return (
        shareable
        and (bucket.matrices_per_device == 1 or alone)
        and all(
            size % count_devices(axes, mesh.factors) == 0
            for layout in bucket.layouts
            for size, axes in zip(bucket.shape, layout.axes, strict=True)
        )
    )


def _split(bucket: Bucket, stack_bytes: int) -> Iterator[Bucket]:
    """Split into as few stacks as the limit allows, of about one length.

    All but the last are full: where a stack is not, a device orthogonalizes zeros.
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
        if stack and held + part.matrices > length:
            yield _with_slices(bucket, stack)
            stack, held = [], 0
        stack.append(part)
        held += part.matrices
    if stack:
        yield _with_slices(bucket, stack)
