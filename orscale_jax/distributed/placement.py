"""Where arrays are on a mesh: their shardings, and which axes cross slow links."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import numpy as np
from jax._src.mesh import get_concrete_mesh
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from orscale_jax.distributed.mesh import slices_of_axes
from orscale_jax.sharding import typed_sharding

# The axes that cross slow links, all along or with the number of slices along each.
SlowAxes: TypeAlias = Sequence[str] | Mapping[str, int]


class Placement(NamedTuple):
    """Where arrays of matrices are on a mesh."""

    mesh: AbstractMesh
    slices: Mapping[str, int]  # Along each axis of the mesh that crosses slow links.
    specs: Sequence[PartitionSpec]

    @classmethod
    def of(
        cls,
        arrays: Sequence[tuple[jax.Array, PartitionSpec | None]],
        mesh: AbstractMesh,
        users_mesh: Mesh | AbstractMesh | None,
        slow_axes: SlowAxes | None,
    ) -> Self:
        """The placement of arrays, each with what is known of its sharding."""
        slices = slices_of_mesh(mesh, slow_axes, users_mesh)
        if slices is None:
            warn_of_unknown_slices(mesh)
            slices = {}
        specs = [
            jax.typeof(x).sharding.spec
            if mesh.are_all_axes_explicit
            else auto_spec(x, known, mesh, slices)
            for x, known in arrays
        ]
        return cls(mesh, slices, specs)


def slices_of_mesh(
    mesh: Mesh | AbstractMesh,
    slow_axes: SlowAxes | None,
    users_mesh: Mesh | AbstractMesh | None = None,
) -> dict[str, int] | None:
    """The number of slices along each axis of a mesh that crosses slow links.

    It is None if neither the user, by ``slow_axes``, nor any device says where slices
    are: those of ``mesh``, of the mesh that the user has given, or of the context's.
    """
    if slow_axes is None:
        for each in (mesh, users_mesh, get_concrete_mesh()):
            if isinstance(each, Mesh) and each.shape == mesh.shape:
                return slices_of_axes(each.axis_names, slice_of_each(each))
        return None
    sizes = mesh.shape
    counts = dict(slow_axes) if isinstance(slow_axes, Mapping) else {}
    for name in slow_axes:
        if name not in sizes:
            raise ValueError(
                f"slow_axes has {name!r}, but the mesh has the axes {list(sizes)}: "
                "name axes of this mesh, or leave slow_axes out where none is slow."
            )
        if sizes[name] % counts.setdefault(name, sizes[name]):
            raise ValueError(
                f"slow_axes has {counts[name]} slices along {name!r}, an axis of "
                f"{sizes[name]} devices: give a number of slices that divides it."
            )
    return {name: count for name, count in counts.items() if count > 1}


def without_devices(
    mesh: Mesh | AbstractMesh | None, slow_axes: SlowAxes | None
) -> dict[str, Any]:
    """These arguments for another process, which has other devices."""
    if isinstance(mesh, Mesh):
        slow_axes, mesh = slices_of_mesh(mesh, slow_axes), mesh.abstract_mesh
    return {"mesh": mesh, "slow_axes": slow_axes}


def slice_of_each(mesh: Mesh) -> np.ndarray:
    """The slice of each device of a mesh, in the shape of its axes."""
    slices = [_slice_of(device) for device in mesh.devices.flat]
    return np.array(slices).reshape(mesh.devices.shape)


def warn_of_unknown_slices(mesh: AbstractMesh) -> None:
    """Warn if a mesh without devices has as many as there are, in several slices."""
    if jax.default_backend() == "cpu" or mesh.size != jax.device_count():
        return
    slices = len({_slice_of(device) for device in jax.devices()})
    if slices > 1:
        warnings.warn(
            f"the devices are in {slices} slices or nodes, and it is not known which "
            f"axes of the mesh {dict(mesh.shape)} lead from one to another: call "
            "jax.set_mesh, or pass mesh= or slow_axes= to the optimizer.",
            stacklevel=2,
        )


def _slice_of(device: Any) -> int:
    """The slice of a TPU, or the machine or NVLink domain of a GPU.

    A device without ``slice_index`` counts as in slice 0.
    """
    return int(getattr(device, "slice_index", 0))


def auto_spec(
    x: jax.Array,
    known: PartitionSpec | None,
    mesh: AbstractMesh,
    slices: Mapping[str, int],
) -> PartitionSpec:
    """What is known of an array's sharding, if that agrees with its type, or assumed.

    On Auto axes XLA's partitioner has the shardings, but does not tell. Where nobody says
    them, it is told others, by ``shard_map``, and moves what is elsewhere.

    Assumed are as many axes as divide an array ``(*batch, m, n)``, the first ones first:
    experts are then sharded by expert, layers by layer, and single matrices by rows. Axes
    that only lead to other slices hold replicas.
    """
    if known is not None:
        by_type = [
            tuple(name for name in names if name in mesh.explicit_axes)
            for names in typed_sharding.axes_of(known, x.ndim)
        ]
        if by_type == [*map(typed_sharding.names, typed_sharding.spec(x))]:
            return known
    mapped = typed_sharding.mapped_axes()
    left = [
        name
        for name in mesh.auto_axes
        if name not in mapped and slices.get(name, 1) < mesh.shape[name]
    ]
    entries = []
    for size, entry in zip(x.shape, typed_sharding.spec(x), strict=True):
        taken = typed_sharding.names(entry)
        for name in tuple(left):
            if size % math.prod(mesh.shape[each] for each in (*taken, name)) == 0:
                taken = (*taken, name)
                left.remove(name)
        entries.append(taken or None)
    return PartitionSpec(*entries)
