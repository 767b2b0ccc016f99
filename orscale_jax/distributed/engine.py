"""Polar factors of many arrays of matrices.

On one device arrays of one shape share stacks; on a mesh they are exchanged so that every
device orthogonalizes whole matrices. Each platform has its branch in the program, since
the platform is known when the program is compiled and not when it is traced.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from orscale_jax.distributed.assumed import auto_spec, on_devices_of
from orscale_jax.distributed.exchange import on_shards
from orscale_jax.distributed.slow_links import (
    SlowAxes,
    slices_of_mesh,
    warn_of_unknown_slices,
    without_devices,
)
from orscale_jax.newton_schulz.iteration import NewtonSchulz
from orscale_jax.newton_schulz.platforms import (
    PLATFORMS,
    Branch,
    Platform,
    compiled_on_any_platform,
    on_any_platform,
)
from orscale_jax.newton_schulz.stacks import on_one_device
from orscale_jax.sharding import typed_sharding


@dataclasses.dataclass(frozen=True)
class PolarOptions:
    """Options of polar factors: the iteration, its memory, the mesh, the platforms.

    They are hashable: on one device, equal options share a compiled program.
    """

    settings: NewtonSchulz  # Its dtype is None for the platform's.
    stack_bytes: int | None = None  # The largest stack; None for the platform's limit.
    # The mesh of arrays whose types name none; None for that of the context.
    mesh: Mesh | AbstractMesh | None = None
    # The axes of the mesh that cross slow links; None to ask its devices.
    slow_axes: SlowAxes | None = dataclasses.field(default=None, hash=False)
    platforms: Mapping[str, Platform] = dataclasses.field(
        default_factory=lambda: PLATFORMS, hash=False
    )

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to another process."""
        return vars(self) | without_devices(self.mesh, self.slow_axes)

    def platform(self, name: str) -> Platform:
        return self.platforms[name].running(self.settings, self.stack_bytes)


class _Placement(NamedTuple):
    """Where arrays of matrices are on a mesh."""

    mesh: AbstractMesh
    slices: Mapping[str, int]  # Along each axis of the mesh that crosses slow links.
    specs: Sequence[PartitionSpec]


def polar_factors(
    matrices: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    auto_specs: Sequence[PartitionSpec | None] | None,
    options: PolarOptions,
) -> list[jax.Array]:
    """Polar factors of arrays ``(*batch, m, n)``, in their dtypes.

    ``specs`` are the shardings of the factors, where types have any; ``auto_specs`` those
    of the matrices on a mesh with Auto axes, None for each that is unknown.
    """
    # An array without entries is its own factor.
    factors = {
        i: typed_sharding.shard_as(x, x, specs[i])
        for i, x in enumerate(matrices)
        if not x.size
    }
    filled = [i for i in range(len(matrices)) if i not in factors]
    if not filled:
        return [factors[i] for i in range(len(matrices))]
    xs = [matrices[i] for i in filled]
    mesh = typed_sharding.mesh_of(xs, options.mesh)
    placement = None
    if mesh is not None:
        if options.mesh is not None:
            xs[0] = on_devices_of(xs[0], mesh)
        slices = slices_of_mesh(mesh, options.slow_axes, options.mesh)
        if slices is None:
            warn_of_unknown_slices(mesh)
        known = auto_specs or [None] * len(matrices)
        placed = [
            jax.typeof(x).sharding.spec
            if mesh.are_all_axes_explicit
            else auto_spec(x, known[i], mesh, slices or {})
            for i, x in zip(filled, xs, strict=True)
        ]
        placement = _Placement(mesh, slices or {}, placed)
    chosen = options, tuple(specs[i] for i in filled), placement
    tracing = any(isinstance(x, jax.core.Tracer) for x in xs)
    compiled = mesh is None and options.settings.is_static and not tracing
    run: Branch = compiled_on_any_platform if compiled else on_any_platform
    qs = run(_on_platform, chosen, xs, options.settings.traced)
    factors |= dict(zip(filled, qs, strict=True))
    return [factors[i] for i in range(len(matrices))]


def _on_platform(
    name: str,
    chosen: tuple[PolarOptions, Sequence[PartitionSpec], _Placement | None],
    xs: Sequence[jax.Array],
    traced: Mapping[str, jax.Array],
) -> list[jax.Array]:
    """One platform's branch; ``traced`` are the settings that are traced."""
    options, specs, placement = chosen
    platform = options.platform(name)
    if placement is None:
        qs = on_one_device(platform.with_traced(traced), xs)
    else:
        packed = platform.pack(xs, to_send=True)
        qs = on_shards(platform, packed, traced, *placement)
    # Resharded before the cast, to send the narrower dtype.
    placed = map(typed_sharding.shard_as, qs, xs, specs)
    return [q.astype(x.dtype) for q, x in zip(placed, xs, strict=True)]
