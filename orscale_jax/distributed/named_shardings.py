"""The shardings that XLA's partitioner chooses, by the names of a mesh's axes."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from orscale_jax.distributed.buckets import MeshAxes, count_devices


def named(arrays: Sequence[Any], mesh: Mesh) -> tuple[Mesh, tuple[NamedSharding, ...]]:
    """The partitioner's choices, on the mesh or on one with its axes split into factors.

    Where 64 columns over 4 devices become (2, 32), the partitioner shards each of the two
    axes over 2 of the 4 devices, which no axis of the mesh describes.
    """

    def axes_of_all(mesh: Mesh) -> list[tuple[MeshAxes | None, ...]]:
        return [axes_on(mesh, array.sharding, len(array.shape)) for array in arrays]

    axes_of_arrays = axes_of_all(mesh)
    if any(None in axes for axes in axes_of_arrays):
        mesh = in_prime_axes(mesh)
        axes_of_arrays = axes_of_all(mesh)
    return mesh, tuple(
        _even(array.shape, axes, mesh)
        for array, axes in zip(arrays, axes_of_arrays, strict=True)
    )


@functools.lru_cache(maxsize=256)
def axes_on(mesh: Mesh, sharding: Sharding, rank: int) -> tuple[MeshAxes | None, ...]:
    """For each axis of an array, the mesh axes over which it is sharded, or None."""
    length = mesh.size  # Every sharding divides this length.
    indices = sharding.devices_indices_map((length,) * rank)
    starts = np.array(
        [[index.start or 0 for index in indices[device]] for device in mesh.devices.flat]
    ).reshape(*mesh.devices.shape, rank)
    places = np.indices(mesh.devices.shape)

    def axes_of(starts: np.ndarray) -> MeshAxes | None:
        # The larger the step between neighbours along a mesh axis, the more major it is.
        steps = [np.diff(starts, axis=i).max(initial=0) for i in range(starts.ndim)]
        order = [i for i in np.argsort(steps, stable=True)[::-1] if steps[i]]
        expected, each = np.zeros_like(starts), length
        for i in order:
            each //= starts.shape[i]
            expected = expected + each * places[i]
        named = tuple(mesh.axis_names[i] for i in order)
        return named if np.array_equal(starts, expected) else None

    return tuple(axes_of(starts[..., axis]) for axis in range(rank))


def in_prime_axes(mesh: Mesh) -> Mesh:
    """The mesh with axes of prime lengths, so that parts of its axes have names."""
    lengths = {
        f"{name}.{place}": prime
        for name, size in mesh.shape.items()
        for place, prime in enumerate(primes(size))
    }
    return Mesh(mesh.devices.reshape(*lengths.values()), tuple(lengths))


def primes(number: int) -> list[int]:
    """The prime factors of a number, ascending."""
    smallest = next((k for k in range(2, number) if number % k == 0), number)
    return [number] if smallest == number else [smallest, *primes(number // smallest)]


def _even(
    shape: Sequence[int], axes: Sequence[MeshAxes | None], mesh: Mesh
) -> NamedSharding:
    """The sharding without axes that would need padding, or that have no name."""
    spec = [
        names if names and size % count_devices(names, mesh.shape) == 0 else None
        for size, names in zip(shape, axes, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))
