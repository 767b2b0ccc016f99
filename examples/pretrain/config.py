"""The options of a run."""

import dataclasses
import pathlib
from typing import Any, Literal, TypeAlias

import tyro

from examples.pretrain.errors import UsageError
from examples.pretrain.models.dense import DenseConfig
from examples.pretrain.models.moonlight import MoonlightConfig
from examples.pretrain.recipe import Recipe
from examples.vision.davidnet import DavidNetConfig

ModelConfig: TypeAlias = DenseConfig | MoonlightConfig | DavidNetConfig


# What a recipe says of itself, and what it says for the model.
_NO_OPTIONS = frozenset(
    "model learning_rate_from results model.dtype model.param_dtype".split()
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Lengths of the axes of the mesh, whose product is the number of devices."""

    # Replicas of the model. Nothing: as many as the other axes leave room for.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Train a model with one optimizer, or with several in turn and compare them.

    All of them share the initial weights and the batches. The same command carries an
    interrupted run on, and shows a finished one.
    """

    # What decides the result.
    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    # Sizes of the model.
    model: ModelConfig
    # Devices.
    mesh: MeshConfig = MeshConfig()
    # Optimizers to train, in this order. Others that the folder already holds stay in
    # the report.
    optimizer: tuple[str, ...]
    # Folder of the run: checkpoints, metrics, figures.
    out: pathlib.Path
    # Training data of a language model: text files, folders or globs, read as bytes; or
    # .bin shards of uint16 tokens, as nanoGPT or modded-nanogpt write them. Nothing: the
    # source of this machine's own Python standard library. Of a vision model: the folder
    # of CIFAR-10's files. Nothing: drawings of shapes.
    data: tuple[str, ...] = ()
    # Validation data of a language model, likewise. Nothing: the files of --data with
    # 'val' in their name, else a tenth of its files, chosen by a hash of their names.
    val_data: tuple[str, ...] = ()
    # Examples that a device takes at once; a step adds up as many gradients as its batch
    # needs. Nothing: the whole batch at once.
    per_device_batch: int | None = None
    # Parts of the vocabulary whose logits exist at the same time.
    loss_chunks: int = 1
    # Steps between readings of metrics and trust ratios.
    log_every: int = 10
    # Steps between measurements of signal, noise and smoothness. Nothing: none.
    measure_every: int | None = None
    # Batches to measure them on; each takes as long as ten steps.
    measure_batches: int = 4
    # Steps between checkpoints.
    checkpoint_every: int = 100
    # Checkpoints to keep, the newest ones.
    keep: int = 2
    # Write event files for TensorBoard.
    tensorboard: bool = False
    # Measure at the end how much of a step is the optimizer's.
    time_optimizer: bool = False

    def __post_init__(self) -> None:
        if not self.optimizer:
            raise UsageError("--optimizer must name at least one.")
        if self.val_data and not self.data:
            raise UsageError("--val-data needs --data: what to train on.")
        counts = "loss_chunks log_every measure_batches checkpoint_every keep"
        for name in [*counts.split(), "per_device_batch", "measure_every"]:
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} {value} must be at least 1.")

    def recipe_of(self, optimizer: str) -> Recipe:
        """The recipe with one of the optimizers."""
        return dataclasses.replace(self.recipe, optimizer=optimizer)

    def to_dict(self) -> dict[str, Any]:
        """The options by their names on the command line."""
        options = dataclasses.asdict(self)
        flat = options.pop("recipe")
        for group in ("model", "mesh"):
            nested = options.pop(group)
            flat |= {f"{group}.{name}": value for name, value in nested.items()}
        return {k: v for k, v in (flat | options).items() if k not in _NO_OPTIONS}
