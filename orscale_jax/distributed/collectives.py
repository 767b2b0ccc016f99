"""Collectives over groups of devices inside ``jax.shard_map``, slow links first."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from orscale_jax.distributed.mesh import DeviceGroup, MeshShape, count_devices
from orscale_jax.sharding import typed_sharding


@dataclasses.dataclass(frozen=True)
class ColumnGroup:
    """``Columns``: devices of a mesh that hold the column shards of wide matrices."""

    group: DeviceGroup
    shards: int  # The number of neighbours that share a matrix.
    # The first devices hold a column shard. The others hold whole matrices, and take part
    # in the collectives, whose results they discard.
    active: int

    def reduce(self, collective: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        groups = self.group.index_groups(self.shards)
        reduced = collective(x, self.group.axes, axis_index_groups=groups)
        return self._if_active(reduced, x)

    def sum_matrices(
        self, x: jax.Array, rounded: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        groups = self.group.index_groups(self.shards)
        over: Any = {"axis_name": self.group.axes, "axis_index_groups": groups}
        if typed_sharding.mapped_axes():  # JAX 0.10 cannot map psum_scatter.
            gathered = rounded(jax.lax.psum(x, **over))
        else:
            rows = jax.lax.psum_scatter(x, tiled=True, **over)
            gathered = jax.lax.all_gather(rounded(rows), tiled=True, **over)
        return self._if_active(gathered.astype(x.dtype), x)

    def _if_active(self, reduced: jax.Array, x: jax.Array) -> jax.Array:
        """``reduced`` where the device holds a column shard, else ``x``."""
        if self.active == self.group.size:
            return reduced
        return jnp.where(axis_index(self.group) < self.active, reduced, x)


def axis_index(group: DeviceGroup) -> jax.Array:
    index = jax.lax.axis_index(group.axes)
    if group.is_whole:
        return index
    places: list[Any] = []
    for length in reversed(group.lengths):
        places.insert(0, index % length)
        index = index // length
    index = places[group.order[0]]
    for i in group.order[1:]:
        index = index * group.lengths[i] + places[i]
    return index


def all_to_all(x: jax.Array, factors: Sequence[str], mesh: MeshShape) -> jax.Array:
    """Send equal parts of ``x``, (devices, ...), to all devices along factors.

    Across slices each device sends one message to each other slice: all that is meant for
    its devices, which pass it on.
    """
    whole, groups = x.shape, _by_link(factors, len(x), mesh)
    x = x.reshape(*(group.size for group in groups), *whole[1:])
    for axis, group in enumerate(groups):
        index_groups = group.index_groups()
        x = jax.lax.all_to_all(x, group.axes, axis, axis, axis_index_groups=index_groups)
    return x.reshape(whole)


def all_gather(
    x: jax.Array, factors: Sequence[str], size: int, mesh: MeshShape
) -> jax.Array:
    """Join the arrays of ``size`` neighbours along factors by their first axis.

    Each device receives one array from every other slice, and the rest from this one.
    """
    entry, groups = x.shape[1:], _by_link(factors, size, mesh)
    tiled = len(groups) == 1
    for axis, group in enumerate(groups):
        index_groups = group.index_groups()
        x = jax.lax.all_gather(
            x, group.axes, axis=axis, tiled=tiled, axis_index_groups=index_groups
        )
    return x.reshape(-1, *entry)


def _by_link(factors: Sequence[str], size: int, mesh: MeshShape) -> list[DeviceGroup]:
    """Neighbours along the slow factors, if there are any, then along the fast ones."""
    slow = [factor for factor in factors if factor in mesh.slow]
    fast = [factor for factor in factors if factor not in mesh.slow]
    inside = min(size, count_devices(fast, mesh.factors))
    of_links = (slow, size // inside), (fast, inside)
    return [mesh.group(names, number) for names, number in of_links if names]
