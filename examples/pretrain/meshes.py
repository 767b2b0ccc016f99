"""The mesh of a run, and which of its axes shard what."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.pretrain.errors import UsageError
from examples.pretrain.models.sharding import Rules

AXES = ("data", "fsdp", "expert", "tensor")
# The table from logical names to axes of the mesh; models.sharding explains it.
RULES: dict[str, tuple[str, ...]] = {
    # Of activations.
    "batch": ("data", "fsdp", "expert"),
    "length": (),
    # Of parameters.
    "embed": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "qkv": ("tensor",),
    "kv": (),
    "vocab": ("tensor",),
    "norm": (),
    "layers": (),
    # Of mixtures.
    "router": (),
    "expert": ("expert",),
    "expert_embed": ("fsdp",),
    "expert_mlp": ("tensor",),
}
# Of the optimizer's state in ZeRO-1.
ZERO1 = {"embed": ("fsdp", "data"), "expert_embed": ("fsdp", "data")}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Lengths of the axes of the mesh, whose product is the number of devices."""

    # Replicas of the model. None: as many as the other axes leave room for.
    data: int | None = None
    # Devices over which the weights and the optimizer's state of a replica are sharded.
    fsdp: int = 1
    # Devices over which heads, MLPs and the vocabulary are sharded.
    tensor: int = 1
    # Devices over which experts are sharded.
    expert: int = 1
    # Shardings as the compiler finds them (auto) or as types of the arrays (explicit).
    axis_types: Literal["auto", "explicit"] = "auto"
    # Shard the optimizer's state over the replicas, too (ZeRO-1).
    zero1: bool = False

    def __post_init__(self) -> None:
        for axis in ("data", "fsdp", "tensor", "expert"):
            length = getattr(self, axis)
            if length is not None and length < 1:
                raise UsageError(f"--mesh.{axis} {length} must be at least 1.")
        if self.zero1 and self.fsdp > 1 and self.axis_types == "explicit":
            raise UsageError(
                f"--mesh.zero1 with --mesh.fsdp {self.fsdp} needs --mesh.axis-types "
                "auto: as types, the shardings of weights and optimizer state contradict."
            )


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all devices, or of those given."""
    devices = jax.devices() if devices is None else devices
    others = config.fsdp * config.expert * config.tensor
    data = config.data or max(len(devices) // others, 1)
    if data * others != len(devices):
        raise UsageError(
            f"--mesh.data {data} × --mesh.fsdp {config.fsdp} × --mesh.expert "
            f"{config.expert} × --mesh.tensor {config.tensor} are {data * others} "
            f"devices, and there are {len(devices)}: change one of them."
        )
    explicit = config.axis_types == "explicit"
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(AXES)
    lengths = (data, config.fsdp, config.expert, config.tensor)
    return jax.make_mesh(lengths, AXES, axis_types=types, devices=devices)


def rules_of(mesh: Mesh, zero1: bool = False) -> Rules:
    """The table for a mesh, without axes that have one device."""
    table = RULES | (ZERO1 if zero1 else {})
    return tuple(
        (name, tuple(axis for axis in axes if mesh.shape[axis] > 1) or None)
        for name, axes in table.items()
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Examples over the axes of the batch."""
    return NamedSharding(mesh, PartitionSpec(dict(rules_of(mesh))["batch"]))


def batch_shards(mesh: Mesh) -> int:
    """Parts that a batch is divided into."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


@contextlib.contextmanager
def in_effect(mesh: Mesh) -> Iterator[None]:
    """Traces models for the mesh."""
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules_of(mesh))):
        yield
