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
would be idle. The plan is the one that costs least, counting operations and bytes.

Nothing here imports JAX.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from orscale_jax.distributed.buckets import (
    Bucket,
    CostModel,
    LayoutGroup,
    MatrixSlice,
    ShardedArray,
    count_devices,
)

MeshShape = Mapping[str, int]
DEFAULT_COSTS = CostModel()


def plan_buckets(
    arrays: Sequence[ShardedArray],
    mesh_shape: MeshShape,
    stack_bytes: int,
    cost_model: CostModel = DEFAULT_COSTS,
) -> tuple[Bucket, ...]:
    """Plan which matrices are sent together, and between which devices.

    Args:
      arrays: The arrays of matrices, tall or wide.
      mesh_shape: The lengths of the mesh's axes.
      stack_bytes: The largest stack of a device. An array that exceeds it is alone.
      cost_model: The costs by which plans are compared.

    Returns:
      Buckets in the order of their first arrays. Each matrix is in one of them.
    """
    # An axis of one device shards nothing, and would separate arrays sharded alike.
    mesh_shape = {name: size for name, size in mesh_shape.items() if size > 1}
    over_mesh = [array.over(mesh_shape) for array in arrays]
    alike = _group_alike(over_mesh, mesh_shape, cost_model)
    divided = [_divide(bucket) for bucket in alike]
    remainders = [remainder for _, remainder in divided if remainder.matrices]
    merged = _merge(remainders, mesh_shape)
    buckets = [bucket for bucket in merged if bucket not in remainders]
    for bucket, (even, remainder) in zip(alike, divided, strict=True):
        # A remainder that nothing improves stays with the rest of its bucket.
        buckets += _split(bucket if remainder in merged else even, stack_bytes)
    return tuple(sorted(buckets))


def local_matrices(array: ShardedArray, mesh_shape: MeshShape) -> int:
    """The number of the array's matrices of which a device holds a shard."""
    batch = len(array.shape) - 2
    whole = math.prod(array.shape[:batch])
    sharded = (count_devices(axes, mesh_shape) for axes in array.axes[:batch])
    return whole // math.prod(sharded)


def _group_alike(
    arrays: Sequence[ShardedArray], mesh_shape: MeshShape, cost_model: CostModel
) -> list[Bucket]:
    """One bucket for all matrices of one shape and one sharding."""
    alike: dict[Any, list[MatrixSlice]] = {}
    for index, array in enumerate(arrays):
        batch_axes = frozenset(name for axes in array.axes[:-2] for name in axes)
        # Transposing matrices that stay where they are would cost a copy for nothing.
        transposed = not (batch_axes.issuperset(mesh_shape) or array.is_wide)
        sent = array.transposed if transposed else array
        *_, rows, columns = sent.axes
        key = (sent.shape[-2:], array.dtype, batch_axes, rows, columns)
        part = MatrixSlice(index, 0, local_matrices(array, mesh_shape), transposed)
        alike.setdefault(key, []).append(part)
    return [
        _bucket(key, tuple(slices), mesh_shape, cost_model)
        for key, slices in alike.items()
    ]


def _bucket(
    key: Any,
    slices: tuple[MatrixSlice, ...],
    mesh_shape: MeshShape,
    cost_model: CostModel,
) -> Bucket:
    shape, dtype, batch_axes, rows, columns = key
    shard_axes = tuple(name for name in mesh_shape if name in {*rows, *columns})
    replica_axes = tuple(
        name for name in mesh_shape if name not in {*batch_axes, *shard_axes}
    )
    shards = count_devices(shard_axes, mesh_shape)
    return Bucket(
        layouts=(LayoutGroup(slices, rows, columns),),
        shape=shape,
        dtype=dtype,
        shard_axes=shard_axes,
        replica_axes=replica_axes,
        group_size=shards * count_devices(replica_axes, mesh_shape),
        shards=shards,
        cost_model=cost_model,
    )


def _divide(bucket: Bucket) -> tuple[Bucket, Bucket]:
    """Divide into equally many matrices for all devices, and the remainder."""
    [layout] = bucket.layouts
    count = layout.matrices // bucket.group_size * bucket.group_size
    before, after = [], []
    for part in layout.slices:
        middle = part.start + min(max(count, 0), part.matrices)
        before.append(part._replace(stop=middle))
        after.append(part._replace(start=middle))
        count -= part.matrices
    return _with_slices(bucket, before), _with_slices(bucket, after)


def _with_slices(bucket: Bucket, slices: Iterable[MatrixSlice]) -> Bucket:
    [layout] = bucket.layouts
    filled = tuple(part for part in slices if part.matrices)
    return bucket._replace(layouts=(layout._replace(slices=filled),))


class _Merged(NamedTuple):
    """Remainders, and the cheapest bucket that holds them all."""

    remainders: tuple[Bucket, ...]
    bucket: Bucket


def _merge(remainders: Sequence[Bucket], mesh_shape: MeshShape) -> list[Bucket]:
    """Merge pairs as long as that saves anything, the largest saving first."""
    merged = [
        _Merged((remainder,), _cheapest((remainder,), mesh_shape) or remainder)
        for remainder in remainders
    ]
    while True:
        pairs = [
            (one.bucket.cost + other.bucket.cost - both.cost, one, other, both)
            for one, other in itertools.combinations(merged, 2)
            if (both := _cheapest(one.remainders + other.remainders, mesh_shape))
        ]
        best = max(pairs, key=lambda pair: pair[0], default=None)
        if best is None or best[0] <= 0:
            return [bucket for _, bucket in merged]
        _, one, other, both = best
        merged = [entry for entry in merged if entry not in (one, other)]
        merged.append(_Merged(one.remainders + other.remainders, both))


def _cheapest(remainders: Sequence[Bucket], mesh_shape: MeshShape) -> Bucket | None:
    """The cheapest bucket of all remainders; None if they cannot share one."""
    group_size = remainders[0].group_size
    groups = {(r.dtype, r.shard_axes, r.replica_axes, r.group_size) for r in remainders}
    if len(groups) > 1:
        return None
    m = max(remainder.shape[0] for remainder in remainders)
    candidates = (
        _in_shape(remainders, (m, remainder.shape[1] // share), column_shards)
        for column_shards in range(1, group_size + 1)
        if group_size % column_shards == 0 == m % column_shards
        for remainder in remainders
        for share in {1, column_shards}
        if remainder.shape[1] % share == 0
    )
    fitting = [bucket for bucket in candidates if bucket and _fits(bucket, mesh_shape)]
    return min(fitting, key=lambda bucket: bucket.cost, default=None)


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


def _fits(bucket: Bucket, mesh_shape: MeshShape) -> bool:
    return bucket.matrices_per_device == 1 and all(
        size % count_devices(axes, mesh_shape) == 0
        for layout in bucket.layouts
        for size, axes in zip(bucket.shape, layout.axes, strict=True)
    )


def _split(bucket: Bucket, stack_bytes: int) -> Iterator[Bucket]:
    """Split into as few stacks as the limit allows, of about one length.

    All but the last are full: where a stack is not, a device orthogonalizes zeros.
    """
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
