"""Sums over the devices of a mesh that share a matrix, each with some of its columns."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from orscale_jax.distributed.collectives import axis_index
from orscale_jax.distributed.mesh_shape import DeviceGroup


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
