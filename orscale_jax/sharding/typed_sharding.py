"""Sharding as part of an array's type, on meshes with Explicit axes.

Without a mesh or on Auto axes, only :func:`inferred` knows shardings; the others leave
them alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike


def mesh_of(
    arrays: Sequence[jax.Array], users_mesh: Mesh | AbstractMesh | None
) -> AbstractMesh | None:
    """The mesh of the arrays' types, else that given, else that of the context.

    None for one device without Explicit axes, and inside ``jax.shard_map``, where each
    device computes separately.
    """

    def matters(mesh: AbstractMesh) -> bool:
        return mesh.size > 1 or AxisType.Explicit in mesh.axis_types

    wanted = None if users_mesh is None else users_mesh.abstract_mesh
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    mesh = next(filter(matters, meshes), None)
    if mesh and wanted and wanted.size > 1 and mesh.shape != wanted.shape:
        raise ValueError(
            f"mesh={dict(wanted.shape)}, but the arrays are on a mesh "
            f"{dict(mesh.shape)}: pass the mesh of the parameters, or None."
        )
    mesh = mesh or wanted or jax.sharding.get_abstract_mesh()
    if not matters(mesh):
        return None
    if not mesh.manual_axes:
        return mesh
    for array in arrays:
        entries = axes_of(jax.typeof(array).sharding.spec, array.ndim)
        if sharded := [name for entry in entries for name in entry]:
            raise ValueError(
                f"within jax.shard_map over {[*mesh.manual_axes]} a matrix of shape "
                f"{array.shape} is still sharded over {sharded}, which are Explicit: "
                "name these in axis_names of shard_map as well, or call the optimizer "
                "outside of it."
            )
    return None


def mapped_axes() -> frozenset[Any]:
    """The axes of the mesh over which ``jax.vmap`` maps here."""
    env = core.get_axis_env()  # JAX has no public function for this.
    return env.spmd_axis_names | env.explicit_mesh_axis_names


def spec(leaf: jax.Array) -> list[Any]:
    """One entry per axis: the axes of the mesh that it is sharded over."""
    entries = tuple(jax.typeof(leaf).sharding.spec)
    return [*entries, *(None,) * (leaf.ndim - len(entries))]


def axes_of(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """For each axis of an array, the axes of the mesh over which it is sharded."""
    entries = [*spec, *(None,) * (rank - len(spec))]
    return tuple(names(entry) for entry in entries)


def names(entry: Any) -> tuple[str, ...]:
    """The axes of the mesh in one entry of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def inferred(fn: Callable[[Any], Any], tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The specs of ``fn(tree)``, for leaves on a mesh or replicated; only traced."""
    # On Explicit axes JAX itself propagates shardings.
    axis_types = (AxisType.Explicit,) * len(mesh.axis_names)
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types)
    specs = []

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        placed = NamedSharding(explicit, spec)
        dtype = jax.numpy.result_type(leaf)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=placed)

    def read(tree: Any) -> None:
        # The types are read while tracing: the results of eval_shape have no mesh.
        specs.append(jax.tree.map(lambda x: jax.typeof(x).sharding.spec, fn(tree)))

    with jax.sharding.use_abstract_mesh(explicit):
        jax.eval_shape(read, jax.tree.map(abstract, tree))
    return specs[0]


def is_sharded(leaf: jax.Array) -> bool:
    return any(entry is not None for entry in spec(leaf))


def gather(leaf: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The leaf with some axes, or all of them, whole on every device."""
    axes = tuple(range(leaf.ndim)) if axes is None else axes
    gathered = [None if i in axes else entry for i, entry in enumerate(spec(leaf))]
    return shard_as(leaf, leaf, gathered)


def shard_like(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """``x``, which has the axes of ``leaf``, sharded like ``leaf``."""
    return shard_as(x, leaf, spec(leaf))


def shard_as(x: jax.Array, like: jax.Array, entries: Iterable[Any]) -> jax.Array:
    """``x`` sharded as ``entries`` say, on the mesh of ``like``."""
    entries = list(entries)
    # A type without a mesh says nothing: ``in_shardings`` may place a NumPy array on one.
    if entries == spec(x) or jax.typeof(like).sharding.mesh.empty:
        return x
    # A mesh is abstract where its array is traced, and has devices where it is not.
    traced = isinstance(like, jax.core.Tracer)
    sharding: Any = jax.typeof(like).sharding if traced else like.sharding
    placed = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    return jax.sharding.reshard(x, placed)


def full(
    shape: Sequence[int], value: float, dtype: DTypeLike, like: jax.Array
) -> jax.Array:
    """An array of one value, on the mesh of ``like``, varying as it does in shard_map."""
    if isinstance(like, jax.core.Tracer):
        return jax.lax.full_like(like, value, dtype, tuple(shape))
    where, device = getattr(like, "sharding", None), None
    if isinstance(where, NamedSharding):
        device = NamedSharding(where.mesh, PartitionSpec())
    return jax.numpy.full(shape, value, dtype, device=device)


def split(leaf: jax.Array, axis: int, count: int) -> jax.Array:
    """The leaf with an axis split in two, ``(count, ...)``, sharded over the count."""
    size = leaf.shape[axis] // count
    shape = (*leaf.shape[:axis], count, size, *leaf.shape[axis + 1 :])
    # JAX would shard the entries of a single part, over axes of the mesh of length 1.
    if count == 1 or count % shards(leaf, axis):
        leaf = gather(leaf, (axis,))
    # JAX would move an axis of length 1 in the mesh to the second of the two.
    entries = spec(leaf)
    entries.insert(axis + 1, None)
    return shard_as(leaf.reshape(shape), leaf, entries)


def merge(leaf: jax.Array, axis: int) -> jax.Array:
    """The inverse of :func:`split`."""
    size = leaf.shape[axis] * leaf.shape[axis + 1]
    shape = (*leaf.shape[:axis], size, *leaf.shape[axis + 2 :])
    return gather(leaf, (axis + 1,)).reshape(shape)


def shards(leaf: jax.Array, axis: int) -> int:
    """The number of parts in which an axis is sharded, by the leaf's type."""
    mesh = jax.typeof(leaf).sharding.mesh
    return math.prod(mesh.shape[name] for name in names(spec(leaf)[axis]))
