"""What a recipe says of a run."""

import dataclasses
from typing import Literal

from examples.pretrain.config import UsageError

# Of CIFAR-10, in training.
IMAGES_PER_EPOCH = 50_000


@dataclasses.dataclass(frozen=True)
class Result:
    """What the paper reports of a run.

    Attributes:
      table: Where it stands: the LaTeX label of a table, or of a section.
      value: The validation loss in nats, or the share of right answers in per cent.
      spread: One standard deviation over three seeds; None for a single seed.
    """

    table: str
    value: float
    spread: float | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One run: a model, an optimizer, and how it is trained."""

    # Preset of the model.
    model: str
    # Optimizer, one of `examples.pretrain.optimizers.OPTIMIZERS`.
    optimizer: str
    # Peak learning rate.
    learning_rate: float
    # Where the learning rate stands. An assumed one is ours: the paper says "its best".
    learning_rate_from: Literal["paper", "public logs", "assumed"] = "paper"
    # Peak learning rate of what takes AdamW beside matrices. Nothing: the one above.
    adam_learning_rate: float | None = None
    # Decay rates of AdamW's moments.
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    # Weight decay of all parameters.
    weight_decay: float = 0.1
    # Of the matrices (and of LARS).
    momentum: float = 0.95
    # Bounds of the trust ratio. Nothing: the optimizer's own.
    r_min: float | None = None
    r_max: float | None = None
    # Largest global norm of a gradient; a longer one is scaled down. Nothing: any.
    clip: float | None = 1.0
    # Steps of linear warmup; a cosine to zero follows.
    warmup_steps: int = 1_000
    # Length of training: tokens of text, or epochs of images.
    tokens: int | None = None
    epochs: int | None = None
    # Tokens that a prediction may look back on. Nothing for images.
    seq_len: int | None = None
    # Sequences or images per step, over all devices.
    batch_size: int = 256
    # Side of the square that is cut out of training images.
    cutout: int = 0
    # Of the initial weights and the order of the data; three seeds go on from it.
    seed: int = 42
    # Steps between validations, and their batches. Nothing: once an epoch, on all images.
    val_every: int | None = 500
    val_batches: int | None = 20
    # Numbers that weights are kept in, and those that activations are computed in.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # What the paper reports of it.
    results: tuple[Result, ...] = ()

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.epochs is None):
            raise UsageError("A recipe has either tokens or epochs: set one of the two.")
        if self.tokens is not None and self.seq_len is None:
            raise UsageError("A recipe with tokens needs seq_len: set it.")
        if self.steps <= self.warmup_steps:
            raise UsageError(
                f"The recipe has {self.steps} steps, of which {self.warmup_steps} are "
                "warmup: train for longer, or lower batch_size or warmup_steps."
            )

    @property
    def steps(self) -> int:
        """Whole optimizer steps that the tokens or epochs make."""
        if self.tokens is not None and self.seq_len is not None:
            return self.tokens // (self.batch_size * self.seq_len)
        return (self.epochs or 0) * (IMAGES_PER_EPOCH // self.batch_size)


def accumulation(recipe: Recipe, devices: int, per_device_batch: int) -> int:
    """How many gradients a step adds up so that its batch is the recipe's.

    Args:
      recipe: Whose batch_size it is.
      devices: Over which a batch is divided: all of them, less those of tensor axes.
      per_device_batch: Sequences or images that one device takes at once.

    Raises:
      UsageError: If the batch cannot be made of whole parts.
    """
    at_once = devices * per_device_batch
    if at_once < 1 or recipe.batch_size % at_once:
        raise UsageError(
            f"A batch of {recipe.batch_size} does not divide into parts of {devices} "
            f"devices × {per_device_batch} = {at_once}: choose a per-device batch, or a "
            "number of devices, so that the product divides it."
        )
    return recipe.batch_size // at_once
