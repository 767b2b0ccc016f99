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
from examples.pretrain.optimizers import (
    OPTIMIZERS,
    make_optimizer,
    optimizer_arguments,
    peak_rates,
    rates_and_decay,
)
from examples.pretrain.recipes import DEMOS, ROWS, parse, rates_in_words
from examples.pretrain.setup import learning_rates
from tests.examples.pretrain.tiny import ROOT

RECIPES = {name: row.recipe for name, row in ROWS.items()}
PAPER = (pathlib.Path(__file__).parents[2] / "data" / "paper_tables.tex").read_text()
MODELS = {"125M": "125m", "399M": "399m", "545M": "545m", "1.1B": "1.1b"}
OPTIMIZER_OF = {
    "AdamW": "adamw",
    "LAMB": "lamb",
    "Muon": "muon",
    "Muon+Moonlight": "muon_moonlight",
    "Muon + Moonlight": "muon_moonlight",
    "Muon+Moonlight (reference)": "muon_moonlight",
    "OrScale": "orscale",
    "OrScale (ours)": "orscale",
    "OrScale (calibrated)": "orscale",
    "OrScale (r_max=10)": "orscale",
    "OrScale (LM config.)": "orscale",
    "OrScale (s=1)": "orscale_vision",
    "OrScale, uncalibrated": "uncalibrated",
    "Uncalibrated ratio": "uncalibrated",
}
DELETED = {
    "OrScale, calibration in bf16", "Q denominator", "M denominator",
    "RMS(M) + Moonlight", "Decoupled weight decay",
}  # fmt: skip


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
        for body in re.findall(r"\\begin\{table\}.*?\\end\{table\}", PAPER, re.DOTALL)
        if rf"\label{{{label}}}" in body
    ]
    body = body[body.index(r"\toprule") : body.index(r"\bottomrule")]
    body = re.sub(r"\\(toprule|midrule)", "", body)
    rows = [row for row in body.split(r"\\") if row.strip()]
    return [[plain(cell) for cell in row.split("&")] for row in rows]


def paragraph(start):
    [found] = [line for line in PAPER.splitlines() if line.startswith(start)]
    return plain(found)


def measured(cell):
    """A value and its spread; None where nothing is reported."""
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", cell)]
    if not numbers:
        return None
    value, spread = (*numbers, None)[:2]
    return value, spread


def number(cell):
    return float(re.search(r"\d+(\.\d+)?(e-?\d+)?", cell).group())


def reported(label):
    """What a table reports: (model, optimizer, value, spread, learning rate or None).

    Of the paper's deleted designs, only what arguments of ours delete has a recipe.
    """
    header, *rows = table(label)
    found = set()

    def add(model, name, cell, rate):
        if measured(cell) and name not in DELETED:
            found.add((model, OPTIMIZER_OF.get(name, name), *measured(cell), rate))

    for row in rows:
        if label == "tab:dense":
            for name, cell in zip(header[3:], row[3:], strict=True):
                add(MODELS[row[0]], name, cell, number(row[2]))
        elif label == "tab:moe":
            add("moonlight_16b_a3b", row[0], row[2], 4.2e-4)
        elif label == "tab:calibration":
            scale, variant, rate, loss = row
            [stated, *_] = re.findall(r"\((\d[\d.e-]*)[,)]", rate) or [None]
            shared = RECIPES[f"{MODELS[scale]}-adamw"].learning_rate
            add(MODELS[scale], variant, loss, float(stated or shared))
        elif label == "tab:lr-sweep":
            for rate, cell in zip(header[1:], row[1:], strict=True):
                add("125m", row[0], cell, number(rate))
        elif label == "tab:req-ablation":
            add("davidnet", row[0], row[3], None)
            add("125m", row[0], row[4], None)
        else:  # On images, OrScale runs the vision configuration.
            name = OPTIMIZER_OF[row[1]].replace("orscale", "orscale_vision")
            add("davidnet", name, row[3], number(row[2]))
    return found


def held(label):
    """The same of the recipes."""
    return {
        (row.model, row.recipe.optimizer, *result[1:], row.recipe.learning_rate)
        for row in ROWS.values()
        for result in row.results
        if result.table == label
    }


# And how many results each has.
TABLES = {
    "tab:dense": 12,
    "tab:moe": 4,
    "tab:calibration": 5,
    "tab:lr-sweep": 8,
    "tab:cifar": 5,
}


@pytest.mark.parametrize("label", TABLES)
def test_every_reported_row_is_a_recipe_and_every_recipe_a_reported_row(label):
    assert len(reported(label)) == TABLES[label]
    assert held(label) == reported(label)


def test_every_ablation_is_a_recipe_though_the_table_has_no_rates():
    assert len(reported("tab:req-ablation")) == 5
    found = {(*row[:4], None) for row in held("tab:req-ablation")}
    assert found == reported("tab:req-ablation")


def test_results_beside_the_tables_are_the_papers():
    assert "final CE 3.2187" in paragraph(r"\textbf{Clip removal.}")
    text = paragraph("Two notes")
    assert "Moonlight at LR 0.005 matches Muon at 0.02: 93.61 vs. 93.67" in text
    assert "nominal 5e-4,1e-3 falls to 92.41±0.12 and 93.18±0.09" in text
    assert held("app:req-details") == {("125m", "unclipped", 3.2187, None, 1e-3)}
    assert held("app:cifar") == {
        ("davidnet", "muon_moonlight", 93.61, None, 0.005),
        ("davidnet", "muon", 93.67, None, 0.02),
        ("davidnet", "muon_moonlight", 92.41, 0.12, 5e-4),
        ("davidnet", "muon_moonlight", 93.18, 0.09, 1e-3),
    }


def test_every_recipe_reports_something_from_a_known_place():
    places = {result.table for row in ROWS.values() for result in row.results}
    assert places == {*TABLES, "tab:req-ablation", "app:req-details", "app:cifar"}
    assert all(row.results for row in ROWS.values())
    assert len(RECIPES) == 37


def test_recipes_of_a_dense_scale_have_its_settings():
    _, *rows = table("tab:dense-hp")
    assert [row[0] for row in rows] == list(MODELS)
    for scale, *cells in rows:
        seq_len, batch_size, tokens, steps, rate, warmup = cells
        recipes = [row.recipe for row in ROWS.values() if row.model == MODELS[scale]]
        assert len(recipes) >= 3
        for recipe in recipes:
            assert recipe.seq_len == int(seq_len)
            assert recipe.batch_size == int(batch_size)
            assert f"{recipe.tokens / 1e9:.2f}B" == tokens
            assert recipe.num_steps == int(steps)
            assert recipe.num_steps * recipe.batch_size * recipe.seq_len == recipe.tokens
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
    recipes = [row.recipe for row in ROWS.values() if row.model == "moonlight_16b_a3b"]
    assert len(recipes) == 4
    for recipe in recipes:
        assert recipe.batch_size * recipe.seq_len == 16_777_216
        assert (recipe.batch_size, recipe.seq_len) == (2048, 8192)
        assert (recipe.num_steps, recipe.tokens) == (596, 9_999_220_736)
        assert (recipe.warmup_steps, recipe.seed) == (60, 42)
        assert (recipe.val_every, recipe.val_batches) == (50, 10)
        assert (recipe.learning_rate, recipe.clip) == (4.2e-4, 1.0)
        assert recipe.param_dtype == "bfloat16"
    assert optimizer_arguments(RECIPES["16b-a3b-orscale-r-max-10"])["r_max"] == 10
    [bounds] = {row[1] for row in table("tab:moe") if "10" in row[0]}
    assert bounds == "0.1/10"


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
    recipes = [row.recipe for row in ROWS.values() if row.model == "davidnet"]
    assert len(recipes) == 10
    for recipe in recipes:
        assert (recipe.epochs, recipe.batch_size, recipe.warmup_steps) == (24, 512, 500)
        assert recipe.num_steps == 24 * 97
        assert (recipe.clip, recipe.weight_decay) == (None, 5e-4)
        assert recipe.adam_learning_rate == 1e-3
        assert (recipe.adam_b1, recipe.adam_b2) == (0.9, 0.999)
    assert optimizer_arguments(RECIPES["cifar10-orscale"])["r_max"] == 1.5


def test_uncalibrated_recipes_leave_adamw_at_the_shared_rate():
    text = paragraph(r"\textbf{Uncalibrated variant")
    assert "3e-3 at 125M" in text and "2.376e-3 at 399M" in text
    for name in ("125m", "399m"):
        recipe = RECIPES[f"{name}-uncalibrated"]
        assert recipe.adam_learning_rate == RECIPES[f"{name}-orscale"].learning_rate


def test_rates_that_the_paper_does_not_state_are_marked():
    for row in ROWS.values():
        unstated = {result.table for result in row.results} == {"tab:req-ablation"}
        assert (row.learning_rate_from == "paper") == (not unstated)


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
    optimizer="adamw", learning_rate=0.1, tokens=100, seq_len=1, batch_size=1,
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


# Rates as the page advises them: of the matrices, and of the rest, over AdamW's.
ADVISED = {
    "adamw": (1, 1),
    "muon_moonlight": (2, 2),
    "optax_muon": (2, 2),
    "orscale": (1, 2),
    "muon": (4, 6),
    "normuon": (2, 6),
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
    with open(ROOT / "docs" / "data" / "demo_rates.csv", newline="") as file:
        searched = [row for row in csv.DictReader(file) if row["optimizer"] == "adamw"]
    for name in ("demo", "demo-moe", "demo-vision"):
        losses = {
            float(row["learning_rate"]): float(row["val_loss"])
            for row in searched
            if row["recipe"] == name
        }
        rate = min(losses, key=losses.__getitem__)
        assert min(losses) < rate < max(losses)
        line = rates_in_words(DEMOS[name])
        assert f"AdamW {rate:g}, the best of its search (docs/data/demo_rates.csv); " in line
        multiples = (
            "Muon+Moonlight 2 × that; OrScale 1 × that (2 × for what AdamW trains)."
        )
        assert multiples in line
    own = parse(["--data", "a.txt"], "")
    assert own.optimizer == ("adamw", "muon_moonlight") and own.recipe.rates == "advised"
    for config in (
        own,
        parse(["--learning-rate", "1"], ""),
        parse(["--steps", "99"], ""),
    ):
        assert "of its search" not in rates_in_words(config)
    shared = parse(["--recipe", "demo", "--rates", "shared"], "")
    assert "for every optimizer (--rates shared)." in rates_in_words(shared)
