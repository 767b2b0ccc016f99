"""Polar factors of many arrays of matrices.

On one device arrays of one shape share stacks; on a mesh they are exchanged so that every
device orthogonalizes whole matrices. Each platform has its branch in the program, since
the platform is known when the program is compiled and not when it is traced.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from orscale_jax.distributed.auto import on_unknown_shards
from orscale_jax.distributed.exchange import on_shards
from orscale_jax.distributed.platforms import (
    PLATFORMS,
    Limits,
    Platform,
    StackKey,
    plan_stacks,
    polar_in_chunks,
    stack,
    unstack,
)
from orscale_jax.distributed.slow_links import (
    SlowAxes,
    slices_of_mesh,
    warn_of_unknown_slices,
    without_devices,
)
from orscale_jax.newton_schulz.polar import NewtonSchulz
from orscale_jax.sharding import typed_sharding


@dataclasses.dataclass(frozen=True)
class PolarOptions:
    """Options of polar factors: the iteration, its memory, the mesh, the platforms.

    Equal ones compile the same program on one device.

    Attributes:
      settings: The iteration; its dtype is None for the platform's.
      stack_bytes: The largest stack; None for the platform's limit.
      mesh: The mesh of arrays whose types name none; None for that of the context.
      slow_axes: The axes of the mesh that cross slow links; None to ask its devices.
      platforms: The platforms, by the names of ``PLATFORMS``.
    """

    settings: NewtonSchulz
    stack_bytes: int | None = None
    mesh: Mesh | AbstractMesh | None = None
    slow_axes: SlowAxes | None = dataclasses.field(default=None, hash=False)
    platforms: Mapping[str, Platform] = dataclasses.field(
        default_factory=lambda: PLATFORMS, hash=False
    )

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to another process."""
        return vars(self) | without_devices(self.mesh, self.slow_axes)

    def platform(self, name: str) -> Platform:
        """A platform with these options."""
        row, stack_bytes = self.platforms[name], self.stack_bytes
        limits = row.limits
        if stack_bytes is not None:
            chunk_bytes = min(stack_bytes, limits.chunk_bytes)
            limits = Limits(stack_bytes, chunk_bytes, interleave=limits.interleave)
        dtype = self.settings.dtype or row.dtype
        return dataclasses.replace(
            row, dtype=dtype, limits=limits, settings=self.settings
        )


class _Shardings(NamedTuple):
    """Where arrays of matrices are, and where their factors go."""

    mesh: AbstractMesh | None  # None for one device.
    # The number of slices along each axis that crosses slow links; None if unknown.
    slices: Mapping[str, int] | None
    matrices: Sequence[PartitionSpec] | None  # None if only the partitioner knows them.
    factors: Sequence[PartitionSpec]  # Where types have any.


def polar_factors(
    matrices: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    auto_specs: Sequence[PartitionSpec] | None,
    options: PolarOptions,
) -> list[jax.Array]:
    """Polar factors of arrays ``(*batch, m, n)``, in their dtypes.

    ``specs`` are the shardings of the factors, where types have any; ``auto_specs`` those
    of the matrices on Auto axes, None if they are unknown.
    """
    # An array without entries is its own factor.
    factors = {
        i: typed_sharding.shard_as(x, x, specs[i])
        for i, x in enumerate(matrices)
        if not x.size
    }
    filled = [i for i in range(len(matrices)) if i not in factors]
    if filled:
        xs = [matrices[i] for i in filled]
        mesh = typed_sharding.mesh_of(xs, options.mesh)
        slices, known = None, None
        if mesh is not None:
            slices = slices_of_mesh(mesh, options.slow_axes, options.mesh)
            if mesh.are_all_axes_explicit:
                known = [jax.typeof(x).sharding.spec for x in xs]
            elif auto_specs is not None:
                known = [auto_specs[i] for i in filled]
            if slices is None and known is not None:
                warn_of_unknown_slices(mesh)
        shardings = _Shardings(mesh, slices, known, tuple(specs[i] for i in filled))
        tracing = any(isinstance(x, jax.core.Tracer) for x in xs)
        # Outside of `jax.jit`, a program that is compiled at the first call.
        compiled = options.settings.is_static and mesh is None and not tracing
        qs = (_compiled if compiled else _on_any_platform)(xs, shardings, options)
        factors |= dict(zip(filled, qs, strict=True))
    return [factors[i] for i in range(len(matrices))]


def _on_any_platform(
    xs: Sequence[jax.Array], shardings: _Shardings, options: PolarOptions
) -> list[jax.Array]:
    """A branch for each platform, of which the compiler keeps one."""

    def branch(name: str) -> Callable[..., list[jax.Array]]:
        return functools.partial(_on_platform, options.platform(name), shardings)

    known = shardings.mesh is None or shardings.matrices is not None
    return jax.lax.platform_dependent(
        xs,
        options.settings.traced,
        cpu=branch("cpu"),
        tpu=branch("tpu" if known else "tpu_auto"),
        default=branch("gpu"),
    )


_compiled = jax.jit(_on_any_platform, static_argnames=("shardings", "options"))


def _on_platform(
    platform: Platform,
    shardings: _Shardings,
    xs: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> list[jax.Array]:
    """One platform's branch; ``traced`` are the settings that are traced."""
    mesh, slices, of_matrices, of_factors = shardings
    if mesh is None:
        platform = platform.with_traced(traced)
        packed = platform.pack(xs)
        stack_bytes, _, stack_length, _ = platform.limits
        plan = plan_stacks([StackKey.of(x) for x in packed], stack_bytes, stack_length)
        stacks = stack(packed, plan)
        if platform.normalizes == "stack":
            stacks = platform.normalized(stacks)
        of_stacks = polar_in_chunks(platform, stacks, [None] * len(stacks))
        qs = platform.unpack(unstack(of_stacks, plan, like=xs))
    else:
        packed = platform.pack(xs, to_send=True)
        if of_matrices is None:
            qs = on_unknown_shards(platform, packed, traced, mesh, slices)
        else:
            qs = on_shards(platform, packed, traced, mesh, slices or {}, of_matrices)
    # Resharded before the cast, to send the narrower dtype.
    placed = map(typed_sharding.shard_as, qs, xs, of_factors)
    return [q.astype(x.dtype) for q, x in zip(placed, xs, strict=True)]
