"""Sharding as part of an array's type, on meshes with Explicit axes.

Elsewhere (no mesh, Auto axes) types carry no sharding, and nothing here does anything.
"""

import jax
from jax.sharding import NamedSharding, PartitionSpec


def gather(leaf: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The leaf with ``axes`` whole on every device and the others as they are."""
    spec = _spec(leaf)
    return _reshard(leaf, leaf, [None if i in axes else s for i, s in enumerate(spec)])


def shard_like(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """``x``, which has the axes of ``leaf``, sharded as it is."""
    return _reshard(x, leaf, _spec(leaf))


def shard_like_axes(x: jax.Array, leaf: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """``x``, which has only the given axes of ``leaf``, sharded as they are."""
    spec = _spec(leaf)
    return _reshard(x, leaf, [spec[axis] for axis in axes])


def _spec(leaf: jax.Array) -> list[object]:
    spec = tuple(jax.typeof(leaf).sharding.spec)
    return [*spec, *(None,) * (leaf.ndim - len(spec))]


def _reshard(x: jax.Array, like: jax.Array, spec: list[object]) -> jax.Array:
    if spec == _spec(x):
        return x
    mesh = jax.typeof(like).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
