"""Which mesh arrays are on, and whether their types say how they are sharded."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core
from jax.sharding import AbstractMesh, AxisType, Mesh

from orscale_jax.sharding import typed_sharding


def mesh_of(
    arrays: Sequence[jax.Array], given: Mesh | AbstractMesh | None
) -> AbstractMesh | None:
    """The mesh that arrays are on, or None.

    The arrays' types name it, even inside ``jax.jit``; if they do not, it is the given
    mesh or that of the context. It is None for a mesh of one device without Explicit
    axes, and inside ``jax.shard_map``, where each device computes separately.

    Args:
      arrays: The arrays.
      given: The mesh of arrays whose types name none.

    Raises:
      ValueError: If types name another mesh than the given one.
    """
    wanted = None if given is None else given.abstract_mesh
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    mesh = next(filter(_matters, meshes), None)
    if mesh is None:
        context = jax.sharding.get_abstract_mesh()
        mesh = wanted or (context if _matters(context) else None)
    elif wanted is not None and wanted.size > 1 and mesh.shape != wanted.shape:
        raise ValueError(
            f"mesh={dict(wanted.shape)}, but the arrays are on a mesh "
            f"{dict(mesh.shape)}: pass the mesh of the parameters, or None."
        )
    if mesh is None:
        return None
    if mesh.manual_axes:
        _refuse_mixed_with_manual(arrays, mesh)
        return None
    return mesh if _matters(mesh) else None


def _refuse_mixed_with_manual(arrays: Sequence[jax.Array], mesh: AbstractMesh) -> None:
    """Refuse matrices that are sharded over Explicit axes inside shard_map."""
    for array in arrays:
        axes = typed_sharding.axes_of(jax.typeof(array).sharding.spec, array.ndim)
        if sharded := [name for names in axes for name in names]:
            raise ValueError(
                f"within jax.shard_map over {[*mesh.manual_axes]} a matrix of shape "
                f"{array.shape} is still sharded over {sharded}, which are Explicit: "
                "name these in axis_names of shard_map as well, or call the optimizer "
                "outside of it."
            )


def _matters(mesh: AbstractMesh) -> bool:
    return mesh.size > 1 or AxisType.Explicit in mesh.axis_types


def mapped_axes() -> frozenset[Any]:
    """The axes of the mesh over which ``jax.vmap`` maps here.

    Its ``spmd_axis_name`` names them, or it maps over an array axis that is sharded over
    Explicit axes. JAX has no public function for this.
    """
    env = core.get_axis_env()
    return env.spmd_axis_names | env.explicit_mesh_axis_names
