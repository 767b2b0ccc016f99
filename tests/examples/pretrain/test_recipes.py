"""The recipes: the paper's numbers, their optimizers, and the rates that a run takes."""

import csv
import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pretrain.config import TextRecipe, accumulation
from examples.pretrain.errors import UsageError
from examples.pretrain.optimizers import (
    OPTIMIZERS,
    make_optimizer,
    optimizer_arguments,
    peak_rates,
    rates_and_decay,
)
from examples.pretrain.recipes import DEMOS, PAPER, parse, rates_in_words
from examples.pretrain.setup import learning_rates
from tests.examples.pretrain.tiny import ROOT

RECIPES = {name: config.recipe for name, config in PAPER.items()}
# The paper's tables: rate, steps, batch, sequence length, and tokens in billions.
PUBLISHED = {
    "125m": (1e-3, 20_000, 256, 1024, 5.24),
    "399m": (9.503e-4, 11_342, 96, 8192, 8.92),
    "545m": (9.143e-4, 13_390, 256, 4096, 14.04),
    "1.1b": (8.561e-4, 18_146, 384, 4096, 28.54),
    "16b-a3b": (4.2e-4, 596, 2048, 8192, 10.00),
}


@pytest.mark.parametrize("scale", PUBLISHED)
def test_recipes_of_text_are_rows_of_the_papers_tables(scale):
    """Written down once more; commit 11ff6128 reads them from the tables' source."""
    recipes = [RECIPES[f"{scale}-{x}"] for x in ("adamw", "muon", "orscale")]
    for recipe in recipes:
        tokens = recipe.steps * recipe.batch_size * recipe.seq_len
        numbers = recipe.steps, recipe.batch_size, recipe.seq_len, round(tokens / 1e9, 2)
        assert (recipe.learning_rate, *numbers) == PUBLISHED[scale]
        assert recipe.warmup_steps == (60 if scale == "16b-a3b" else 1000)
        assert (recipe.clip, recipe.compute_dtype) == (1.0, "bfloat16")
    # What is not given is the library's default, which is the paper's.
    given = {"momentum": 0.95, "weight_decay": 0.1, "adam_b1": 0.9, "adam_b2": 0.95}
    assert optimizer_arguments(recipes[-1]) == given


def test_accumulation_makes_the_batch_of_whole_parts():
    mixture = RECIPES["16b-a3b-orscale"]
    assert accumulation(mixture, devices=8, per_device_batch=1) == 256
    assert accumulation(mixture, devices=64, per_device_batch=4) == 8
    assert accumulation(RECIPES["399m-orscale"], devices=8, per_device_batch=12) == 1


@pytest.mark.parametrize(
    ("devices", "per_device_batch"), [(8, 5), (64, 64), (0, 1), (8, 0)]
)
def test_a_batch_that_does_not_divide_is_refused(devices, per_device_batch):
    with pytest.raises(UsageError, match=r"batch of 2048 does not divide .* choose"):
        accumulation(RECIPES["16b-a3b-orscale"], devices, per_device_batch)


SMALL = TextRecipe(
    optimizer="adamw", learning_rate=0.1, steps=100, seq_len=1, batch_size=1,
    warmup_steps=0,
)  # fmt: skip
PARAMS = {"kernel": jnp.eye(4, 6) + 0.1, "bias": jnp.ones(6)}
GRADS = {"kernel": jnp.eye(4, 6)[:, ::-1] + 0.3, "bias": jnp.ones(6)}


def update(recipe, **matrices):
    schedule = optax.constant_schedule(recipe.learning_rate)
    optimizer = make_optimizer(recipe, schedule, **matrices)
    return optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)[0]


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps(name):
    recipe = dataclasses.replace(SMALL, optimizer=name, learning_rate=0.1)
    updates = update(recipe, weight_dimension_numbers=None)
    for leaf in updates.values():
        assert np.all(np.isfinite(leaf)) and np.any(leaf != 0)


def test_optimizers_differ_in_what_their_names_say():
    def kernel(name, **changes):
        return update(dataclasses.replace(SMALL, optimizer=name, **changes))["kernel"]

    # With a ratio of 1, `orscale` is `muon`, which is Muon with a scale.
    np.testing.assert_allclose(kernel("orscale"), kernel("muon"), rtol=1e-5)
    decay = {"weight_decay": 0.0}
    np.testing.assert_allclose(
        kernel("muon", **decay),
        kernel("muon_unit_scale", **decay) * 0.2 * np.sqrt(6),
        rtol=1e-5,
    )
    # The vision configuration is clipped, and follows bounds that a recipe gives.
    np.testing.assert_allclose(
        kernel("orscale_vision", **decay, r_min=2.0, r_max=2.0),
        2 * kernel("muon_unit_scale", **decay),
        rtol=1e-5,
    )
    assert optimizer_arguments(
        dataclasses.replace(SMALL, optimizer="unclipped", r_max=3)
    )["r_max"] == float("inf")


def test_other_parameters_have_a_rate_of_their_own():
    at_rate, apart = (
        update(dataclasses.replace(SMALL, optimizer="orscale", adam_learning_rate=rate))
        for rate in (None, 0.025)
    )
    np.testing.assert_allclose(apart["kernel"], at_rate["kernel"])
    np.testing.assert_allclose(apart["bias"], at_rate["bias"] / 8, rtol=1e-6)


# The page's multiples of AdamW's rate: of the matrices, and of the rest.
_CALLS = {
    "muon": ("muon", "optax_muon"),
    "muon(consistent_rms=None)": ("muon_unit_scale",),
    "family.normuon": ("normuon",),
    "orscale": ("orscale",),
}
_ROWS = re.findall(
    r"^\| `(.*)` \| (\d) \| (\d) \|$",
    (ROOT / "docs" / "hyperparameters.md").read_text().split("Start of a search")[0],
    re.MULTILINE,
)
ADVISED = {"adamw": (1, 1)} | {
    name: (int(of_matrices), int(beside))
    for call, of_matrices, beside in _ROWS
    for name in _CALLS[call]
}


@pytest.mark.parametrize("name", ADVISED)
def test_rates_are_those_that_the_page_advises(name):
    recipe = dataclasses.replace(SMALL, optimizer=name)
    expected = [factor * SMALL.learning_rate for factor in ADVISED[name]]
    assert peak_rates(recipe) == pytest.approx(expected)
    shared = dataclasses.replace(recipe, rates="shared")
    assert peak_rates(shared) == (SMALL.learning_rate, SMALL.learning_rate)
    own = dataclasses.replace(recipe, adam_learning_rate=0.7)
    assert peak_rates(own) == (pytest.approx(expected[0]), 0.7)
    schedule = learning_rates(dataclasses.replace(recipe, steps=9))
    assert schedule(0) == pytest.approx(expected[0])
    if OPTIMIZERS[name].readable:
        bias = make_optimizer(recipe, schedule, weight_dimension_numbers=None)
        updates, _ = bias.update(GRADS, bias.init(PARAMS), PARAMS)
        reference = optax.adamw(expected[1], b2=0.95, weight_decay=0.1)
        wanted, _ = reference.update(GRADS, reference.init(PARAMS), PARAMS)
        np.testing.assert_allclose(updates["bias"], wanted["bias"], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "rates", "line"),
    [
        ("adamw", "advised", "AdamW: learning rate 0.1; weight decay 0.1 for all"),
        (
            "muon",
            "advised",
            "muon: learning rate 0.2 (2 × AdamW's) for matrices, 0.2 (2 × "
            "AdamW's) for the rest; weight decay 0.1 for all",
        ),
        (
            "orscale",
            "shared",
            "OrScale: learning rate 0.1 for matrices, 0.1 for the rest; weight decay 0.1 "
            "for all",
        ),
    ],
)
def test_a_line_says_what_becomes_of_rates_and_decay(name, rates, line):
    recipe = dataclasses.replace(SMALL, optimizer=name, rates=rates)
    assert rates_and_decay(recipe) == line


def test_a_run_says_first_which_rates_it_takes_and_why():
    assert {recipe.rates for recipe in RECIPES.values()} == {"shared"}
    page = (ROOT / "docs" / "study.md").read_text()
    with open(ROOT / "docs" / "data" / "demo_rates.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("demo", "demo-moe", "demo-vision"):
        losses = {
            float(row["learning_rate"]): float(row["val_loss"])
            for row in rows
            if (row["recipe"], row["optimizer"]) == (name, "adamw")
        }
        rate = min(losses, key=losses.__getitem__)
        assert sorted(losses) == [rate / 2, rate, 2 * rate]
        unit = "image" if name == "demo-vision" else "byte"
        others = [row for row in rows if row["recipe"] == name][3:]
        assert [row["optimizer"] for row in others] == ["muon", "orscale"]
        shown = " | ".join(f"{float(row['val_loss']):.3f}" for row in others)
        assert f"`{name}`, nats per {unit} | {losses[rate]:.3f} | {shown} |" in page
        line = rates_in_words(DEMOS[name])
        assert f"AdamW {rate:g}, the best one in docs/data/demo_rates.csv; " in line
        assert "muon 2 × that; OrScale 1 × that (2 × for what AdamW trains)." in line
    own = parse(["--data", "a.txt"], "")
    assert own.optimizer == ("adamw", "muon") and own.recipe.rates == "advised"
    for options in ("--data a.txt", "--learning-rate 1", "--steps 99"):
        assert "the best one" not in rates_in_words(parse(options.split(), ""))
    shared = parse(["--recipe", "demo", "--rates", "shared"], "")
    assert "for every optimizer (--rates shared)." in rates_in_words(shared)
