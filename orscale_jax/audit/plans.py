"""The plan of Newton–Schulz for the rows of a description, as the optimizer runs it."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from orscale_jax.audit.merging import counted, merged
from orscale_jax.audit.rows import ParameterRow
from orscale_jax.distributed.exchange import plan_exchange
from orscale_jax.distributed.plan import (
    Bucket,
    MeshShape,
    ShardedArray,
    Traffic,
    median_flops,
)
from orscale_jax.distributed.platforms import Platform, StackKey, plan_stacks
from orscale_jax.transforms.matrices import compute_dtype

_NAMES_WIDTH = 72  # Of the names shown for a stack, which are one at least.


class Stack(NamedTuple):
    """Matrices that go through Newton–Schulz together on one device.

    Attributes:
      shape: ``(leaves, *batch, m, n)`` with ``m <= n``: tall matrices are transposed.
      names: The names of the leaves, or of their blocks.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        """The matrices and the first names, in one line."""
        *counts, m, n = self.shape
        return f"{math.prod(counts):,} of {m} × {n}: {_abridged(self.names)}"


class Placed(NamedTuple):
    """Matrices that go through Newton–Schulz together on a mesh.

    The devices form groups. Each group holds the shards of different matrices (experts
    that are sharded by expert), or there is one group, which holds all of them.

    Attributes:
      shape: ``(m, n)`` of each matrix that is whole on a device, or of every matrix if
        none is; ``m <= n`` where matrices are sent. Smaller matrices are padded.
      matrices: The number of matrices of a group.
      devices: The number of devices in a group.
      matrices_per_device: The number of matrices on a device, with padding by zeros.
      devices_per_matrix: The number of devices that share the columns of each shared
        matrix; 1 if none is shared.
      shared: The number of matrices that are shared. If others are not, ``shape`` has the
        columns that a device holds of a shared one.
      bytes_sent: The bytes that each device sends: both ways, and during the iteration if
        matrices are shared.
      names: The names of the leaves, or of their blocks.
      slow_bytes_sent: Those of the bytes that go to another slice.
    """

    shape: tuple[int, int]
    matrices: int
    devices: int
    matrices_per_device: int
    devices_per_matrix: int
    shared: int
    bytes_sent: int
    names: tuple[str, ...]
    slow_bytes_sent: int = 0

    def __str__(self) -> str:
        """The matrices, devices, bytes and first names, in one line."""
        m, n = self.shape
        where = f"over {self.devices} devices" if self.devices > 1 else "on each device"
        whole = self.matrices - self.shared
        columns = n * self.devices_per_matrix if whole else n
        groups = [
            (whole, n, f"{self.matrices_per_device} each"),
            (self.shared, columns, f"{self.devices_per_matrix} to one"),
        ]
        filled = [group for group in groups if group[0]]
        matrices = " and ".join(f"{count:,} of {m} × {n}" for count, n, _ in filled)
        each = " or ".join(each for *_, each in filled)
        slow = self.slow_bytes_sent
        elsewhere = f", {slow:,} of them to other slices" if slow else ""
        return (
            f"{matrices} {where}, {each}, {self.bytes_sent:,} bytes sent per device"
            f"{elsewhere}: {_abridged(self.names)}"
        )


class StepCost(NamedTuple):
    """What Newton–Schulz costs each device of a mesh in one step, as it is planned.

    Times are estimates from the rates in ``orscale_jax/distributed/plan.py``, as if
    products and transfers did not overlap. They leave out everything but products of
    matrices and transfers.

    Attributes:
      flops: The FLOPs of the busiest device.
      median_flops: The FLOPs of the median device that are not spent on padding.
      fast_bytes: The bytes that each device sends over fast links, inside its slice.
      slow_bytes: The bytes that each device sends to other slices.
      messages: The number of messages that each device sends.
      seconds: The time of the busiest device, transfers included.
      median_seconds: That of the median device.
      transfer_seconds: The time of the transfers alone, which is that of every device.
    """

    flops: int
    median_flops: int
    fast_bytes: int
    slow_bytes: int
    messages: int
    seconds: float
    median_seconds: float
    transfer_seconds: float

    def __str__(self) -> str:
        """All of it in one line."""
        work, median = _figure(self.flops / 1e9), _figure(self.median_flops / 1e9)
        fast, slow = _figure(self.fast_bytes / 1e6), _figure(self.slow_bytes / 1e6)
        total, transfers, of_median = (
            _figure(seconds * 1e3)
            for seconds in (self.seconds, self.transfer_seconds, self.median_seconds)
        )
        return (
            f"each device: {work} GFLOP (the median one {median}), {fast} MB over fast "
            f"links, {slow} MB over slow ones; about {total} ms, {transfers} of them for "
            f"transfers (the median one {of_median} ms)"
        )


def stacks(platform: Platform, rows: Sequence[ParameterRow]) -> list[Stack]:
    """The stacks of one device, for rows of matrices."""
    keys = [
        StackKey((*row.batch_shape, *sorted((row.m, row.n))), _dtype(platform, row))
        for row in rows
    ]
    limits = platform.limits
    plan = plan_stacks(keys, limits.stack_bytes, limits.stack_length)
    return [
        Stack(
            (len(members), *keys[members[0]].shape),
            tuple(rows[index].name for index in members),
        )
        for members in plan
    ]


def placement(
    platform: Platform, rows: Sequence[ParameterRow], mesh: MeshShape
) -> list[Placed]:
    """The buckets of a mesh, for rows of matrices."""
    return [_placed(bucket, rows) for bucket in _buckets(platform, rows, mesh)]


def step_cost(
    platform: Platform, rows: Sequence[ParameterRow], mesh: MeshShape
) -> StepCost:
    """The cost of all buckets of a mesh."""
    buckets = _buckets(platform, rows, mesh)
    model = platform.cost_model
    traffic = functools.reduce(Traffic.plus, (j.traffic for j in buckets), Traffic())
    flops = sum(bucket.flops for bucket in buckets)
    median = median_flops(buckets, mesh)
    return StepCost(
        flops=flops,
        median_flops=median,
        fast_bytes=traffic.fast_bytes,
        slow_bytes=traffic.slow_bytes,
        messages=traffic.fast_messages + traffic.slow_messages,
        seconds=model.seconds(model.cost(flops, traffic)),
        median_seconds=model.seconds(model.cost(median, traffic)),
        transfer_seconds=model.seconds(model.cost(0, traffic)),
    )


def _buckets(
    platform: Platform, rows: Sequence[ParameterRow], mesh: MeshShape
) -> tuple[Bucket, ...]:
    arrays = [
        ShardedArray(
            shape := (*row.batch_shape, row.m, row.n),
            _dtype(platform, row),
            row.mesh_axes or ((),) * len(shape),
        )
        for row in rows
    ]
    return plan_exchange(platform, arrays, mesh)


def _dtype(platform: Platform, row: ParameterRow) -> np.dtype:
    """The dtype in which the matrices of a row are stacked and sent."""
    dtype = compute_dtype(jax.ShapeDtypeStruct((), row.dtype))
    return platform.packed_dtype(dtype)


def _placed(bucket: Bucket, rows: Sequence[ParameterRow]) -> Placed:
    m, n = bucket.shape
    shared = [layout for layout in bucket.layouts if layout.column_shards > 1]
    all_shared = len(shared) == len(bucket.layouts)
    return Placed(
        shape=(m, n * bucket.column_shards if all_shared else n),
        matrices=bucket.matrices,
        devices=bucket.group_size,
        matrices_per_device=bucket.matrices_per_device,
        devices_per_matrix=bucket.column_shards,
        shared=sum(layout.matrices for layout in shared),
        bytes_sent=bucket.traffic.nbytes,
        slow_bytes_sent=bucket.traffic.slow_bytes,
        names=tuple(
            rows[index].name
            for index in dict.fromkeys(part.array for part in bucket.slices)
        ),
    )


def _figure(number: float) -> str:
    """Three digits, and all of them before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _abridged(names: tuple[str, ...]) -> str:
    """The first names, merged over layers, and the number of the others."""
    entries = [
        (counted(name, len(members)), len(members))
        for name, members in merged(names, [None] * len(names))
    ]
    widths = itertools.accumulate(len(name) + 2 for name, _ in entries)
    fitting = max(1, sum(width <= _NAMES_WIDTH for width in widths))
    more = sum(count for _, count in entries[fitting:])
    shown = ", ".join(name for name, _ in entries[:fitting])
    return shown + (f" and {more:,} more" if more else "")
