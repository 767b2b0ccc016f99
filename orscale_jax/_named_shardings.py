"""The shardings that XLA's partitioner chooses, by the names of a mesh's axes."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from orscale_jax._placement import Axes, devices


def named(arrays: Sequence[Any], mesh: Mesh) -> tuple[Mesh, tuple[NamedSharding, ...]]:
    """The partitioner's choices, on the mesh or on one whose axes are parts of its axes.

    Of 4 devices that share 64 columns, it has 2 share each half where the columns become
    (2, 32).
    """

    def axes_of_all(mesh: Mesh) -> list[tuple[Axes | None, ...]]:
        return [axes_on(mesh, array.sharding, len(array.shape)) for array in arrays]

    found = axes_of_all(mesh)
    if any(None in axes for axes in found):
        mesh = in_prime_axes(mesh)
        found = axes_of_all(mesh)
    return mesh, tuple(
        _even(array.shape, axes, mesh) for array, axes in zip(arrays, found, strict=True)
    )


def mesh_of_devices(array: Any, abstract: AbstractMesh) -> Mesh:
    """An abstract mesh on the devices of an array, in their order."""
    lengths = tuple(abstract.shape.values())
    indices = array.sharding.devices_indices_map((abstract.size,) * len(array.shape))
    return Mesh(np.array([*indices]).reshape(lengths), abstract.axis_names)


@functools.lru_cache(maxsize=256)
def axes_on(mesh: Mesh, sharding: Sharding, rank: int) -> tuple[Axes | None, ...]:
    """Of each of an array's axes, those of the mesh that it is sharded over, or None."""
    length = mesh.size  # Which every sharding divides.
    indices = sharding.devices_indices_map((length,) * rank)
    starts = np.array(
        [[index.start or 0 for index in indices[device]] for device in mesh.devices.flat]
    ).reshape(*mesh.devices.shape, rank)
    places = np.indices(mesh.devices.shape)

    def axes_of(starts: np.ndarray) -> Axes | None:
        # The farther apart two neighbours along an axis begin, the earlier it counts.
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
    """The mesh with axes of prime lengths, by which parts of its axes have names."""
    lengths = {
        f"{name}.{place}": prime
        for name, size in mesh.shape.items()
        for place, prime in enumerate(primes(size))
    }
    return Mesh(mesh.devices.reshape(*lengths.values()), tuple(lengths))


def primes(number: int) -> list[int]:
    smallest = next((k for k in range(2, number) if number % k == 0), number)
    return [number] if smallest == number else [smallest, *primes(number // smallest)]


def _even(shape: Sequence[int], axes: Sequence[Axes | None], mesh: Mesh) -> NamedSharding:
    """Without what the partitioner would have to pad, and what has no name."""
    spec = [
        names if names and size % devices(names, mesh.shape) == 0 else None
        for size, names in zip(shape, axes, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))
