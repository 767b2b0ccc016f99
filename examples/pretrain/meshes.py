"""The mesh of a run, and which of its axes shard what."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.pretrain.config import MeshConfig
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


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all devices, or of those given.

    Raises:
      UsageError: If their number is not the product of the axes.
    """
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
    shards = 1
    for axis in RULES["batch"]:
        shards *= mesh.shape[axis]
    return shards


@contextlib.contextmanager
def in_effect(mesh: Mesh) -> Iterator[None]:
    """Traces models for the mesh."""
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules_of(mesh))):
        yield
