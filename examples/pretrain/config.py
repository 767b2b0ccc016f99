"""The options of a run, and the values that are refused.

A run is a `Config`. What decides its result, but for the model and the data, is its
`Recipe`, whose subclasses add what only some models have.
"""

import dataclasses
import math
import pathlib
from typing import Any, Literal

import tyro

from examples.pretrain.errors import UsageError
from examples.pretrain.meshes import MeshConfig

# Fields that are not command-line options: the recipe has them.
_NO_OPTIONS = frozenset({"model.dtype", "model.param_dtype"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the result of a run, but for the model and the data."""

    # Optimizer, one of `examples.pretrain.optimizers.OPTIMIZERS`. It takes those of the
    # hyperparameters below that it has.
    optimizer: tyro.conf.Suppress[str]
    # Peak learning rate of AdamW; of all optimizers, if they share it.
    learning_rate: float
    # Whether other optimizers take the multiple of AdamW's rate that
    # docs/hyperparameters.md advises, such as twice for Muon, or all share one.
    rates: Literal["advised", "shared"] = "advised"
    # Peak learning rate of the parameters that AdamW trains beside the matrices. None:
    # that of the matrices, or the advised one.
    adam_learning_rate: float | None = None
    # Decay rate of AdamW's first moment.
    adam_b1: float = 0.9
    # Decay rate of AdamW's second moment.
    adam_b2: float = 0.95
    # Weight decay of all parameters.
    weight_decay: float = 0.1
    # Momentum of the matrices.
    momentum: float = 0.95
    # Lower bound of the trust ratio. None: the optimizer's own.
    r_min: float | None = None
    # Upper bound of the trust ratio. None: the optimizer's own.
    r_max: float | None = None
    # Largest global norm of a gradient; a longer one is scaled down. None: any.
    clip: float | None = 1.0
    # Steps of linear warmup; a cosine to zero follows.
    warmup_steps: int = 1_000
    # Optimizer steps.
    steps: int
    # Sequences or images per step, over all devices.
    batch_size: int = 256
    # Seed of the initial weights and of the order of the data.
    seed: int = 42
    # Steps between validations. None: all steps.
    val_every: int | None = 500
    # Batches of a validation, always the same. None: all validation data.
    val_batches: int | None = 20
    # Dtype of the weights.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # Dtype of activations and of products.
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in ("learning_rate", "adam_learning_rate", "clip"):
                fine, wanted = value is None or 0 < value < math.inf, "a number above 0"
            elif name in ("weight_decay", "balance_rate"):
                fine, wanted = 0 <= value < math.inf, "a number of at least 0"
            elif name in ("momentum", "adam_b1", "adam_b2"):
                fine, wanted = 0 <= value < 1, "at least 0 and below 1"
            elif name == "seed":
                fine, wanted = 0 <= value < 2**32, "at least 0 and below 2**32"
            elif name in ("warmup_steps", "cutout"):
                fine, wanted = value >= 0, "at least 0"
            elif field.type in (int, int | None):
                fine, wanted = value is None or value >= 1, "at least 1"
            else:
                continue
            if not fine:
                raise UsageError(f"--{name.replace('_', '-')} {value} must be {wanted}.")
        if self.steps <= self.warmup_steps:
            raise UsageError(
                f"--warmup-steps {self.warmup_steps} must be below the "
                f"{self.steps} steps: pass a smaller one, or more --steps."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRecipe(Recipe):
    """A language model's."""

    # Tokens that a prediction may look back on.
    seq_len: int
    # Whether the backward pass steps each block as soon as its gradients are known: the
    # gradients of one block exist at a time.
    one_layer_at_a_time: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureRecipe(TextRecipe):
    """A mixture of experts'."""

    # Who trains the routers of a mixture: as the paper has it, or as others do.
    router: Literal["matrix", "adamw"] = "matrix"
    # Change of a routing bias in a step.
    balance_rate: float = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """A classifier's of images."""

    # Side of the square that is cut out of training images.
    cutout: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Train a model with one optimizer, or with several in turn and compare them.

    All of them share the initial weights and the batches. Rerun the same command to
    resume an interrupted run, or to show a finished one.
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
    # .bin shards of uint16 tokens, as nanoGPT or modded-nanogpt write them. None: the
    # source of this machine's own Python standard library. Of a vision model: the folder
    # of CIFAR-10's files. None: drawings of shapes.
    data: tuple[str, ...] = ()
    # Validation data of a language model, likewise. None: the files of --data with
    # 'val' in their name, else a tenth of its files, chosen by a hash of their names; of
    # a single file, its last tenth.
    val_data: tuple[str, ...] = ()
    # Examples that a device takes at once; a step adds up as many gradients as its batch
    # needs. None: the whole batch at once.
    per_device_batch: int | None = None
    # Parts of the vocabulary whose logits exist at the same time.
    loss_chunks: int = 1
    # Steps between readings of metrics and trust ratios.
    log_every: int = 10
    # Steps between measurements of the momentum's stable rank and of Newton–Schulz's
    # error. None: no measurement.
    measure_every: int | None = None
    # Steps between checkpoints.
    checkpoint_every: int = 100
    # Checkpoints to keep, the newest ones.
    keep: int = 2
    # Text that every model continues at the end. None: no text.
    sample: str | None = None

    def __post_init__(self) -> None:
        if not self.optimizer:
            raise UsageError("--optimizer must name at least one.")
        if self.val_data and not self.data:
            raise UsageError("--val-data needs --data: what to train on.")
        counts = "loss_chunks log_every checkpoint_every keep"
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


def accumulation(recipe: Recipe, devices: int, per_device_batch: int | None) -> int:
    """How many gradients a step adds up so that its batch is the recipe's.

    The batch is divided over `devices`, all but those of tensor axes. One of them takes
    `per_device_batch` examples at once; None: all of its part.
    """
    if per_device_batch is None:
        return 1
    at_once = devices * per_device_batch
    if at_once < 1 or recipe.batch_size % at_once:
        raise UsageError(
            f"A batch of {recipe.batch_size} does not divide into parts of {devices} "
            f"devices × {per_device_batch} = {at_once}: choose a per-device batch, or a "
            "number of devices, so that the product divides it."
        )
    return recipe.batch_size // at_once
