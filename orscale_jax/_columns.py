"""Sums over the devices of a mesh that share a matrix, each with some of its columns."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Columns:
    """The devices of a mesh between which the columns of a wide matrix are divided.

    Attributes:
      axes: Of the mesh; devices that are neighbours along them share a matrix.
      devices: How many devices there are along the axes.
      sharers: How many share a matrix.
    """

    axes: tuple[str, ...]
    devices: int
    sharers: int

    @property
    def _groups(self) -> list[list[int]]:
        return np.arange(self.devices).reshape(-1, self.sharers).tolist()

    def sum(self, x: jax.Array) -> jax.Array:
        """Of what the devices have."""
        return jax.lax.psum(x, self.axes, axis_index_groups=self._groups)

    def max(self, x: jax.Array) -> jax.Array:
        """Of what the devices have."""
        return jax.lax.pmax(x, self.axes, axis_index_groups=self._groups)

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
        return gathered.astype(x.dtype)
