"""What types do not say of arrays on a mesh, and a program has to assume.

On Auto axes XLA's partitioner has the shardings, but does not tell. Where nobody says
them, it is told others, by ``shard_map``, and moves what is elsewhere.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, PartitionSpec

from orscale_jax.sharding import typed_sharding


def auto_spec(
    x: jax.Array,
    known: PartitionSpec | None,
    mesh: AbstractMesh,
    slices: Mapping[str, int],
) -> PartitionSpec:
    """What is known of an array's sharding, if that agrees with its type, or assumed.

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


def on_devices_of(x: jax.Array, mesh: AbstractMesh) -> jax.Array:
    """``x``, in a program for as many devices as a mesh has; others are refused.

    Their number is known when the program is lowered, and not when it is traced.
    """
    return _devices_p.bind(x, mesh=mesh)


def _require(mesh: AbstractMesh, devices: int) -> None:
    if devices != mesh.size:
        raise ValueError(
            f"mesh={dict(mesh.shape)} has {mesh.size} devices, but the arrays are on "
            f"{devices}: pass the mesh that they are on, or None."
        )


_devices_p = Primitive("on_devices_of_mesh")


def _run_devices(x: jax.Array, *, mesh: AbstractMesh) -> jax.Array:
    _require(mesh, len(x.sharding.device_set))
    return x


def _lower_devices(ctx: Any, x: Any, *, mesh: AbstractMesh) -> list[Any]:
    _require(mesh, ctx.module_context.axis_context.num_devices)
    return [x]


_devices_p.def_impl(_run_devices)
_devices_p.def_abstract_eval(lambda x, *, mesh: x)
ad.deflinear2(_devices_p, lambda x, _, *, mesh: [on_devices_of(x, mesh)])
batching.defvectorized(_devices_p)
mlir.register_lowering(_devices_p, _lower_devices)
