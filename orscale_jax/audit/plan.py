"""The report of a plan: what goes through Newton–Schulz together, and what it costs."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from orscale_jax.distributed.costs import Bucket, CostModel, Traffic


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
    from the rates in ``orscale_jax/newton_schulz/hardware.py``. They know of nothing but
    products of matrices and transfers: not of AdamW's parameters, launches of kernels, or
    the gradient and its collectives, which may compete for links or run beside all this.

    Attributes:
      groups: The matrices that are computed together, in the order of their first leaves.
      flops: The FLOPs of the busiest device.
      fast_bytes: The bytes that each device sends over fast links, inside its slice.
      slow_bytes: The bytes that each device sends to other slices.
      seconds: The time of the busiest device, with all transfers.
      transfer_seconds: The time of the transfers alone, which is that of every device.
      is_traced: Whether steps or coefficients are traced, and Newton–Schulz is slower.
    """

    groups: tuple[Group, ...]
    flops: int = 0
    fast_bytes: int = 0
    slow_bytes: int = 0
    seconds: float = 0.0
    transfer_seconds: float = 0.0
    is_traced: bool = False

    @classmethod
    def of(
        cls,
        buckets: Sequence[Bucket],
        names: Sequence[Sequence[str]],
        cost_model: CostModel,
    ) -> "Plan":
        """The buckets of a mesh, given the names of the arrays of each."""
        groups, flops, traffic = [], 0, Traffic()
        for bucket, name_of in zip(buckets, names, strict=True):
            counts = Counter[int]()
            for layout in sorted(bucket.layouts, key=lambda layout: layout.column_shards):
                counts[layout.column_shards] += layout.matrices
            m, n = bucket.shape
            group = Group(
                tuple(dict.fromkeys(name_of[part.array] for part in bucket.slices)),
                tuple((count, m, n * shards, shards) for shards, count in counts.items()),
                bucket.group_size,
                bucket.matrices_per_device,
                bucket.traffic.nbytes,
                bucket.traffic.slow_bytes,
            )
            groups.append(group)
            flops += bucket.flops
            traffic = traffic.plus(bucket.traffic)
        return cls(
            tuple(groups),
            flops,
            traffic.fast_bytes,
            traffic.slow_bytes,
            cost_model.seconds(cost_model.cost(flops, traffic)),
            cost_model.seconds(cost_model.cost(0, traffic)),
        )
