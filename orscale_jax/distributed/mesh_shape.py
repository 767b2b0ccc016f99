"""The axes of a mesh, divided where they cross slow links. Nothing here imports JAX.

Links inside a slice of a TPU pod, or inside a node of GPUs, are ten times or more as fast
as those between slices or nodes. An axis that crosses slow links part of the way has two
factors: a slow one, outermost, and a fast one. Plans are made in terms of factors.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Factors = tuple[str, ...]


class DeviceGroup(NamedTuple):
    """The devices along some factors of a mesh, and how collectives name them.

    Attributes:
      axes: The axes of the mesh to which the factors belong.
      lengths: The lengths of all factors of these axes, in order.
      order: The positions of the group's factors among them, the most major first.
    """

    axes: tuple[str, ...]
    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of devices in the group."""
        return math.prod(self.lengths[i] for i in self.order)

    @property
    def is_whole(self) -> bool:
        """Whether it is all devices along the axes, in their order."""
        return self.order == tuple(range(len(self.lengths)))

    def index_groups(self, size: int | None = None) -> list[list[int]] | None:
        """The ``axis_index_groups`` of a collective along ``axes``.

        Args:
          size: The number of neighbours in a part of the group; None for the whole group.

        Returns:
          The indices of the devices, a list for each group; None for all devices.
        """
        if self.is_whole and size is None:
            return None
        others = [i for i in range(len(self.lengths)) if i not in self.order]
        devices = np.arange(math.prod(self.lengths)).reshape(self.lengths)
        ordered = devices.transpose(*others, *self.order)
        return ordered.reshape(-1, self.size if size is None else size).tolist()


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The lengths of a mesh's axes, and the slices that they cross.

    Attributes:
      sizes: The lengths of the axes.
      slices: The number of slices along each axis that crosses slow links. It divides the
        length of the axis, of which the slices are consecutive parts.
    """

    sizes: Mapping[str, int]
    slices: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def factors(self) -> dict[str, int]:
        """The lengths of the factors, slow ones first, without those of length 1."""
        lengths = {k: v for name in self.sizes for k, v in self._lengths(name).items()}
        ordered = sorted(lengths, key=lambda factor: factor not in self.slow)
        return {factor: lengths[factor] for factor in ordered if lengths[factor] > 1}

    @functools.cached_property
    def slow(self) -> frozenset[str]:
        """The factors whose links are slow."""
        return frozenset(
            next(iter(self._lengths(name))) for name, n in self.slices.items() if n > 1
        )

    def factors_of(self, axes: Iterable[str]) -> Factors:
        """The factors of axes of the mesh, the most major first."""
        kept = self.factors
        return tuple(
            factor
            for name in axes
            if name in self.sizes
            for factor in self._lengths(name)
            if factor in kept
        )

    def group(self, factors: Sequence[str]) -> DeviceGroup:
        """The devices along factors, of which the first is the most major."""
        axis_of = {factor: name for name in self.sizes for factor in self._lengths(name)}
        axes = tuple(dict.fromkeys(axis_of[factor] for factor in factors))
        kept = self.factors
        every = self.factors_of(axes)
        order = tuple(every.index(factor) for factor in factors)
        return DeviceGroup(axes, tuple(kept[factor] for factor in every), order)

    def _lengths(self, name: str) -> dict[str, int]:
        size, slices = self.sizes[name], self.slices.get(name, 1)
        if slices in (1, size):
            return {name: size}
        return {f"{name} over slices": slices, name: size // slices}


def slices_of_axes(names: Sequence[str], slice_of: np.ndarray) -> dict[str, int]:
    """The number of slices along each axis of a mesh that leads from one to another.

    Args:
      names: The axes of the mesh.
      slice_of: The slice of each device, with one axis for each axis of the mesh. An axis
        whose neighbours are in other slices at every step is wholly slow.
    """
    counts = {}
    for axis, name in enumerate(names):
        along = np.moveaxis(slice_of, axis, 0)
        size = len(along)
        together = max(
            length
            for length in range(1, size + 1)
            if size % length == 0 and _constant_in_blocks(along, length)
        )
        if together < size:
            counts[name] = size // together
    return counts


def slices_of_devices(sizes: Mapping[str, int], slices: Mapping[str, int]) -> Any:
    """A slice for each device of a mesh, from the number of slices along its axes."""
    index = np.zeros(tuple(sizes.values()), int)
    for axis, (name, size) in enumerate(sizes.items()):
        count = slices.get(name, 1)
        shape = [-1 if i == axis else 1 for i in range(len(sizes))]
        index = index * count + (np.arange(size) // (size // count)).reshape(shape)
    return index


def _constant_in_blocks(along: np.ndarray, length: int) -> bool:
    blocks = along.reshape(-1, length, *along.shape[1:])
    return bool((blocks == blocks[:, :1]).all())
