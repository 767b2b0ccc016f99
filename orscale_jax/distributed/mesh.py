"""The shape of a mesh: factors of its axes, with fast and with slow links.

Links inside a slice of a TPU pod, or inside a node of GPUs, are ten times or more as fast
as those between slices or nodes. An axis that crosses slow links part of the way has two
factors: a slow one, outermost, and a fast one. Plans are made in terms of factors.

Nothing here imports JAX.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

MeshAxes = tuple[str, ...]


class DeviceGroup(NamedTuple):
    """The devices along some factors of a mesh, and how collectives name them."""

    axes: tuple[str, ...]  # Of the mesh, to which the factors belong.
    lengths: tuple[int, ...]  # Of all factors of these axes, one perhaps in two parts.
    order: tuple[int, ...]  # The group's factors among them, the most major first.

    @property
    def size(self) -> int:
        return math.prod(self.lengths[i] for i in self.order)

    @property
    def is_whole(self) -> bool:
        """Whether it is all devices along the axes, in their order."""
        return self.order == tuple(range(len(self.lengths)))

    def index_groups(self, size: int | None = None) -> list[list[int]] | None:
        """The ``axis_index_groups`` of a collective along ``axes``; None for all devices.

        ``size`` is the number of neighbours in a part of the group; None for all of it.
        """
        if self.is_whole and size is None:
            return None
        others = [i for i in range(len(self.lengths)) if i not in self.order]
        devices = np.arange(math.prod(self.lengths)).reshape(self.lengths)
        ordered = devices.transpose(*others, *self.order)
        return ordered.reshape(-1, self.size if size is None else size).tolist()


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The lengths of a mesh's axes, and the number of slices along those that cross any.

    The slices along an axis are consecutive parts of it, of one length.
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

    def factors_of(self, axes: Iterable[str]) -> MeshAxes:
        """The factors of axes of the mesh, the most major first."""
        lengths = (self._lengths(name) for name in axes if name in self.sizes)
        return tuple(
            factor for each in lengths for factor in each if factor in self.factors
        )

    def slices_along(self, factors: Iterable[str]) -> int:
        """The number of slices among which devices along factors are."""
        return count_devices(self.slow.intersection(factors), self.factors)

    def group(self, factors: Sequence[str], size: int) -> DeviceGroup:
        """``size`` neighbours along factors, of which the first is the most major.

        They are all devices along the others, and along the first all or a part.
        """
        axis_of = {factor: name for name in self.sizes for factor in self._lengths(name)}
        axes = tuple(dict.fromkeys(axis_of[factor] for factor in factors))
        every = self.factors_of(axes)
        lengths = [self.factors[factor] for factor in every]
        first, *others = (every.index(factor) for factor in factors)
        part = size // count_devices(factors[1:], self.factors)
        if part < lengths[first]:  # It counts as two factors.
            lengths[first : first + 1] = lengths[first] // part, part
            first, *others = (i + (i >= first) for i in (first, *others))
        return DeviceGroup(axes, tuple(lengths), (first, *others))

    def _lengths(self, name: str) -> dict[str, int]:
        size, slices = self.sizes[name], self.slices.get(name, 1)
        if slices in (1, size):
            return {name: size}
        return {f"{name} over slices": slices, name: size // slices}


def count_devices(axes: Iterable[str], mesh_shape: Mapping[str, int]) -> int:
    return math.prod(mesh_shape[name] for name in axes)


def slices_of_axes(names: Sequence[str], slice_of: np.ndarray) -> dict[str, int]:
    """The number of slices along each axis of a mesh that leads from one to another.

    ``slice_of`` is the slice of each device, in the shape of the mesh. An axis whose
    neighbours are in other slices at every step is wholly slow.
    """
    counts = {}
    for axis, name in enumerate(names):
        others = tuple(i for i in range(slice_of.ndim) if i != axis)
        ends = np.flatnonzero(np.diff(slice_of, axis=axis).any(axis=others)) + 1
        size = slice_of.shape[axis]
        if (together := math.gcd(size, *ends.tolist())) < size:
            counts[name] = size // together
    return counts
