"""A classifier of images, its loss and its data."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.pretrain.config import Config
from examples.pretrain.errors import UsageError
from examples.pretrain.task import Data, Metrics, PyTree
from examples.vision.batches import Augmentation, evaluation_examples, train_examples
from examples.vision.cifar import read_cifar10
from examples.vision.davidnet import DavidNet, weight_dimension_numbers
from examples.vision.images import CLASSES, SIZE, Images, statistics
from examples.vision.shapes import draw_shapes

SHAPES_TO_TRAIN, SHAPES_TO_VALIDATE = 8_000, 1_000


class ImageTask:
    """Tells what an image shows; a batch has "pixels" and "labels"."""

    item = "images"
    has_experts = False
    items_per_example = 1
    flops_per_example: float | None = None

    def __init__(self, config: Config):
        recipe = config.recipe
        sizes = config.model
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
        return DavidNet(self.config, rngs)

    def weight_dimension_numbers(self, model: Any) -> Callable[[PyTree], PyTree]:
        return weight_dimension_numbers(model)

    def loss(self, model: Any, batch: PyTree) -> tuple[jax.Array, Metrics]:
        model.train()
        metrics = _metrics(model(batch["pixels"]), batch["labels"])
        return metrics["loss"], metrics

    def evaluate(self, model: Any, batch: PyTree) -> Metrics:
        model.eval()
        return _metrics(model(batch["pixels"]), batch["labels"])

    def after_step(self, variables: PyTree, metrics: Metrics) -> PyTree:
        return variables

    def batch(self, size: int) -> PyTree:
        return {
            "pixels": jax.ShapeDtypeStruct((size, SIZE, SIZE, 3), jnp.float32),
            "labels": jax.ShapeDtypeStruct((size,), jnp.int32),
        }


def _metrics(logits_BxK: jax.Array, labels_B: jax.Array) -> Metrics:
    logits_BxK = logits_BxK.astype(jnp.promote_types(jnp.float32, logits_BxK.dtype))
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxK, labels_B)
    right_B = logits_BxK.argmax(-1) == labels_B
    return {"loss": losses_B.mean(), "accuracy": right_B.mean(dtype=losses_B.dtype)}


def read_images(config: Config) -> Data:
    """CIFAR-10 from the folder that is named, or drawings of shapes.

    Raises:
      UsageError: If files are missing or corrupt, or do not make whole batches.
    """
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
    return Data(
        train=train_examples(train, augmentation, recipe.batch_size, recipe.seed),
        validation=evaluation_examples(test, augmentation.statistics, count),
        unit="image",
        description=f"{len(train):,} images to train on, {len(test):,} to validate on, "
        f"from {name}",
        facts={"images_sha256": _fingerprint(train, test)},
    )


def _fingerprint(*sides: Images) -> str:
    digest = hashlib.sha256()
    for side in sides:
        digest.update(side.pixels.data)
        digest.update(side.labels.data)
    return digest.hexdigest()
