"""The options of a run."""

import dataclasses
import pathlib
from typing import Any

import tyro

from examples.pretrain.errors import UsageError
from examples.pretrain.meshes import MeshConfig

# Fields that are not command-line options: the recipe has them.
_NO_OPTIONS = frozenset({"model.dtype", "model.param_dtype"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Train a model with one optimizer, or with several in turn and compare them.

    All of them share the initial weights and the batches. The same command carries an
    interrupted run on, and shows a finished one.
    """

    # What decides the result: a `Recipe` of the class that goes with the model.
    recipe: tyro.conf.OmitArgPrefixes[Any]
    # Sizes of the model: a configuration from `models` or `examples.vision`.
    model: Any
    # Devices.
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
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
    # 'val' in their name, else a tenth of its files, chosen by a hash of their names; of
    # a single file, its last tenth.
    val_data: tuple[str, ...] = ()
    # Examples that a device takes at once; a step adds up as many gradients as its batch
    # needs. Nothing: the whole batch at once.
    per_device_batch: int | None = None
    # Parts of the vocabulary whose logits exist at the same time.
    loss_chunks: int = 1
    # Steps between readings of metrics and trust ratios.
    log_every: int = 10
    # Steps between measurements of the gain over Muon. Nothing: none.
    measure_every: int | None = None
    # Batches to measure them on; each takes as long as ten steps.
    measure_batches: int = 4
    # Steps between checkpoints.
    checkpoint_every: int = 100
    # Checkpoints to keep, the newest ones.
    keep: int = 2
    # Text that every model continues at the end. Nothing: none.
    sample: str | None = None
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

    def recipe_of(self, optimizer: str) -> Any:
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
