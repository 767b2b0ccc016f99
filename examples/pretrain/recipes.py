"""Runs by name: one's own text, the demos, and a row for each run of the paper's tables.

What rows share is said once, and a row says what is its own. Where the paper leaves a
setting open, its public configurations have it: the clip of the gradient, the
validations, the rates of most CIFAR-10 ablations. `parse` makes a run of a command line.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import tyro

from examples.pretrain.config import (
    Config,
    ImageRecipe,
    MixtureRecipe,
    Recipe,
    TextRecipe,
)
from examples.pretrain.errors import UsageError
from examples.pretrain.models import dense
from examples.pretrain.models.moonlight import MOONLIGHT_16B_A3B, MoonlightConfig
from examples.pretrain.optimizers import OPTIMIZERS, find_optimizer
from examples.vision import davidnet

# Presets of the recipes' models.
MODELS: dict[str, Any] = {
    **dense.PRESETS,
    "moonlight_16b_a3b": MOONLIGHT_16B_A3B,
    "davidnet": davidnet.PRESETS["davidnet"],
}

# Of one's own text, and of the demos.
_SMALL: dict[str, Any] = {
    "optimizer": "orscale",
    "clip": None,
    "seed": 0,
    "compute_dtype": "float32",
}
_TEXT = _SMALL | {
    "learning_rate": 4e-3,
    "batch_size": 16,
    "val_every": 50,
    "val_batches": 10,
}
_OWN_TEXT = Config(
    recipe=TextRecipe(steps=500, warmup_steps=25, seq_len=64, **_TEXT),
    model=dense.DenseConfig(
        vocab_size=256, width=128, layers=3, heads=4, fused_qkv=False, scan=False
    ),
    optimizer=("adamw", "muon_moonlight"),
    out=pathlib.Path("runs/text"),
)
_COMPARED = ("adamw", "muon_moonlight", "orscale")

DEMOS: dict[str, Config] = {
    "text": _OWN_TEXT,
    "demo": dataclasses.replace(
        _OWN_TEXT,
        optimizer=_COMPARED,
        out=pathlib.Path("runs/demo"),
        measure_every=125,
    ),
    "demo-moe": Config(
        # The usual balance rate would take thousands of steps.
        recipe=MixtureRecipe(
            steps=250, warmup_steps=12, seq_len=128, balance_rate=1e-2, **_TEXT,
        ),
        # A Moonlight of the decoder's width.
        model=MoonlightConfig(
            vocab_size=256, width=128, layers=3, dense_hidden=384, heads=4, kv_rank=32,
            nope_dim=32, rope_dim=16, value_dim=32, experts=16, experts_per_token=2,
            shared_experts=1, expert_hidden=128,
        ),
        optimizer=_COMPARED,
        out=pathlib.Path("runs/demo-moe"),
        ),
    "demo-vision": Config(
        recipe=ImageRecipe(
            learning_rate=0.02, adam_b2=0.999, weight_decay=5e-4, steps=128,
            warmup_steps=12, batch_size=128, val_every=16, val_batches=None, **_SMALL,
        ),
        # An eighth of DavidNet's widths.
        model=davidnet.DavidNetConfig(widths=(8, 16, 32, 64)),
        optimizer=_COMPARED,
        out=pathlib.Path("runs/demo-vision"),
        ),
}  # fmt: skip


class Result(NamedTuple):
    """What the paper reports of a run."""

    table: str  # The LaTeX label of a table, or of a section.
    # The validation loss in nats, or the share of right answers in per cent.
    value: float
    spread: float | None = None  # One standard deviation over three seeds.


class Row(NamedTuple):
    """A run that the paper's tables report."""

    model: str  # One of `MODELS`.
    recipe: Recipe
    results: tuple[Result, ...] = ()
    # "paper" or "public logs". An "assumed" one is ours: the paper says "its best".
    learning_rate_from: str = "paper"


# What the runs of a model share, by the first part of their names: of dense decoders
# learning rate, tokens, sequence length and batch size, appendix "Full hyperparameters".
# The paper gives tokens in billions to two decimals; these make its numbers of steps.
_PAPERS: dict[str, Any] = {"optimizer": "adamw", "rates": "shared"}
_BASES = {
    name: Row(
        name,
        TextRecipe(
            learning_rate=rate, tokens=tokens, seq_len=length, batch_size=batch, **_PAPERS
        ),
    )
    for name, rate, tokens, length, batch in (
        ("125m", 1e-3, 5_242_880_000, 1024, 256),
        ("399m", 9.503e-4, 8_919_711_744, 8192, 96),
        ("545m", 9.143e-4, 14_040_432_640, 4096, 256),
        ("1.1b", 8.561e-4, 28_541_190_144, 4096, 384),
    )
} | {
    "16b-a3b": Row(
        "moonlight_16b_a3b",
        MixtureRecipe(
            learning_rate=4.2e-4, tokens=9_999_220_736, seq_len=8192, batch_size=2048,
            warmup_steps=60, val_every=50, val_batches=10, param_dtype="bfloat16",
            **_PAPERS,
        ),
    ),
    "cifar10": Row(
        "davidnet",
        ImageRecipe(
            learning_rate=0.02, adam_learning_rate=1e-3, adam_b2=0.999, weight_decay=5e-4,
            clip=None, warmup_steps=500, epochs=24, batch_size=512, val_every=None,
            val_batches=None, **_PAPERS,
        ),
    ),
}  # fmt: skip


def _run(
    name: str,
    *results: tuple[str, float] | tuple[str, float, float],
    rate: float | None = None,
    rate_from: str = "paper",
    **changes: Any,
) -> tuple[str, Row]:
    """A run, whose name holds its base, its optimizer and maybe its rate."""
    base = next(base for base in _BASES if name.startswith(base))
    model, recipe, *_ = _BASES[base]
    run, _, named = name.removeprefix(f"{base}-").partition("-lr-")
    optimizer = run.removeprefix("ablation-").removesuffix("-r-max-10").replace("-", "_")
    rate = float(named) if named else rate or recipe.learning_rate
    recipe = dataclasses.replace(
        recipe, optimizer=optimizer, learning_rate=rate, **changes
    )
    return name, Row(model, recipe, tuple(Result(*r) for r in results), rate_from)


DENSE, MOE, RATIO, SWEEP = "tab:dense", "tab:moe", "tab:calibration", "tab:lr-sweep"
CIFAR, CIFAR_TEXT = "tab:cifar", "app:cifar"
ABLATION, UNCLIPPED = "tab:req-ablation", "app:req-details"
# Of the ablations on text, whose setup differs from the other runs' in what the paper
# does not say: their losses compare with one another alone. The rates are the best of the
# public sweeps, or of the nearest relative in them.
_OURS: dict[str, Any] = {"rate_from": "assumed", "adam_learning_rate": 1e-3}
_LOGS: dict[str, Any] = {"rate_from": "public logs", "r_min": 0.5, "r_max": 1.5}

# By name, as `--recipe` takes it. Of an optimizer's runs on a model, that of the main
# table has the plain name.
ROWS: dict[str, Row] = dict([
    _run("125m-adamw", (DENSE, 3.3721)),
    _run("125m-muon-moonlight", (DENSE, 3.2319), (SWEEP, 3.2319)),
    _run("125m-orscale", (DENSE, 3.2120, 0.0017), (RATIO, 3.2120), (SWEEP, 3.2120)),
    _run("399m-adamw", (DENSE, 2.9966)),
    _run("399m-muon-moonlight", (DENSE, 2.9198, 0.0016), (RATIO, 2.9183)),
    _run("399m-orscale", (DENSE, 2.9223, 0.0022), (RATIO, 2.9247)),
    _run("545m-adamw", (DENSE, 2.9235)),
    _run("545m-muon-moonlight", (DENSE, 2.8141, 0.0013)),
    _run("545m-orscale", (DENSE, 2.8052, 0.0013)),
    _run("1.1b-adamw", (DENSE, 2.7304)),
    _run("1.1b-muon-moonlight", (DENSE, 2.6360)),
    _run("1.1b-orscale", (DENSE, 2.6251)),
    _run("16b-a3b-adamw", (MOE, 5.2002)),
    _run("16b-a3b-muon-moonlight", (MOE, 3.4715)),
    _run("16b-a3b-orscale", (MOE, 3.3410)),
    _run("16b-a3b-orscale-r-max-10", (MOE, 3.3556), r_max=10.0),
    # AdamW's parameters stay at the shared rate.
    _run("399m-uncalibrated", (RATIO, 2.9939),
        rate=2.376e-3, adam_learning_rate=9.503e-4),
    _run("125m-uncalibrated", (RATIO, 3.2232), (ABLATION, 3.2232),
        rate=3e-3, adam_learning_rate=1e-3),
    _run("125m-unclipped", (UNCLIPPED, 3.2187)),
    _run("125m-muon-moonlight-lr-0.0003", (SWEEP, 3.2841)),
    _run("125m-muon-moonlight-lr-0.003", (SWEEP, 3.2372)),
    _run("125m-muon-moonlight-lr-0.01", (SWEEP, 4.6262)),
    _run("125m-orscale-lr-0.0003", (SWEEP, 3.2588)),
    _run("125m-orscale-lr-0.003", (SWEEP, 3.2196)),
    _run("125m-orscale-lr-0.01", (SWEEP, 3.3287)),
    _run("125m-ablation-orscale-vision", (ABLATION, 3.228), rate=0.02, **_OURS),
    _run("125m-ablation-orscale", (ABLATION, 3.226), rate=1e-3, **_OURS),
    _run("cifar10-muon-moonlight", (CIFAR, 93.75, 0.17), rate=0.01),
    _run("cifar10-muon-moonlight-lr-0.005", (CIFAR_TEXT, 93.61)),
    _run("cifar10-muon-moonlight-lr-0.001", (CIFAR_TEXT, 93.18, 0.09)),
    _run("cifar10-muon-moonlight-lr-0.0005", (CIFAR_TEXT, 92.41, 0.12)),
    _run("cifar10-muon", (CIFAR, 93.70, 0.14), rate=0.04),
    _run("cifar10-muon-lr-0.02", (CIFAR_TEXT, 93.67)),
    _run("cifar10-adamw", (CIFAR, 93.12, 0.04), rate=0.01),
    _run("cifar10-lamb", (CIFAR, 92.40, 0.20), rate=0.01),
    _run("cifar10-orscale-vision", (CIFAR, 94.05, 0.08), (ABLATION, 94.05, 0.08)),
    _run("cifar10-orscale", (ABLATION, 94.05, 0.12), rate=0.02, **_LOGS),
])  # fmt: skip


def find_config(name: str) -> Config:
    """The run of a name."""
    if name in DEMOS:
        return DEMOS[name]
    if name not in ROWS:
        known = ", ".join([*DEMOS, *sorted(ROWS)])
        raise UsageError(f"--recipe {name} is unknown. Choose one of: {known}.")
    model, recipe, *_ = ROWS[name]
    out = pathlib.Path("runs") / name
    return Config(
        recipe=recipe, model=MODELS[model], optimizer=(recipe.optimizer,), out=out
    )


def parse(arguments: Sequence[str], prog: str) -> Config:
    """The run of a command line: a recipe's, with the options that are given."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", default="text")
    chosen, options = first.parse_known_args(arguments)
    flags = (text.partition("=")[0] for text in options if text.startswith("--"))
    given = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    if given & {"tokens", "epochs"} and "steps" not in given:
        options += ["--steps", "None"]  # They replace the recipe's.
    config = tyro.cli(
        Config,
        args=options,
        prog=prog,
        default=find_config(chosen.recipe),
        config=(tyro.conf.SuppressFixed,),
    )
    _refuse_useless(given, config)
    return config


def rates_in_words(config: Config) -> str:
    """Where the learning rates of a run come from, in a line."""
    rate = f"{config.recipe.learning_rate:g}"
    if config.recipe.rates == "shared":
        return f"Learning rates: {rate} for every optimizer (--rates shared)."
    like_a_demo = dataclasses.replace(config.recipe, rates="advised", seed=_SMALL["seed"])
    searched = not config.data and any(
        (demo.model, demo.recipe) == (config.model, like_a_demo)
        for demo in DEMOS.values()
    )
    told = [f"AdamW {rate}" + ", the best of its search (docs/data/demo_rates.csv)" * searched]
    for name in config.optimizer:
        of_matrices, beside = find_optimizer(name).advised
        rest = f" ({beside:g} × for what AdamW trains)" if beside != of_matrices else ""
        if name != "adamw":
            told.append(f"{find_optimizer(name).label} {of_matrices:g} × that{rest}")
    return (
        f"Learning rates: {'; '.join(told)}. These are the multiples that "
        "docs/hyperparameters.md advises; --rates shared gives all AdamW's rate."
    )


def _refuse_useless(given: Set[str], config: Config) -> None:
    """Refuses two lengths, and what none of the optimizers would take."""
    taken = {x for name in config.optimizer for x in find_optimizer(name).options}
    options = {n: v for n, v in config.to_dict().items() if n in given and v is not None}
    for name, value in options.items():
        takers = [o for o, entry in OPTIMIZERS.items() if name in entry.options]
        if takers and name not in taken:
            raise UsageError(
                f"--{name.replace('_', '-')} {value} would change nothing with "
                f"--optimizer {' '.join(config.optimizer)}. Leave it out, or choose an "
                f"optimizer that takes it, such as {takers[0]}."
            )
    of_length = ("steps", "tokens", "epochs")
    lengths = [f"--{name} {options[name]}" for name in of_length if name in options]
    if len(lengths) > 1:
        raise UsageError(
            f"{' and '.join(lengths)}: each decides how many steps there are. Pass only "
            "one of them."
        )
