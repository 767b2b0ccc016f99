"""Sums over the devices of a mesh that share a matrix, each with some of its columns."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ColumnGroup:
    """Devices of a mesh over which the columns of wide matrices are sharded.

    Attributes:
      axes: The axes of the mesh along which the devices of a group lie.
      group_size: The number of devices along these axes.
      shards: The number of neighbouring devices that share a matrix.
      active: The number of devices that hold a column shard, the first of the group. The
        others hold whole matrices; they take part in the collectives, whose results they
        discard.
    """

    axes: tuple[str, ...]
    group_size: int
    shards: int
    active: int

    @property
    def _groups(self) -> list[list[int]]:
        return np.arange(self.group_size).reshape(-1, self.shards).tolist()

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over the devices that share a matrix."""
        return self._if_active(
            jax.lax.psum(x, self.axes, axis_index_groups=self._groups), x
        )

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over the devices that share a matrix."""
        return self._if_active(
            jax.lax.pmax(x, self.axes, axis_index_groups=self._groups), x
        )

    def sum_matrices(
        self, x: jax.Array, rounded: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """The sum of matrices of shape (m, n): added as they are, gathered rounded."""
        rows = jax.lax.psum_scatter(
            x, self.axes, axis_index_groups=self._groups, tiled=True
        )
        gathered = jax.lax.all_gather(
            rounded(rows), self.axes, axis_index_groups=self._groups, tiled=True
        )
        return self._if_active(gathered.astype(x.dtype), x)

    def _if_active(self, reduced: jax.Array, x: jax.Array) -> jax.Array:
        """``reduced`` where the device holds a column shard, else ``x``."""
        if self.active == self.group_size:
            return reduced
        return jnp.where(jax.lax.axis_index(self.axes) < self.active, reduced, x)
