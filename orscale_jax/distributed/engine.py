"""Polar factors of many arrays of matrices: plan, then execute the plan.

On one device arrays of one shape share stacks; on a mesh they are exchanged so that every
device orthogonalizes whole matrices. Each platform has its branch in the program, since
the platform is known when the program is compiled and not when it is traced.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from orscale_jax.distributed import partitioner, shards
from orscale_jax.distributed.buckets import ShardedArray
from orscale_jax.distributed.chunks import map_chunks
from orscale_jax.distributed.columns import Columns
from orscale_jax.distributed.exchange import exchange
from orscale_jax.distributed.horizontal_fusion import slices_of_stacks
from orscale_jax.distributed.planner import plan_buckets
from orscale_jax.distributed.platforms import (
    PLATFORMS,
    Platform,
    parameter_layout,
    row_major,
)
from orscale_jax.distributed.reductions import reduce_all
from orscale_jax.distributed.stacks import (
    StackKey,
    join_in_place,
    map_stacks,
    plan_stacks,
)
from orscale_jax.newton_schulz import preconditioning
from orscale_jax.newton_schulz.polar import NewtonSchulz, newton_schulz, one_by_one
from orscale_jax.sharding import meshes, typed_sharding


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """How to compute polar factors: the iteration, its memory, the mesh, the platforms.

    Attributes:
      settings: The iteration; its dtype is None for the platform's.
      stack_bytes: The largest stack; None for the platform's limit.
      mesh: The mesh of arrays whose types name none; None for that of the context.
      platforms: The policies of the platforms.
    """

    settings: NewtonSchulz
    stack_bytes: int | None = None
    mesh: Mesh | AbstractMesh | None = None
    platforms: Mapping[str, Platform] = dataclasses.field(
        default_factory=lambda: PLATFORMS
    )


class _Shardings(NamedTuple):
    """Where arrays of matrices are, and where their factors go.

    Attributes:
      mesh: The mesh; None for one device.
      matrices: The shardings of the matrices; None if only the partitioner knows them.
      factors: The shardings of the factors, where types have any.
    """

    mesh: AbstractMesh | None
    matrices: Sequence[PartitionSpec] | None
    factors: Sequence[PartitionSpec]


def polar_factors(
    matrices: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    auto_specs: Sequence[PartitionSpec] | None,
    execution: Execution,
) -> list[jax.Array]:
    """Polar factors of arrays of matrices.

    Args:
      matrices: Arrays of shape ``(*batch, m, n)``.
      specs: The shardings of the factors, where types have any.
      auto_specs: The shardings of the matrices on Auto axes; None if they are unknown.
      execution: How to compute them.

    Returns:
      The factors, in the dtypes of ``matrices``.
    """
    # An array without entries is its own factor.
    filled = [i for i, x in enumerate(matrices) if x.size]
    xs = [matrices[i] for i in filled]
    mesh = meshes.mesh_of(xs, execution.mesh)
    in_specs = None if auto_specs is None else [auto_specs[i] for i in filled]
    if mesh is not None and meshes.is_typed(mesh):
        in_specs = [jax.typeof(x).sharding.spec for x in xs]

    shardings = _Shardings(mesh, in_specs, [specs[i] for i in filled])

    def branch(name: str) -> Callable[..., list[jax.Array]]:
        platform = execution.platforms[name].limited(
            execution.settings.dtype, execution.stack_bytes
        )
        return functools.partial(_on_platform, platform, execution.settings, shardings)

    known = mesh is None or in_specs is not None
    by_platform = functools.partial(
        jax.lax.platform_dependent,
        cpu=branch("cpu"),
        tpu=branch("tpu" if known else "tpu_auto"),
        default=branch("gpu"),
    )
    qs = by_platform(xs, execution.settings.traced) if xs else []
    factors = dict(zip(filled, qs, strict=True))
    return [
        factors[i] if x.size else typed_sharding.shard_as(x, x, specs[i])
        for i, x in enumerate(matrices)
    ]


def _on_platform(
    platform: Platform,
    settings: NewtonSchulz,
    shardings: _Shardings,
    matrices: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> list[jax.Array]:
    """One platform's branch; ``traced`` are the settings that are traced."""
    settings = dataclasses.replace(
        settings,
        dtype=platform.dtype,
        by_strips=platform.one_by_one,
        hide_coefficients=platform.hide_coefficients,
    )
    sent = _to_send(platform, settings, matrices)
    if shardings.mesh is None:
        qs = _on_one_device(platform, settings.with_traced(traced), sent)
    else:
        sent = _normalized_late(platform, settings, sent)
        qs = _on_mesh(platform, settings, shardings, sent, traced)
    # Resharded before the cast, to send the narrower dtype.
    placed = map(typed_sharding.shard_as, qs, matrices, shardings.factors)
    return [q.astype(x.dtype) for q, x in zip(placed, matrices, strict=True)]


def _on_mesh(
    platform: Platform,
    settings: NewtonSchulz,
    shardings: _Shardings,
    sent: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> list[jax.Array]:
    mesh, specs, _ = shardings
    assert mesh is not None
    per_device = functools.partial(_on_each_device, platform, settings)
    if specs is not None:
        return shards.on_shards(per_device, sent, traced, mesh, specs)
    spread_out = functools.partial(_spread_out, platform, settings)
    if platform.custom_partitioning:
        return partitioner.on_unknown_shards(per_device, spread_out, sent, traced, mesh)
    return spread_out(mesh, sent, traced)


def _on_one_device(
    platform: Platform, settings: NewtonSchulz, sent: Sequence[jax.Array]
) -> list[jax.Array]:
    stacks = plan_stacks(
        [StackKey.of(x) for x in sent], platform.stack_bytes, platform.stack_length
    )
    if platform.row_major:
        sent = [row_major(x) for x in sent]

    def polar(xs: Sequence[jax.Array]) -> list[jax.Array]:
        xs = _normalized_late(platform, settings, xs)
        return _in_chunks(platform, settings, xs, [None] * len(xs))

    qs = map_stacks(polar, sent, stacks)
    return [_tall_in_rows(q) for q in qs] if platform.row_major else qs


def _tall_in_rows(x: jax.Array) -> jax.Array:
    return row_major(x) if x.shape[-2] > x.shape[-1] else x


def _on_each_device(
    platform: Platform,
    settings: NewtonSchulz,
    shards: Sequence[jax.Array],
    arrays: Sequence[ShardedArray],
    mesh_shape: Mapping[str, int],
    **traced: jax.Array,
) -> list[jax.Array]:
    """The program of one device of a mesh, given its shards of the arrays."""
    settings = settings.with_traced(traced)
    may_transpose = preconditioning.may_transpose_squares(settings.preconditioning)
    arrays = [array._replace(may_transpose=may_transpose) for array in arrays]
    cost_model = platform.cost_model(settings)
    buckets = plan_buckets(arrays, mesh_shape, platform.stack_bytes, cost_model)
    if platform.constrain_layout:
        shards = [parameter_layout(x) for x in shards]
    polar = functools.partial(_in_chunks, platform, settings)
    join = join_in_place if platform.join_in_place else jnp.concatenate
    qs = exchange(polar, shards, buckets, mesh_shape, join)
    return [parameter_layout(q) for q in qs] if platform.constrain_layout else qs


def _in_chunks(
    platform: Platform,
    settings: NewtonSchulz,
    xs: Sequence[jax.Array],
    columns: Sequence[Columns | None],
) -> list[jax.Array]:
    polar = functools.partial(_polar, platform, settings)
    return map_chunks(polar, xs, columns, platform.chunk_bytes, platform.interleave)


def _polar(
    platform: Platform,
    settings: NewtonSchulz,
    xs: Sequence[jax.Array],
    columns: Sequence[Columns | None],
) -> list[jax.Array]:
    """Polar factors of a few chunks."""
    if platform.one_by_one:
        pairs = zip(xs, columns, strict=True)
        return [one_by_one(x, settings, of_x) for x, of_x in pairs]
    return newton_schulz(xs, settings, columns)


def _to_send(
    platform: Platform, settings: NewtonSchulz, matrices: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Round matrices to be stacked or sent; normalize them before, or late."""
    if platform.round_first:
        return jax.lax.optimization_barrier(_rounded(platform, matrices))
    if platform.one_by_one:
        return _rounded(platform, matrices)
    return _normalized(platform, settings, matrices)


def _normalized_late(
    platform: Platform, settings: NewtonSchulz, sent: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    return _normalized(platform, settings, sent) if platform.round_first else sent


def _normalized(
    platform: Platform, settings: NewtonSchulz, matrices: Sequence[jax.Array]
) -> list[jax.Array]:
    xs = preconditioning.normalize_all(matrices, settings.arithmetic(), _sums)
    return _rounded(platform, xs)


def _rounded(platform: Platform, matrices: Sequence[jax.Array]) -> list[jax.Array]:
    return [x.astype(platform.sent_dtype(x.dtype)) for x in matrices]


def _sums(xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums of the entries of each matrix, of shape (..., 1, 1)."""
    sums = reduce_all(jnp.sum, xs, [(x.ndim - 2, x.ndim - 1) for x in xs])
    return [jnp.expand_dims(total, (-2, -1)) for total in slices_of_stacks(sums)]


def _spread_out(
    platform: Platform,
    settings: NewtonSchulz,
    mesh: AbstractMesh,
    sent: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> list[jax.Array]:
    """Let the partitioner spread stacks over the mesh, and leave batches as they are.

    The sharding of a batch is unknown, and may be the right one: experts by expert.
    """
    settings = settings.with_traced(traced)
    if platform.one_by_one:  # A loop over matrices would gather each of them.
        sent = _normalized(platform, settings, sent)
        platform = platform._replace(one_by_one=False)

    def polar(xs: Sequence[jax.Array]) -> list[jax.Array]:
        return [_polar(platform, settings, [x], [None])[0] for x in xs]

    def spread(xs: Sequence[jax.Array]) -> list[jax.Array]:
        return [partitioner.spread(lambda y: polar([y])[0], mesh, x) for x in xs]

    whole = [typed_sharding.gather(x, (x.ndim - 2, x.ndim - 1)) for x in sent]
    single = [x for x in whole if x.ndim == 2]
    batches = [x for x in whole if x.ndim > 2]
    nbytes = min(platform.stack_bytes, platform.chunk_bytes) * mesh.size
    plans = (
        plan_stacks([StackKey.of(x) for x in xs], limit)
        for xs, limit in ((single, nbytes), (batches, platform.stack_bytes))
    )
    of_single = iter(map_stacks(spread, single, next(plans)))
    of_batches = iter(map_stacks(polar, batches, next(plans)))
    qs = [next(of_single if x.ndim == 2 else of_batches) for x in whole]
    return [typed_sharding.shard_like(q, x) for q, x in zip(qs, sent, strict=True)]
