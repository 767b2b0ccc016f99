"""How many arrays of matrices are orthogonalized: in which dtype, together, and where."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from orscale_jax import _journeys, _mesh, _stacking
from orscale_jax._placement import Sharded

Polar = Callable[..., jax.Array]


def map_matrices(
    polar: Polar,
    matrices: Sequence[jax.Array],
    dtype: DTypeLike | None,
    max_bytes: int | None,
    **traced: jax.Array,
) -> list[jax.Array]:
    """The polar factors of arrays of matrices.

    Whatever is copied or sent on the way has ``dtype`` already, where that has the range
    of the entries: bfloat16 has float32's.

    Args:
      polar: ``polar_factor(x, dtype=..., **traced)``.
      matrices: Arrays of shape ``(*batch, m, n)``.
      dtype: As for :func:`orscale_jax.polar_factor`.
      max_bytes: What a stack may have. None: :data:`_stacking.MAX_BYTES_CPU` or
        :data:`_stacking.MAX_BYTES`.
      traced: Arguments of ``polar`` that are known when the program runs.

    Returns:
      The factors, in the dtypes and shardings of ``matrices``.
    """
    mesh = _mesh.mesh_of(matrices)

    def on(
        default_dtype: DTypeLike, default_bytes: int, at_once: int
    ) -> Callable[..., list[jax.Array]]:
        operands = jnp.dtype(default_dtype if dtype is None else dtype)
        most = default_bytes if max_bytes is None else max_bytes
        polar_in = functools.partial(
            _in_chunks, functools.partial(polar, dtype=operands), min(at_once, most)
        )

        def mapped(
            matrices: Sequence[jax.Array], traced: Mapping[str, jax.Array]
        ) -> list[jax.Array]:
            sent = [_rounded(x, operands) for x in matrices]
            if mesh is None:
                fn = functools.partial(polar_in, **traced)
                factors = _stacking.map_stacks(fn, sent, most)
            else:
                per_device = functools.partial(_per_device, polar_in, most)
                factors = _mesh.on_shards(per_device, sent, traced, mesh)
            return [q.astype(x.dtype) for q, x in zip(factors, matrices, strict=True)]

        return mapped

    return jax.lax.platform_dependent(
        list(matrices),
        traced,
        cpu=on(jnp.float32, _stacking.MAX_BYTES_CPU, _stacking.MAX_BYTES_CPU),
        tpu=on(jnp.bfloat16, _stacking.MAX_BYTES, _stacking.AT_ONCE_TPU),
        default=on(jnp.bfloat16, _stacking.MAX_BYTES, _stacking.MAX_BYTES),
    )


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
