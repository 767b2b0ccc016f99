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

Nothing here imports JAX.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from orscale_jax.distributed.costs import (
    Bucket,
    CostModel,
    LayoutGroup,
    MatrixRange,
    ShardedArray,
)
from orscale_jax.distributed.mesh import MeshShape, count_devices

# Of an axis of fast links at least so many neighbours share work. In parts of four, GPT-2
# on eight v5e chips sent 5 % less, and took a fifth more temporaries.
SMALLEST_PART = 8


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


def plan_buckets(
    arrays: Sequence[ShardedArray],
    mesh: MeshShape,
    stack_bytes: int,
    cost_model: CostModel,
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


def _group_alike(
    arrays: Sequence[ShardedArray], mesh: MeshShape, cost_model: CostModel
) -> list[Bucket]:
    """One bucket for all matrices of one shape and one sharding."""
    alike: dict[Any, list[MatrixRange]] = {}
    for index, array in enumerate(arrays):
        batch_axes = frozenset(name for axes in array.axes[:-2] for name in axes)
        held = math.prod(array.shape[:-2]) // count_devices(batch_axes, mesh.factors)
        # Transposing matrices that stay where they are would cost a copy for nothing.
        shape, sides = array.shape[-2:], array.axes[-2:]
        transposed = shape[0] > shape[1] and not batch_axes.issuperset(mesh.factors)
        if transposed:
            shape, sides = shape[::-1], sides[::-1]
        part = MatrixRange(index, 0, held, transposed)
        alike.setdefault((shape, array.dtype, batch_axes, sides), []).append(part)
    buckets = []
    for (shape, dtype, batch_axes, (rows, columns)), slices in alike.items():
        shard_axes = tuple(name for name in mesh.factors if name in {*rows, *columns})
        shards = count_devices(shard_axes, mesh.factors)
        bucket = Bucket(
            layouts=(LayoutGroup(tuple(slices), (rows, columns)),),
            shape=shape,
            dtype=dtype,
            shard_axes=shard_axes,
            replica_axes=(),
            group_size=shards,
            shards=shards,
            slice_counts=(mesh.slices_along(shard_axes), 1),
            cost_model=cost_model,
        )
        sharded = {*batch_axes, *shard_axes}
        replica_axes = tuple(name for name in mesh.factors if name not in sharded)
        buckets.append(bucket.shared_along(replica_axes, mesh))
    return buckets


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
        yield bucket.shared_along(sharing, mesh)
    for sharing in ways:
        if sharing and sharing[0] in optional:
            first, length = sharing[0], mesh.factors[sharing[0]]
            least = 2 if first in mesh.slow else SMALLEST_PART
            for groups in _divisors(length)[1:]:
                if length // groups >= least:
                    yield bucket.shared_along(sharing, mesh, groups)


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
        even, remainder = whole.with_slices(before), bucket.with_slices(after)
        alone = cheapest(remainder) if remainder.matrices else None
        cost = min(whole.cost, even.cost + alone.cost) if alone else whole.cost
        divisions.append((cost, _Division(whole, even, remainder)))
    return min(divisions, key=lambda each: each[0])[1]


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
    slices: dict[Any, list[MatrixRange]] = {}
    for remainder in remainders:
        [layout] = remainder.layouts
        needed = 1 if remainder.shape[1] <= n else column_shards
        if remainder.shape[1] > n * needed:
            return None
        slices.setdefault((layout.axes, needed), []).extend(layout.slices)
    layouts = [LayoutGroup(tuple(sorted(ranges)), *key) for key, ranges in slices.items()]
    sides = (side for layout in layouts for side in zip(shape, layout.axes, strict=True))
    if any(size % count_devices(axes, mesh.factors) for size, axes in sides):
        return None  # Shards would be of unequal sizes.
    ordered = sorted(layouts, key=lambda layout: (-layout.column_shards, layout))
    return remainders[0]._replace(layouts=tuple(ordered), shape=shape)


def _as_they_are(bucket: Bucket, stack_bytes: int) -> Iterator[Bucket]:
    """The bucket or, of one that stays and exceeds a stack, the wide and the tall ones.

    Transposing matrices that stay where they are costs a copy, for fewer stacks at best.
    """
    by_form: dict[bool, list[MatrixRange]] = {}
    for part in bucket.slices:
        by_form.setdefault(part.transposed, []).append(part)
    if bucket.group_size > 1 or bucket.nbytes <= stack_bytes or True not in by_form:
        yield bucket
        return
    for transposed, slices in by_form.items():
        of_form = bucket.with_slices([part._replace(transposed=False) for part in slices])
        yield of_form._replace(shape=bucket.shape[::-1]) if transposed else of_form


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
    stack: list[MatrixRange] = []
    held = 0
    for part in bucket.slices:
        missing = -held % bucket.group_size
        if stack and held + part.matrices > max(length, held + missing):
            middle = part.start + missing
            yield bucket.with_slices([*stack, part._replace(stop=middle)])
            part, stack, held = part._replace(start=middle), [], 0
        stack.append(part)
        held += part.matrices
    if stack:
        yield bucket.with_slices(stack)
