"""Stacks that XLA's partitioner spreads over a mesh whose shardings it alone knows."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orscale_jax.distributed.buckets import count_devices
from orscale_jax.distributed.platforms import Platform
from orscale_jax.distributed.stacks import StackKey, plan_stacks, stack, unstack
from orscale_jax.newton_schulz.polar import newton_schulz
from orscale_jax.sharding import typed_sharding


def spread_out(
    platform: Platform,
    packed: Sequence[jax.Array],
    mesh: AbstractMesh,
    slices: Mapping[str, int],
) -> list[jax.Array]:
    """Polar factors of packed matrices: stacks are spread, batches stay as they are.

    The sharding of a batch is unknown, and may be the right one: experts by expert.
    Stacks are not spread along axes that only lead to other slices.
    """
    normalized = platform.pack_to_spread(packed)
    whole = [typed_sharding.gather(x, (x.ndim - 2, x.ndim - 1)) for x in normalized]
    single = [i for i, x in enumerate(whole) if x.ndim == 2]
    batches = [i for i, x in enumerate(whole) if x.ndim > 2]
    mapped = typed_sharding.mapped_axes()
    axes = tuple(
        name
        for name in mesh.auto_axes
        if name not in mapped and slices.get(name, 1) < mesh.shape[name]
    )
    of_single = _of_single(platform, [whole[i] for i in single], mesh, axes)
    of_batches = _of_batches(platform, [whole[i] for i in batches])
    qs = dict(zip(single + batches, of_single + of_batches, strict=True))
    return [typed_sharding.shard_like(qs[i], x) for i, x in enumerate(normalized)]


def _of_single(
    platform: Platform,
    xs: Sequence[jax.Array],
    mesh: AbstractMesh,
    axes: tuple[str, ...],
) -> list[jax.Array]:
    """Polar factors of arrays that are one matrix each, spread along axes of a mesh."""
    limits = platform.limits
    devices = count_devices(axes, mesh.shape)
    nbytes = min(limits.stack_bytes, limits.chunk_bytes) * devices
    plan = plan_stacks([StackKey.of(x) for x in xs], nbytes)
    results = []
    for stacked in stack(xs, plan):
        [q] = newton_schulz([_spread(stacked, mesh, axes)], platform.iteration)
        results.append(_collect(q, mesh, axes, stacked.shape))
    return unstack(results, plan, xs)


def _of_batches(platform: Platform, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Polar factors of arrays with batch axes."""
    plan = plan_stacks([StackKey.of(x) for x in xs], platform.limits.stack_bytes)
    results = [newton_schulz([x], platform.iteration)[0] for x in stack(xs, plan)]
    return unstack(results, plan, xs)


def _spread(x: jax.Array, mesh: AbstractMesh, axes: tuple[str, ...]) -> jax.Array:
    """Matrices ``(m, n)`` or ``(k, m, n)``, evenly over the devices, padded by zeros."""
    by_rows, by_matrices = _shardings(mesh, axes)
    count = math.prod(x.shape[:-2])
    missing = -count % count_devices(axes, mesh.shape)
    padded = jnp.pad(x.reshape(count, *x.shape[-2:]), [(0, missing), (0, 0), (0, 0)])
    # First by rows: the partitioner would otherwise replicate whole stacks.
    rows = jax.lax.with_sharding_constraint(padded, by_rows)
    return jax.lax.with_sharding_constraint(rows, by_matrices)


def _collect(
    stacked: jax.Array,
    mesh: AbstractMesh,
    axes: tuple[str, ...],
    shape: Sequence[int],
) -> jax.Array:
    """Invert :func:`_spread`."""
    by_rows, by_matrices = _shardings(mesh, axes)
    matrices = jax.lax.with_sharding_constraint(stacked, by_matrices)
    rows = jax.lax.with_sharding_constraint(matrices, by_rows)
    return rows[: math.prod(shape[:-2])].reshape(shape)


def _shardings(
    mesh: AbstractMesh, axes: tuple[str, ...]
) -> tuple[NamedSharding, NamedSharding]:
    """By rows, and by matrices, over axes of the mesh."""
    by_rows, by_matrices = PartitionSpec(None, axes), PartitionSpec(axes)
    return NamedSharding(mesh, by_rows), NamedSharding(mesh, by_matrices)
