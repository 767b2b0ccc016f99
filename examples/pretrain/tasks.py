"""What is trained on what: a decoder or Moonlight on text, a DavidNet on images."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.pretrain.batches import read_text
from examples.pretrain.config import Config, ImageRecipe, MixtureRecipe, TextRecipe
from examples.pretrain.errors import UsageError
from examples.pretrain.loss import cross_entropy
from examples.pretrain.models import attention, dense, moonlight
from examples.pretrain.models.layers import count_parameters
from examples.pretrain.task import Data, Metrics, PyTree, Task
from examples.vision import davidnet
from examples.vision.batches import (
    CLASSES,
    SIZE,
    Augmentation,
    evaluation_examples,
    statistics,
    train_examples,
)
from examples.vision.cifar import read_cifar10
from examples.vision.shapes import draw_shapes
from orscale_jax.flax import nnx_dimension_numbers

SHAPES_TO_TRAIN, SHAPES_TO_VALIDATE = 8_000, 1_000


class DecoderTask(Task):
    """Predicts every token from those before it; a batch is B×(T+1) tokens."""

    item = "tokens"

    def __init__(self, config: Config):
        sizes = config.model
        if sizes.vocab_size % config.loss_chunks:
            raise UsageError(
                f"--loss-chunks {config.loss_chunks} does not divide the vocabulary of "
                f"{sizes.vocab_size}: choose one that does."
            )
        self.recipe, self.loss_chunks = config.recipe, config.loss_chunks
        self.items_per_example = config.recipe.seq_len
        self.config = dataclasses.replace(
            sizes, dtype=self.recipe.compute_dtype, param_dtype=self.recipe.param_dtype
        )
        self.flops_per_example = self._flops()

    def create(self, rngs: nnx.Rngs) -> nnx.Module:
        return dense.Dense(self.config, rngs)

    def weight_dimension_numbers(self, model: Any) -> Callable[[PyTree], PyTree]:
        return nnx_dimension_numbers(model)

    def loss(self, model: Any, batch: jax.Array) -> tuple[jax.Array, Metrics]:
        loss = self.cross_entropy(model, model.hidden(batch[:, :-1]), batch)
        return loss, {"loss": loss}

    def evaluate(self, model: Any, batch: jax.Array) -> Metrics:
        return {"loss": self.loss(model, batch)[1]["loss"]}

    def note(self) -> str:
        sizes = self.config.attention_features
        return attention.choose(self.config.dtype, self.items_per_example, *sizes).why

    def batch(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, self.items_per_example + 1), jnp.int32)

    def cross_entropy(
        self, model: Any, hidden_BxTxD: jax.Array, tokens_BxT1: jax.Array
    ) -> jax.Array:
        """Mean over all positions, in nats."""
        if self.loss_chunks == 1:
            head: Any = model.logits
        else:
            head = model.head_DxV.astype(self.config.dtype)
        return cross_entropy(hidden_BxTxD, head, tokens_BxT1[:, 1:], self.loss_chunks)

    def _flops(self) -> float:
        """6 a weight and token, and 12 a pair of positions, layer and feature.

        Causal attention is counted as if it were not, as is the custom (arXiv:2204.02311,
        appendix B).
        """
        config, T = self.config, self.items_per_example
        weights = count_parameters(nnx.eval_shape(lambda: self.create(nnx.Rngs(0))))
        return 6.0 * weights * T + 12.0 * config.layers * config.width * T**2


class MixtureTask(DecoderTask):
    """The same with routing, whose biases move after every step."""

    def create(self, rngs: nnx.Rngs) -> nnx.Module:
        return moonlight.Moonlight(self.config, rngs)

    def weight_dimension_numbers(self, model: Any) -> Callable[[PyTree], PyTree]:
        return moonlight.weight_dimension_numbers(model, self.recipe.router)

    def loss(self, model: Any, batch: jax.Array) -> tuple[jax.Array, Metrics]:
        hidden, routing = model.hidden(batch[:, :-1])
        loss = self.cross_entropy(model, hidden, batch)
        metrics = {"loss": loss, "expert_load": routing.fraction}
        return loss + routing.aux_loss, metrics

    def after_step(self, variables: PyTree, metrics: Metrics) -> PyTree:
        bias_LxE, load_LxE = variables["routing_bias"], metrics["expert_load"]
        rate = self.recipe.balance_rate
        return {"routing_bias": moonlight.balanced(bias_LxE, load_LxE, rate)}

    def _flops(self) -> float:
        """The weights that a token meets count, and those of the head."""
        config, T = self.config, self.items_per_example
        model: Any = nnx.eval_shape(lambda: self.create(nnx.Rngs(0)))
        weights = moonlight.count_active_parameters(model)
        weights += config.vocab_size * config.width
        # Features of scores and of values, as against twice the width.
        features = config.nope_dim + config.rope_dim + config.value_dim
        features *= config.heads
        return 6.0 * weights * T + 6.0 * config.layers * features * T**2


class ImageTask(Task):
    """Tells what an image shows; a batch has "pixels" and "labels"."""

    item = "images"
    items_per_example = 1

    def __init__(self, config: Config):
        recipe, sizes = config.recipe, config.model
        if config.loss_chunks != 1:
            raise UsageError("--loss-chunks: images have no vocabulary to divide.")
        if sizes.classes < CLASSES:
            raise UsageError(
                f"--model.classes {sizes.classes} must be at least the {CLASSES} of the "
                "images."
            )
        self.config = dataclasses.replace(
            sizes, dtype=recipe.compute_dtype, param_dtype=recipe.param_dtype
        )

    def create(self, rngs: nnx.Rngs) -> nnx.Module:
        return davidnet.DavidNet(self.config, rngs)

    def weight_dimension_numbers(self, model: Any) -> Callable[[PyTree], PyTree]:
        return davidnet.weight_dimension_numbers(model)

    def loss(self, model: Any, batch: PyTree) -> tuple[jax.Array, Metrics]:
        model.train()
        metrics = self._metrics(model(batch["pixels"]), batch["labels"])
        return metrics["loss"], metrics

    def evaluate(self, model: Any, batch: PyTree) -> Metrics:
        model.eval()
        return self._metrics(model(batch["pixels"]), batch["labels"])

    def batch(self, size: int) -> PyTree:
        return {
            "pixels": jax.ShapeDtypeStruct((size, SIZE, SIZE, 3), jnp.float32),
            "labels": jax.ShapeDtypeStruct((size,), jnp.int32),
        }

    def _metrics(self, logits_BxK: jax.Array, labels_B: jax.Array) -> Metrics:
        logits_BxK = logits_BxK.astype(jnp.promote_types(jnp.float32, logits_BxK.dtype))
        losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxK, labels_B)
        right_B = logits_BxK.argmax(-1) == labels_B
        return {"loss": losses_B.mean(), "accuracy": right_B.mean(dtype=losses_B.dtype)}


def read_images(config: Config) -> Data:
    """CIFAR-10 from the folder that is named, or drawings of shapes."""
    recipe = config.recipe
    if config.val_data:
        raise UsageError("--val-data: CIFAR-10 comes with its own.")
    if len(config.data) > 1:
        raise UsageError(f"--data {' '.join(config.data)}: name one folder of CIFAR-10.")
    if config.data:
        train, test = read_cifar10(pathlib.Path(config.data[0]))
        name = config.data[0]
    else:
        train, test = draw_shapes(SHAPES_TO_TRAIN, SHAPES_TO_VALIDATE)
        name = "drawings of shapes"
    augmentation = Augmentation(statistics(train), recipe.cutout)
    count = recipe.val_batches and recipe.val_batches * recipe.batch_size
    digest = hashlib.sha256()
    for side in (train, test):
        digest.update(side.pixels.data)
        digest.update(side.labels.data)
    return Data(
        train=train_examples(train, augmentation, recipe.batch_size, recipe.seed),
        validation=evaluation_examples(test, augmentation.statistics, count),
        unit="image",
        description=f"{len(train):,} images to train on, {len(test):,} to validate on, "
        f"from {name}",
        facts={"images_sha256": digest.hexdigest()},
    )


class Kind(NamedTuple):
    """What goes together."""

    label: str  # In titles of figures.
    model: type  # Of the model's sizes.
    recipe: type
    task: Callable[[Config], Task]  # The model of a run and its loss.
    read: Callable[[Config], Data]  # What it is trained and validated on.


_DENSE = Kind("Decoder", dense.DenseConfig, TextRecipe, DecoderTask, read_text)
_MOONLIGHT = Kind(
    "Mixture of experts", moonlight.MoonlightConfig, MixtureRecipe, MixtureTask, read_text
)
_VISION = Kind("DavidNet", davidnet.DavidNetConfig, ImageRecipe, ImageTask, read_images)
_BY_MODEL = {kind.model: kind for kind in (_DENSE, _MOONLIGHT, _VISION)}


def make_task(config: Config) -> Task:
    """The model of a run and its loss."""
    return _BY_MODEL[type(config.model)].task(config)


def read_data(config: Config) -> Data:
    """What the model is trained and validated on."""
    return _BY_MODEL[type(config.model)].read(config)


def recorded_kind(facts: Mapping[str, Any]) -> Kind:
    """The kind of run that a `config.json` describes, by what only its model has."""
    if "model.widths" in facts:
        return _VISION
    return _MOONLIGHT if "model.experts" in facts else _DENSE
