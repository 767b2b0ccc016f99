"""Collectives along factors of a mesh's axes, over slow links before fast ones.

Among them are sums over the devices that share a matrix, each with some of its columns.
All of it runs inside ``jax.shard_map``.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from orscale_jax.distributed.mesh_shape import DeviceGroup, MeshShape


@dataclasses.dataclass(frozen=True)
class ColumnGroup:
    """Devices of a mesh over which the columns of wide matrices are sharded.

    Attributes:
      group: The devices among which those that share a matrix are neighbours.
      shards: The number of neighbouring devices that share a matrix.
      active: The number of devices that hold a column shard, the first of the group. The
        others hold whole matrices; they take part in the collectives, whose results they
        discard.
    """

    group: DeviceGroup
    shards: int
    active: int

    @property
    def _groups(self) -> list[list[int]] | None:
        return self.group.index_groups(self.shards)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that share a matrix."""
        return self._if_active(
            jax.lax.psum(x, self.group.axes, axis_index_groups=self._groups), x
        )

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over the devices that share a matrix."""
        return self._if_active(
            jax.lax.pmax(x, self.group.axes, axis_index_groups=self._groups), x
        )

    def sum_matrices(
        self, x: jax.Array, rounded: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """The sum of matrices of shape (m, n): added as they are, gathered rounded."""
        rows = jax.lax.psum_scatter(
            x, self.group.axes, axis_index_groups=self._groups, tiled=True
        )
        gathered = jax.lax.all_gather(
            rounded(rows), self.group.axes, axis_index_groups=self._groups, tiled=True
        )
        return self._if_active(gathered.astype(x.dtype), x)

    def _if_active(self, reduced: jax.Array, x: jax.Array) -> jax.Array:
        """``reduced`` where the device holds a column shard, else ``x``."""
        if self.active == self.group.size:
            return reduced
        return jnp.where(axis_index(self.group) < self.active, reduced, x)


def axis_index(group: DeviceGroup) -> jax.Array:
    """The index of this device in its group."""
    index = jax.lax.axis_index(group.axes)
    if group.is_whole:
        return index
    places = []
    for length in reversed(group.lengths):
        places.append(index % length)
        index = index // length
    places.reverse()
    index = places[group.order[0]]
    for i in group.order[1:]:
        index = index * group.lengths[i] + places[i]
    return index


def all_to_all(x: jax.Array, factors: Sequence[str], mesh: MeshShape) -> jax.Array:
    """Send equal parts of ``x`` to all devices along factors, the slow ones first.

    Across slices each device sends one message to each other slice: all that is meant for
    its devices, which pass it on.

    Args:
      x: Shape (devices, ...): what each device is sent; the result is what each has sent.
      factors: Factors of the mesh's axes.
      mesh: The mesh.
    """
    slow, fast = _by_link(factors, mesh)
    whole = x.shape
    lengths = [group.size for group in (slow, fast) if group]
    x = x.reshape(*lengths, *whole[1:])
    for axis, group in enumerate(group for group in (slow, fast) if group):
        x = jax.lax.all_to_all(
            x,
            group.axes,
            split_axis=axis,
            concat_axis=axis,
            axis_index_groups=group.index_groups(),
        )
    return x.reshape(whole)


def all_gather(x: jax.Array, factors: Sequence[str], mesh: MeshShape) -> jax.Array:
    """Join the arrays of all devices along factors by their first axis.

    Each device receives one array from every other slice, and the rest from this one.
    """
    slow, fast = _by_link(factors, mesh)
    if slow and fast:
        x = _gathered(x, slow, axis=0, tiled=False)
        x = _gathered(x, fast, axis=1, tiled=False)
        return x.reshape(-1, *x.shape[3:])
    return _gathered(x, slow or fast, axis=0, tiled=True)


def _gathered(
    x: jax.Array, group: DeviceGroup | None, *, axis: int, tiled: bool
) -> jax.Array:
    if group is None:
        return x
    groups = group.index_groups()
    return jax.lax.all_gather(
        x, group.axes, axis=axis, tiled=tiled, axis_index_groups=groups
    )


def _by_link(
    factors: Sequence[str], mesh: MeshShape
) -> tuple[DeviceGroup | None, DeviceGroup | None]:
    """The groups along the slow factors, which come first, and along the fast ones."""
    slow = [factor for factor in factors if factor in mesh.slow]
    fast = [factor for factor in factors if factor not in mesh.slow]
    return (mesh.group(slow) if slow else None, mesh.group(fast) if fast else None)
