"""The recipes against the paper's tables, which lie beside the tests word for word."""

import csv
import dataclasses
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pretrain.config import TextRecipe, accumulation
from examples.pretrain.errors import UsageError
from examples.pretrain.models.dense import PRESETS
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
LATEX = (pathlib.Path(__file__).parents[2] / "data" / "paper_tables.tex").read_text()
MODELS = {"125M": "125m", "399M": "399m", "545M": "545m", "1.1B": "1.1b"}
# What stands in the place of LaTeX, in this order.
PLAIN = [
    (r"\\(label|cref)\{[^}]*\}", ""),
    (r"\{?\\times\}?10\^\{", "e"),  # 9.503{\times}10^{-4}
    (r"(?<![\d.])10\^\{", "1e"),
    (r"\\\|(.*?)_\\ell\\\|_F", r"\1"),  # Norms: their argument alone.
    (r"_\\ell|---|\{,\}|\\widetilde ", ""),
    (r"_\{", "_"),
    (r"\\pm", "±"),
    (r"\\(textbf|emph|mathbf|mathrm|texttt)", ""),
    (r"[{}$\\]", ""),
]


def plain(text):
    """A text without its LaTeX."""
    for pattern, replacement in PLAIN:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


def table(label):
    """The cells of a table, row by row, the header first."""
    [body] = [
        body
        for body in re.findall(r"\\begin\{table\}.*?\\end\{table\}", LATEX, re.DOTALL)
        if rf"\label{{{label}}}" in body
    ]
    body = body[body.index(r"\toprule") : body.index(r"\bottomrule")]
    body = re.sub(r"\\(toprule|midrule)", "", body)
    rows = [row for row in body.split(r"\\") if row.strip()]
    return [[plain(cell) for cell in row.split("&")] for row in rows]


def paragraph(start):
    [found] = [line for line in LATEX.splitlines() if line.startswith(start)]
    return plain(found)


def number(cell):
    return float(re.search(r"\d+(\.\d+)?(e-?\d+)?", cell).group())


def test_recipes_are_those_of_the_main_tables():
    """On images, OrScale runs the vision configuration."""

    def name(base, optimizer):
        words = re.findall(r"\w+", optimizer.replace("(ours)", "").lower())
        return "-".join([base, *words])

    (*_, adamw, muon, ours), *rows = table("tab:dense")
    rates = {
        name(MODELS[row[0]], optimizer): number(row[2])
        for row in rows
        for optimizer in (adamw, muon, ours)
    }
    mixtures = (row[0] for row in table("tab:moe")[1:] if "r_max" not in row[0])
    rates |= {name("16b-a3b", optimizer): 4.2e-4 for optimizer in mixtures}
    for _, optimizer, rate, _ in table("tab:cifar")[1:]:
        label = optimizer.replace("OrScale", "OrScale vision")
        rates[name("cifar10", label)] = number(rate)
    found = {name: recipe.learning_rate for name, recipe in RECIPES.items()}
    assert found == rates and len(found) == 20


def test_recipes_of_a_dense_scale_have_its_settings():
    _, *rows = table("tab:dense-hp")
    assert [row[0] for row in rows] == list(MODELS)
    for scale, *cells in rows:
        seq_len, batch_size, tokens, steps, rate, warmup = cells
        model = PRESETS[MODELS[scale]]
        recipes = [config.recipe for config in PAPER.values() if config.model == model]
        assert len(recipes) == 3
        for recipe in recipes:
            assert recipe.seq_len == int(seq_len)
            assert recipe.batch_size == int(batch_size)
            assert recipe.steps == int(steps)
            read = recipe.steps * recipe.batch_size * recipe.seq_len
            assert f"{read / 1e9:.2f}B" == tokens
            assert recipe.warmup_steps == int(warmup)
        assert RECIPES[f"{MODELS[scale]}-orscale"].learning_rate == number(rate)


def test_recipes_of_text_have_the_appendixs_hyperparameters():
    text = paragraph(r"\textbf{Dense LM")
    assert "betas (0.9,0.95) and weight decay 0.1" in text
    assert "r_min=0.1, r_max=5.0, mu=0.95, lambda=0.1" in text
    for recipe in RECIPES.values():
        if isinstance(recipe, TextRecipe):
            assert (recipe.adam_b1, recipe.adam_b2) == (0.9, 0.95)
            assert (recipe.weight_decay, recipe.momentum) == (0.1, 0.95)
            assert (recipe.clip, recipe.compute_dtype) == (1.0, "bfloat16")
    for name in ("125m", "399m", "545m", "1.1b", "16b-a3b"):
        arguments = optimizer_arguments(RECIPES[f"{name}-orscale"])
        # What is not given is the library's default, which is the paper's.
        assert arguments == {
            "momentum": 0.95,
            "weight_decay": 0.1,
            "adam_b1": 0.9,
            "adam_b2": 0.95,
        }


def test_the_mixture_has_the_public_configuration():
    text = paragraph(r"\textbf{16B-A3B MoE.}")
    for stated in (
        "sequence length 8192",
        "(=2048 examples =16777216 tokens/step), 596 steps =9999220736",
        "warmup 60 steps",
        "seed 42, validation every 50 steps over 10 batches",
        "LR 4.2e-4, weight decay 0.1",
    ):
        assert stated in text
    recipes = [row for name, row in RECIPES.items() if name.startswith("16b")]
    assert len(recipes) == 3
    for recipe in recipes:
        assert recipe.batch_size * recipe.seq_len == 16_777_216
        assert (recipe.batch_size, recipe.seq_len) == (2048, 8192)
        assert recipe.steps == 596
        assert (recipe.warmup_steps, recipe.seed) == (60, 42)
        assert (recipe.val_every, recipe.val_batches) == (50, 10)
        assert (recipe.learning_rate, recipe.clip) == (4.2e-4, 1.0)
        assert recipe.param_dtype == "bfloat16"


def test_images_have_the_appendixs_hyperparameters():
    text = paragraph(r"\textbf{CIFAR-10 / DavidNet.}")
    for stated in (
        "24 epochs, global batch 512, bf16, cosine schedule with 500-step warmup",
        "no gradient clipping",
        "weight decay 5e-4",
        "OrScale clip (0.5,1.5)",
        "AdamW fallback LR 1e-3, betas (0.9,0.999)",
    ):
        assert stated in text
    recipes = [row for name, row in RECIPES.items() if name.startswith("cifar")]
    assert len(recipes) == 5
    for recipe in recipes:
        assert (recipe.batch_size, recipe.warmup_steps) == (512, 500)
        assert recipe.steps == 24 * (50_000 // 512)
        assert (recipe.clip, recipe.weight_decay) == (None, 5e-4)
        assert recipe.adam_learning_rate == 1e-3
        assert (recipe.adam_b1, recipe.adam_b2) == (0.9, 0.999)


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

    # With a ratio of 1, OrScale is Muon+Moonlight, which is Muon with a scale.
    np.testing.assert_allclose(kernel("orscale"), kernel("muon_moonlight"), rtol=1e-5)
    decay = {"weight_decay": 0.0}
    np.testing.assert_allclose(
        kernel("muon_moonlight", **decay),
        kernel("muon", **decay) * 0.2 * np.sqrt(6),
        rtol=1e-5,
    )
    # The vision configuration is clipped, and follows bounds that a recipe gives.
    np.testing.assert_allclose(
        kernel("orscale_vision", **decay, r_min=2.0, r_max=2.0),
        2 * kernel("muon", **decay),
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
    "muon": ("muon_moonlight", "optax_muon"),
    "muon(consistent_rms=None)": ("muon",),
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
            "muon_moonlight",
            "advised",
            "Muon+Moonlight: learning rate 0.2 (2 × AdamW's) for matrices, 0.2 (2 × "
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
    page = (ROOT / "docs" / "results.md").read_text()
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
        shown = " | ".join(f"{losses[x]:.3f}" for x in sorted(losses))
        unit = "image" if name == "demo-vision" else "byte"
        assert f"| `{name}`, nats per {unit} | {rate:g} | {shown} |" in page
        others = [row for row in rows if row["recipe"] == name][3:]
        assert [row["optimizer"] for row in others] == ["muon_moonlight", "orscale"]
        shown = " | ".join(f"{float(row['val_loss']):.3f}" for row in others)
        assert f"`{name}`, nats per {unit} | {losses[rate]:.3f} | {shown} |" in page
        line = rates_in_words(DEMOS[name])
        assert f"AdamW {rate:g}, the best one in docs/data/demo_rates.csv; " in line
        assert "light 2 × that; OrScale 1 × that (2 × for what AdamW trains)." in line
    own = parse(["--data", "a.txt"], "")
    assert own.optimizer == ("adamw", "muon_moonlight") and own.recipe.rates == "advised"
    for options in ("--data a.txt", "--learning-rate 1", "--steps 99"):
        assert "the best one" not in rates_in_words(parse(options.split(), ""))
    shared = parse(["--recipe", "demo", "--rates", "shared"], "")
    assert "for every optimizer (--rates shared)." in rates_in_words(shared)
