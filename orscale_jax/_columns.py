"""Sums over the devices of a mesh that share a matrix, each with some of its columns."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Columns:
    """The devices of a mesh between which the columns of a wide matrix are divided.

    Attributes:
      axes: Of the mesh; devices that are neighbours along them share a matrix.
      devices: How many devices there are along the axes.
      sharers: How many share a matrix.
      members: How many of the devices do, the first ones; the others have whole matrices,
        and take part in what is exchanged in vain.
    """

    axes: tuple[str, ...]
    devices: int
    sharers: int
    members: int

    @property
    def _groups(self) -> list[list[int]]:
        return np.arange(self.devices).reshape(-1, self.sharers).tolist()

    def sum(self, x: jax.Array) -> jax.Array:
        """Of what the devices have."""
        return self._for_members(
            jax.lax.psum(x, self.axes, axis_index_groups=self._groups), x
        )

    def max(self, x: jax.Array) -> jax.Array:
        """Of what the devices have."""
        return self._for_members(
            jax.lax.pmax(x, self.axes, axis_index_groups=self._groups), x
        )

    def sum_matrices(
        self, x: jax.Array, rounded: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """As :meth:`sum`, of shape (m, n), added as they are and gathered rounded."""
        rows = jax.lax.psum_scatter(
            x, self.axes, axis_index_groups=self._groups, tiled=True
        )
        gathered = jax.lax.all_gather(
            rounded(rows), self.axes, axis_index_groups=self._groups, tiled=True
        )
        return self._for_members(gathered.astype(x.dtype), x)

    def _for_members(self, found: jax.Array, x: jax.Array) -> jax.Array:
        """What was found, and on devices with whole matrices what they have."""
        if self.members == self.devices:
            return found
        return jnp.where(jax.lax.axis_index(self.axes) < self.members, found, x)
