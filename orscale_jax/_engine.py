"""How many arrays of matrices are orthogonalized: in which dtype, together, and where."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from orscale_jax import _journeys, _mesh, _sharding, _stacking
from orscale_jax._placement import Sharded

Polar = Callable[..., jax.Array]


class Limits(NamedTuple):
    """What suits a kind of device.

    Attributes:
      dtype: Of the products' operands.
      stack_bytes: What a stack may have.
      at_once: What goes through Newton–Schulz in one batch.
      partitioner: Whether its compiler asks for the program of one device, which
        placement on Auto axes takes. (libtpu's does not.)
    """

    dtype: np.dtype
    stack_bytes: int
    at_once: int
    partitioner: bool = True


_CPU = Limits(np.dtype(jnp.float32), _stacking.MAX_BYTES_CPU, _stacking.MAX_BYTES_CPU)
_GPU = Limits(np.dtype(jnp.bfloat16), _stacking.MAX_BYTES, _stacking.MAX_BYTES)
_TPU = _GPU._replace(at_once=_stacking.AT_ONCE_TPU, partitioner=False)


def map_matrices(
    polar: Polar,
    matrices: Sequence[jax.Array],
    dtype: DTypeLike | None,
    max_bytes: int | None,
    mesh: Mesh | AbstractMesh | None,
    **traced: jax.Array,
) -> list[jax.Array]:
    """The polar factors of arrays of matrices.

    Whatever is copied or sent on the way has ``dtype`` already, where that has the range
    of the entries: bfloat16 has float32's.

    Args:
      polar: ``polar_factor(x, dtype=..., **traced)``.
      matrices: Arrays of shape ``(*batch, m, n)``.
      dtype: As for :func:`orscale_jax.polar_factor`.
      max_bytes: What a stack may have; None for what suits the platform.
      mesh: As for :func:`orscale_jax.orthogonalize`.
      traced: Arguments of ``polar`` that are known when the program runs.

    Returns:
      The factors, in the dtypes and shardings of ``matrices``.
    """
    # An array without entries is its own factor, and has nothing to send.
    filled = [x for x in matrices if x.size]
    if len(filled) < len(matrices):
        factors = iter(map_matrices(polar, filled, dtype, max_bytes, mesh, **traced))
        return [next(factors) if x.size else x for x in matrices]
    if not matrices:
        return []
    found = _mesh.mesh_of(matrices, mesh)

    def on(limits: Limits) -> Callable[..., list[jax.Array]]:
        if dtype is not None:
            limits = limits._replace(dtype=jnp.dtype(dtype))
        if max_bytes is not None:
            at_once = min(max_bytes, limits.at_once)
            limits = limits._replace(stack_bytes=max_bytes, at_once=at_once)
        return functools.partial(_map_matrices, polar, found, limits)

    return jax.lax.platform_dependent(
        list(matrices), traced, cpu=on(_CPU), tpu=on(_TPU), default=on(_GPU)
    )


def _map_matrices(
    polar: Polar,
    mesh: AbstractMesh | None,
    limits: Limits,
    matrices: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> list[jax.Array]:
    sent = [_rounded(x, limits.dtype) for x in matrices]
    whole = functools.partial(polar, dtype=limits.dtype)
    in_chunks = functools.partial(_in_chunks, whole, limits.at_once)
    if mesh is None:
        fn = functools.partial(in_chunks, **traced)
        factors = _stacking.map_stacks(fn, sent, limits.stack_bytes)
    elif limits.partitioner or _mesh.is_typed(mesh):
        per_device = functools.partial(_per_device, in_chunks, limits.stack_bytes)
        factors = _mesh.on_shards(per_device, sent, traced, mesh)
    else:
        # In one batch: which of its axes are sharded is not known.
        fn = functools.partial(whole, **traced)
        gathered = [_sharding.gather(x, (x.ndim - 2, x.ndim - 1)) for x in sent]
        found = _stacking.map_stacks(fn, gathered, limits.stack_bytes)
        factors = [_sharding.shard_like(q, x) for q, x in zip(found, sent, strict=True)]
    return [q.astype(x.dtype) for q, x in zip(factors, matrices, strict=True)]


def _in_chunks(
    polar: Polar, max_bytes: int, x: jax.Array, **traced: jax.Array
) -> jax.Array:
    return _stacking.in_chunks(functools.partial(polar, **traced), max_bytes, x)


def _per_device(
    polar: Polar,
    max_bytes: int,
    shards: Sequence[jax.Array],
    arrays: Sequence[Sharded],
    sizes: Mapping[str, int],
    **traced: jax.Array,
) -> list[jax.Array]:
    fn = functools.partial(polar, **traced)
    return _journeys.map_matrices(fn, shards, arrays, sizes, max_bytes)


def _rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    as_wide = jnp.finfo(dtype).maxexp >= jnp.finfo(x.dtype).maxexp
    narrower = dtype.itemsize < x.dtype.itemsize
    return x.astype(dtype) if as_wide and narrower else x
