"""How many arrays of matrices are orthogonalized: in which dtype, together, and where."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from orscale_jax import (
    _journeys,
    _layouts,
    _mesh,
    _preconditioning,
    _sharding,
    _stacking,
)
from orscale_jax._columns import Columns
from orscale_jax._placement import Sharded
from orscale_jax._polar import polars_of, polars_on_cpu
from orscale_jax._precision import Arithmetic

Polars = Callable[..., list[jax.Array]]


def _unchanged(x: jax.Array) -> jax.Array:
    return x


class Platform(NamedTuple):
    """What suits a kind of device.

    Attributes:
      polars: ``polars(xs, dtype=..., **arguments)``, which takes polar factors there.
      dtype: Of the products' operands.
      stack_bytes: What a stack may have.
      at_once: What goes through Newton–Schulz in one batch.
      stack_length: How many arrays a stack may have; None for any number.
      together: How many batches go through it in turns.
      stored: Keeps an array of a device in the layout in which it would be stored.
      normalized: Whether ``polars`` takes normalized matrices. Their norms are sums that
        an accelerator adds up in the pass that makes the matrices, before they travel.
      partitioner: Whether its compiler asks for the program of one device, which
        placement on Auto axes takes. (libtpu's does not.)
    """

    polars: Polars
    dtype: np.dtype
    stack_bytes: int
    at_once: int
    stack_length: int | None = None
    together: int = 1
    stored: Callable[[jax.Array], jax.Array] = _unchanged
    normalized: bool = True
    partitioner: bool = True


_CPU = Platform(
    polars_on_cpu,
    np.dtype(jnp.float32),
    stack_bytes=_stacking.MAX_BYTES,
    at_once=_stacking.AT_ONCE_CPU,
    stack_length=_stacking.MAX_LENGTH_CPU,
    normalized=False,
)
_ACCELERATOR = Platform(
    polars_of,
    np.dtype(jnp.bfloat16),
    stack_bytes=_stacking.MAX_BYTES,
    at_once=_stacking.AT_ONCE,
)
# Between two products of one batch there is one of the other, during which operands are
# fetched: the compiler prefetches no result of the kernel before.
_TPU = Platform(
    functools.partial(polars_of, opaque=True),
    np.dtype(jnp.bfloat16),
    stack_bytes=_stacking.MAX_BYTES_TPU,
    at_once=_stacking.AT_ONCE_TPU,
    together=2,
    stored=_layouts.as_tpus_store,
)
_TPU_AUTO = _ACCELERATOR._replace(partitioner=False)


def polar_factors(
    matrices: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    auto_specs: Sequence[PartitionSpec] | None,
    dtype: DTypeLike | None,
    max_bytes: int | None,
    mesh: Mesh | AbstractMesh | None,
    **arguments: Any,
) -> list[jax.Array]:
    """The polar factors of arrays of matrices.

    Whatever is copied or sent on the way has ``dtype`` already, where that has the range
    of the entries: bfloat16 has float32's.

    Args:
      matrices: Arrays of shape ``(*batch, m, n)``.
      specs: The shardings of the factors, where types carry any.
      auto_specs: The shardings of the matrices on Auto axes, if they are known.
      dtype: As for :func:`orscale_jax.polar_factor`.
      max_bytes: What a stack may have; None for what suits the platform.
      mesh: As for :func:`orscale_jax.orthogonalize`.
      arguments: Of :func:`orscale_jax._polar.polars_of`. Some may be traced.

    Returns:
      The factors, in the dtypes of ``matrices``.
    """
    # An array without entries is its own factor, and has nothing to send.
    filled = [i for i, x in enumerate(matrices) if x.size]
    xs = [matrices[i] for i in filled]
    of_xs = [specs[i] for i in filled]
    on_mesh = _mesh.mesh_of(xs, mesh)
    in_specs = None if auto_specs is None else [auto_specs[i] for i in filled]
    if on_mesh is not None and _mesh.is_typed(on_mesh):
        in_specs = [jax.typeof(x).sharding.spec for x in xs]
    turns = _preconditioning.turns_squares(arguments["preconditioning"])
    traced = {k: v for k, v in arguments.items() if isinstance(v, jax.core.Tracer)}
    known = {k: v for k, v in arguments.items() if k not in traced}

    def on(platform: Platform) -> Callable[..., list[jax.Array]]:
        platform = _as_asked(platform, dtype, max_bytes)
        polars = functools.partial(platform.polars, dtype=platform.dtype, **known)
        return functools.partial(
            _on_platform, polars, on_mesh, platform, turns, of_xs, in_specs
        )

    settled = on_mesh is None or in_specs is not None
    by_platform = functools.partial(
        jax.lax.platform_dependent,
        cpu=on(_CPU),
        tpu=on(_TPU if settled else _TPU_AUTO),
        default=on(_ACCELERATOR),
    )
    found = iter(by_platform(xs, traced) if xs else ())
    return [
        next(found) if x.size else _sharding.shard_as(x, x, spec)
        for x, spec in zip(matrices, specs, strict=True)
    ]


def _as_asked(
    platform: Platform, dtype: DTypeLike | None, max_bytes: int | None
) -> Platform:
    if dtype is not None:
        platform = platform._replace(dtype=jnp.dtype(dtype))
    if max_bytes is not None:
        at_once = min(max_bytes, platform.at_once)
        platform = platform._replace(
            stack_bytes=max_bytes, stack_length=None, at_once=at_once
        )
    return platform


def _on_platform(
    polars: Polars,
    mesh: AbstractMesh | None,
    platform: Platform,
    turns: bool,
    specs: Sequence[PartitionSpec],
    in_specs: Sequence[PartitionSpec] | None,
    matrices: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> list[jax.Array]:
    sent = [_sent(x, platform) for x in matrices]
    in_turns = functools.partial(_in_turns, polars, platform.at_once, platform.together)
    if mesh is None:
        fn = functools.partial(in_turns, **traced)
        factors = _stacking.map_stacks(
            fn, sent, platform.stack_bytes, platform.stack_length
        )
    elif platform.partitioner or in_specs is not None:
        per_device = functools.partial(_per_device, in_turns, platform, turns)
        factors = _mesh.on_shards(per_device, sent, traced, mesh, in_specs)
    else:
        alone = functools.partial(polars, **traced)
        gathered = [_sharding.gather(x, (x.ndim - 2, x.ndim - 1)) for x in sent]
        found = _where_the_partitioner_puts_them(alone, mesh, platform, gathered)
        factors = [_sharding.shard_like(q, x) for q, x in zip(found, sent, strict=True)]
    placed = map(_sharding.shard_as, factors, matrices, specs)
    return [q.astype(x.dtype) for q, x in zip(placed, matrices, strict=True)]


def _where_the_partitioner_puts_them(
    fn: Callable[[Sequence[jax.Array]], list[jax.Array]],
    mesh: AbstractMesh,
    platform: Platform,
    matrices: Sequence[jax.Array],
) -> list[jax.Array]:
    """Single matrices as stacks that are spread over the mesh, batches as they are.

    How a batch is sharded is not known, and it may be right: experts over experts.
    """

    def of_each(xs: Sequence[jax.Array]) -> list[jax.Array]:
        return [fn([x])[0] for x in xs]

    def of_each_spread(xs: Sequence[jax.Array]) -> list[jax.Array]:
        return [_mesh.spread(lambda y: fn([y])[0], mesh, x) for x in xs]

    single = [x for x in matrices if x.ndim == 2]
    nbytes = min(platform.stack_bytes, platform.at_once) * mesh.size
    of_single = iter(_stacking.map_stacks(of_each_spread, single, nbytes))
    batches = [x for x in matrices if x.ndim > 2]
    of_batches = iter(_stacking.map_stacks(of_each, batches, platform.stack_bytes))
    return [next(of_single if x.ndim == 2 else of_batches) for x in matrices]


def _in_turns(
    polars: Polars,
    max_bytes: int,
    together: int,
    xs: Sequence[jax.Array],
    columns: Sequence[Columns | None] | None = None,
    **traced: jax.Array,
) -> list[jax.Array]:
    fn = functools.partial(polars, **traced)
    of_each = {} if columns is None else {"columns": columns}
    return _stacking.in_turns(fn, max_bytes, together, xs, **of_each)


def _per_device(
    polars: Polars,
    platform: Platform,
    turns: bool,
    shards: Sequence[jax.Array],
    arrays: Sequence[Sharded],
    sizes: Mapping[str, int],
    **traced: jax.Array,
) -> list[jax.Array]:
    fn = functools.partial(polars, **traced)
    stored = [platform.stored(x) for x in shards]
    arrays = [array._replace(turns=turns) for array in arrays]
    return _journeys.map_journeys(fn, stored, arrays, sizes, platform.stack_bytes)


def _sent(x: jax.Array, platform: Platform) -> jax.Array:
    if platform.normalized:
        arithmetic = Arithmetic(platform.dtype)
        x = _preconditioning.normalize(x, arithmetic, in_one_pass=True)
    as_wide = jnp.finfo(platform.dtype).maxexp >= jnp.finfo(x.dtype).maxexp
    narrower = platform.dtype.itemsize < x.dtype.itemsize
    return x.astype(platform.dtype) if as_wide and narrower else x
