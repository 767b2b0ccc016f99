"""Shardings of arrays on Auto axes, where nobody says them.

XLA's partitioner has them, but does not tell. It is told these instead, by ``shard_map``,
and moves what is elsewhere.
"""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from orscale_jax.sharding import typed_sharding


def auto_spec(
    x: jax.Array,
    known: PartitionSpec | None,
    mesh: AbstractMesh,
    slices: Mapping[str, int],
) -> PartitionSpec:
    """What is known of an array's sharding, if that agrees with its type, or assumed."""
    if known is not None:
        by_type = [
            tuple(name for name in names if name in mesh.explicit_axes)
            for names in typed_sharding.axes_of(known, x.ndim)
        ]
        if by_type == [*map(typed_sharding.names, typed_sharding.spec(x))]:
            return known
    return _assumed(x, mesh, slices)


def _assumed(
    x: jax.Array, mesh: AbstractMesh, slices: Mapping[str, int]
) -> PartitionSpec:
    """As many axes as divide an array ``(*batch, m, n)``, the first ones first.

    Experts are then sharded by expert, layers by layer, and single matrices by rows. Axes
    that only lead to other slices hold replicas.
    """
    mapped = typed_sharding.mapped_axes()
    left = [
        name
        for name in mesh.auto_axes
        if name not in mapped and slices.get(name, 1) < mesh.shape[name]
    ]
    entries = []
    for size, entry in zip(x.shape, typed_sharding.spec(x), strict=True):
        taken = typed_sharding.names(entry)
        for name in tuple(left):
            if size % math.prod(mesh.shape[each] for each in (*taken, name)) == 0:
                taken = (*taken, name)
                left.remove(name)
        entries.append(taken or None)
    return PartitionSpec(*entries)
