"""What a recipe says of a run."""

import dataclasses
import math
from typing import Any, Literal

from tyro.conf import Suppress

from examples.pretrain.errors import UsageError

# Of CIFAR-10, in training.
IMAGES_PER_EPOCH = 50_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the result of a run, but for the model and the data.

    The subclasses add what only some models have.
    """

    # Optimizer, one of `examples.pretrain.optimizers.OPTIMIZERS`. It takes those of the
    # hyperparameters below that it has.
    optimizer: Suppress[str]
    # Peak learning rate.
    learning_rate: float
    # Peak learning rate of what takes AdamW beside matrices. Nothing: the one above.
    adam_learning_rate: float | None = None
    # Decay rate of AdamW's first moment.
    adam_b1: float = 0.9
    # Decay rate of AdamW's second moment.
    adam_b2: float = 0.95
    # Weight decay of all parameters.
    weight_decay: float = 0.1
    # Momentum of the matrices, and of LARS.
    momentum: float = 0.95
    # Lower bound of the trust ratio. Nothing: the optimizer's own.
    r_min: float | None = None
    # Upper bound of the trust ratio. Nothing: the optimizer's own.
    r_max: float | None = None
    # Largest global norm of a gradient; a longer one is scaled down. Nothing: any.
    clip: float | None = 1.0
    # Steps of linear warmup; a cosine to zero follows.
    warmup_steps: int = 1_000
    # Optimizer steps, instead of --tokens or --epochs. Nothing: as many as these make.
    steps: int | None = None
    # Sequences or images per step, over all devices.
    batch_size: int = 256
    # Of the initial weights and the order of the data; three seeds go on from it.
    seed: int = 42
    # Steps between validations. Nothing: an epoch of images, or all steps.
    val_every: int | None = 500
    # Batches of a validation, always the same. Nothing: all validation data.
    val_batches: int | None = 20
    # Dtype of the weights.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # Dtype of activations and of products.
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.type in (int, int | None)
            if value is not None and (why := _why_refused(field.name, value, whole)):
                raise UsageError(f"--{field.name.replace('_', '-')} {value} {why}.")
        if self.num_steps <= self.warmup_steps:
            raise UsageError(
                f"--warmup-steps {self.warmup_steps} must be below the "
                f"{self.num_steps} steps."
            )

    @property
    def num_steps(self) -> int:
        """Optimizer steps: those set, or the whole ones that the data make."""
        if self.steps is not None:
            return self.steps
        if (steps := self._steps_of_data()) is None:
            raise UsageError("--steps, or --tokens or --epochs of data: set one of them.")
        return steps

    @property
    def validation_every(self) -> int:
        """Steps between validations."""
        return self.val_every or self.num_steps

    def _steps_of_data(self) -> int | None:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRecipe(Recipe):
    """A language model's."""

    # Tokens of text to train on, instead of --steps.
    tokens: int | None = None
    # Tokens that a prediction may look back on.
    seq_len: int
    # Each head of attention is a matrix, and not all heads of a projection together.
    per_head: bool = False

    def _steps_of_data(self) -> int | None:
        return self.tokens and self.tokens // (self.batch_size * self.seq_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderRecipe(TextRecipe):
    """A dense decoder's."""

    # A fused query, key and value is one matrix, as the paper has it, or three.
    qkv: Literal["matrix", "blocks"] = "matrix"


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

    # Epochs to train for, instead of --steps: of CIFAR-10's 50,000 images whatever the
    # data.
    epochs: int | None = None
    # Side of the square that is cut out of training images.
    cutout: int = 0

    @property
    def validation_every(self) -> int:
        """Steps between validations: those set, or an epoch of CIFAR-10."""
        return self.val_every or max(IMAGES_PER_EPOCH // self.batch_size, 1)

    def _steps_of_data(self) -> int | None:
        return self.epochs and self.epochs * (IMAGES_PER_EPOCH // self.batch_size)


def _why_refused(name: str, value: Any, whole: bool) -> str:
    """What is wrong with a number of a recipe; empty if nothing is."""
    if whole:
        at_least = 0 if name in ("warmup_steps", "cutout", "seed") else 1
        if value < at_least:
            return f"must be at least {at_least}"
    if name == "seed" and value >= 2**32:
        return "must be below 2**32"
    if name in ("learning_rate", "adam_learning_rate", "clip"):
        return "" if 0 < value < math.inf else "must be a number above 0"
    if name in ("weight_decay", "balance_rate"):
        return "" if 0 <= value < math.inf else "must be a number of at least 0"
    if name in ("momentum", "adam_b1", "adam_b2"):
        return "" if 0 <= value < 1 else "must be at least 0 and below 1"
    return ""


def accumulation(recipe: Recipe, devices: int, per_device_batch: int | None) -> int:
    """How many gradients a step adds up so that its batch is the recipe's.

    Args:
      recipe: Whose batch_size it is.
      devices: Over which a batch is divided: all of them, less those of tensor axes.
      per_device_batch: Sequences or images that one device takes at once; None for all
        of its part of the batch.

    Raises:
      UsageError: If the batch cannot be made of whole parts.
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
