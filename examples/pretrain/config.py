"""The options of a run."""

import dataclasses
import math
import pathlib
from typing import Literal

ArmName = Literal["adamw", "muon", "orscale"]


class UsageError(ValueError):
    """Something that the user can put right; shown as one message, without traceback."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train one small decoder with each optimizer in turn and compare them.

    All arms share the learning rate, the weight decay, the initial weights and the
    batches. The same command carries an interrupted run on, and shows a finished one.
    """

    # Folder of the run: checkpoints, metrics, figures.
    out: pathlib.Path = pathlib.Path("runs/demo")
    # Optimizers to train, in this order (muon is Muon+Moonlight). Others that the folder
    # already holds stay in the report.
    arms: tuple[ArmName, ...] = ("adamw", "muon", "orscale")
    # Training data: text files, folders or globs, read as bytes; or .bin shards of uint16
    # tokens, as nanoGPT or modded-nanogpt write them. Nothing: the source of this
    # machine's own Python standard library.
    data: tuple[str, ...] = ()
    # Validation data, likewise. Nothing: the files of --data with 'val' in their name,
    # else a tenth of its files, chosen by a hash of their names.
    val_data: tuple[str, ...] = ()
    # Size of the vocabulary. Nothing: 256 for text, 50304 for shards.
    vocab_size: int | None = None
    # Width of the residual stream; the MLP is four times as wide.
    width: int = 128
    # Blocks of attention and MLP.
    layers: int = 3
    # Attention heads; they share the width equally.
    heads: int = 4
    # Tokens that a prediction may look back on.
    seq_len: int = 128
    # Sequences per step; a step sees batch_size * seq_len tokens.
    batch_size: int = 16
    # Optimizer steps per arm.
    steps: int = 500
    # Peak learning rate, shared by all arms and by all their parameters.
    learning_rate: float = 4e-3
    # Weight decay, shared by all arms.
    weight_decay: float = 0.1
    # Steps of linear warmup; a cosine to zero follows.
    warmup_steps: int = 25
    # Of the initial weights and of the order of the batches.
    seed: int = 0
    # Steps between validations (the last step is always validated).
    val_every: int = 50
    # Batches of a validation, always the same (fewer if the data holds fewer).
    val_batches: int = 10
    # Steps between readings of losses and trust ratios.
    log_every: int = 10
    # Steps between measurements of signal, noise and smoothness.
    measure_every: int = 125
    # Batches to measure them on; each takes as long as ten steps.
    measure_batches: int = 4
    # Steps between checkpoints. May change when a run is carried on.
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            at_least = 0 if field.name in ("warmup_steps", "seed") else 1
            if field.type in (int, int | None) and value is not None and value < at_least:
                self._refuse(field.name, f"must be at least {at_least}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            self._refuse("learning_rate", "must be a number above 0")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            self._refuse("weight_decay", "must be a number of at least 0")
        if self.warmup_steps >= self.steps:
            self._refuse("warmup_steps", f"must be below --steps {self.steps}")
        if self.width % (2 * self.heads):
            self._refuse("width", f"must be a multiple of 2 * --heads {self.heads}")
        if not self.arms:
            self._refuse("arms", "must name at least one optimizer")
        if self.seed >= 2**32:
            self._refuse("seed", "must be below 2**32")
        if self.val_data and not self.data:
            self._refuse("val_data", "needs --data: what to train on")

    def _refuse(self, name: str, why: str) -> None:
        value = getattr(self, name)
        raise UsageError(f"--{name.replace('_', '-')} {value} {why}.")
