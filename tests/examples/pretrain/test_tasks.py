"""Losses and data as the trainer sees them, with models that stand for real ones."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pretrain import tasks
from examples.pretrain.errors import UsageError
from examples.pretrain.models.moonlight import Routing
from examples.pretrain.recipes import DEMOS
from examples.pretrain.tasks import make_task, read_data
from examples.vision.batches import Images
from tests.examples.pretrain import tiny

V, D = 256, 3
DRAW = np.random.default_rng(0)
TABLE, HEAD = (jnp.asarray(DRAW.normal(size=s), "float32") for s in ((V, D), (D, V)))
TOKENS = jnp.asarray(DRAW.integers(0, V, (2, 17)))
# Of the next token, given the one before.
LOG_P = np.log(np.exp(TABLE @ HEAD) / np.exp(TABLE @ HEAD).sum(-1, keepdims=True))
LOSS = -LOG_P[TOKENS[:, :-1], TOKENS[:, 1:]].mean()


DECODER = types.SimpleNamespace(
    hidden=lambda tokens: TABLE[tokens], logits=lambda x: x @ HEAD, head_DxV=HEAD
)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("loss_chunks", [1, 8])
def test_the_loss_of_a_decoder_is_that_of_the_next_token(loss_chunks):
    task = make_task(tiny.config(loss_chunks=loss_chunks))
    loss, metrics = task.loss(DECODER, TOKENS)
    assert loss == pytest.approx(LOSS, rel=1e-6)
    assert metrics == {"loss": loss}
    assert task.evaluate(DECODER, TOKENS) == {"loss": loss}


def test_a_mixture_trains_on_the_auxiliary_loss_too_and_does_not_record_it():
    routing = Routing(jnp.ones((3, 16)) / 16, jnp.asarray(0.25))
    model = types.SimpleNamespace(
        hidden=lambda tokens: (TABLE[tokens], routing), logits=lambda x: x @ HEAD
    )
    task = make_task(DEMOS["demo-moe"])
    loss, metrics = task.loss(model, TOKENS)
    assert loss == pytest.approx(LOSS + 0.25, rel=1e-6)
    assert metrics["loss"] == pytest.approx(LOSS, rel=1e-6)
    assert metrics["expert_load"] is routing.fraction
    assert task.evaluate(model, TOKENS) == {"loss": metrics["loss"]}


class Classifier:
    """Gives the logits that it sees, in training times two."""

    def train(self):
        self.factor = 2

    def eval(self):
        self.factor = 1

    def __call__(self, pixels):
        return self.factor * pixels


def test_images_are_classified_by_their_largest_logit():
    task = make_task(DEMOS["demo-vision"])
    logits = jnp.asarray(np.eye(10)[[3, 5, 7, 1]], "bfloat16")
    batch = {"pixels": logits, "labels": jnp.asarray([3, 5, 7, 2])}

    def expected(factor):
        right, wrong = np.exp(factor) / (np.exp(factor) + 9), 1 / (np.exp(factor) + 9)
        return -(3 * np.log(right) + np.log(wrong)) / 4

    loss, metrics = task.loss(Classifier(), batch)
    assert loss == metrics["loss"] == pytest.approx(expected(2), rel=1e-6)
    evaluated = task.evaluate(Classifier(), batch)
    assert evaluated["loss"] == pytest.approx(expected(1), rel=1e-6)
    assert metrics["accuracy"] == evaluated["accuracy"] == 0.75


# Data


@pytest.fixture
def few_images(monkeypatch):
    """Noise in the place of shapes, which take a second to draw."""

    def draw(count):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3))
        return Images(pixels.astype("uint8"), np.arange(count, dtype="int32") % 10)

    monkeypatch.setattr(tasks, "draw_shapes", lambda *counts: map(draw, counts))
    monkeypatch.setattr(tasks, "SHAPES_TO_TRAIN", 300)
    monkeypatch.setattr(tasks, "SHAPES_TO_VALIDATE", 50)


def vision(**changes):
    recipe = dataclasses.replace(DEMOS["demo-vision"].recipe, **changes)
    return dataclasses.replace(DEMOS["demo-vision"], recipe=recipe)


def test_a_batch_has_the_shapes_that_the_task_says(few_images, tmp_path):
    text = tiny.config(data=(str(tiny.write_texts(tmp_path / "texts")),))
    for config in (text, vision()):
        [batch] = read_data(config).train[:3].batch(3)
        found, said = (
            jax.tree.map(lambda x: (x.shape, x.dtype), tree)
            for tree in (batch, make_task(config).batch(3))
        )
        assert found == said


def test_validation_takes_all_images_or_the_first_ones(few_images):
    assert len(read_data(vision()).validation) == 50
    some = read_data(vision(val_batches=2, batch_size=20)).validation
    assert [int(example["labels"]) % 10 for example in some] == [*range(10)] * 4


def test_data_is_told_apart_by_its_fingerprint(few_images, monkeypatch):
    before = read_data(vision())
    assert (before.unit, before.facts) == ("image", read_data(vision(seed=1)).facts)
    assert before.description.startswith("300 images to train on, 50 to validate on")
    monkeypatch.setattr(tasks, "SHAPES_TO_VALIDATE", 60)
    assert read_data(vision()).facts != before.facts


def test_more_images_than_there_are_are_refused(few_images):
    with pytest.raises(UsageError, match="batch of 301 is more than the 300 images"):
        read_data(vision(batch_size=301))
