"""Runs by name: one's own text, the demos, and those of the paper's main tables.

Where the paper leaves a setting open, its public configurations have it: the clip of the
gradient and the validations. Its other runs differ from these in an option or two.
`parse` makes a run of a command line.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence, Set
from typing import Any

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

# Of one's own text, and of the demos, whose rates are AdamW's best ones: the search is
# docs/data/demo_rates.csv.
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
    optimizer=("adamw", "muon"),
    out=pathlib.Path("runs/text"),
)
_COMPARED = ("adamw", "muon", "orscale")

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
            steps=250, warmup_steps=12, seq_len=128, balance_rate=1e-2,
            **_TEXT | {"learning_rate": 8e-3},
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


# The rest of a run of the paper is its optimizer.
_PAPERS: dict[str, Any] = {"optimizer": "adamw", "rates": "shared"}
# By name: the model, what its runs share, and the optimizers of the paper's main tables
# with the learning rates of those that have their own. Of dense decoders learning rate,
# steps, sequence length and batch size are the appendix's, "Full hyperparameters".
_MAIN = dict.fromkeys(_COMPARED)
_BASES: dict[str, tuple[Any, Recipe, dict[str, float | None]]] = {
    name: (
        dense.PRESETS[name],
        TextRecipe(
            learning_rate=rate, steps=steps, seq_len=length, batch_size=batch, **_PAPERS
        ),
        _MAIN,
    )
    for name, rate, steps, length, batch in (
        ("125m", 1e-3, 20_000, 1024, 256),
        ("399m", 9.503e-4, 11_342, 8192, 96),
        ("545m", 9.143e-4, 13_390, 4096, 256),
        ("1.1b", 8.561e-4, 18_146, 4096, 384),
    )
} | {
    "16b-a3b": (
        MOONLIGHT_16B_A3B,
        MixtureRecipe(
            learning_rate=4.2e-4, steps=596, seq_len=8192, batch_size=2048,
            warmup_steps=60, val_every=50, val_batches=10, param_dtype="bfloat16",
            **_PAPERS,
        ),
        _MAIN,
    ),
    "cifar10": (
        davidnet.PRESETS["davidnet"],
        ImageRecipe(
            learning_rate=0.01, adam_learning_rate=1e-3, adam_b2=0.999, weight_decay=5e-4,
            # 24 epochs of 97 whole batches.
            clip=None, warmup_steps=500, steps=24 * 97, batch_size=512, val_every=97,
            val_batches=None, **_PAPERS,
        ),
        {"adamw": None, "lamb": None, "muon": None, "muon_unit_scale": 0.04,
         "orscale_vision": 0.02},
    ),
}  # fmt: skip
PAPER: dict[str, Config] = {
    (name := f"{base}-{optimizer.replace('_', '-')}"): Config(
        recipe=dataclasses.replace(
            recipe, optimizer=optimizer, learning_rate=rate or recipe.learning_rate
        ),
        model=model,
        optimizer=(optimizer,),
        out=pathlib.Path("runs") / name,
    )
    for base, (model, recipe, optimizers) in _BASES.items()
    for optimizer, rate in optimizers.items()
}


def find_config(name: str) -> Config:
    """The run of a name."""
    if name not in DEMOS | PAPER:
        known = ", ".join([*DEMOS, *PAPER])
        raise UsageError(f"--recipe {name} is unknown. Choose one of: {known}.")
    return (DEMOS | PAPER)[name]


def parse(arguments: Sequence[str], prog: str) -> Config:
    """The run of a command line: a recipe's, with the options that are given."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", default="text")
    chosen, options = first.parse_known_args(arguments)
    flags = (text.partition("=")[0] for text in options if text.startswith("--"))
    given = {flag.removeprefix("--").replace("-", "_") for flag in flags}
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
    why = ", the best one in docs/data/demo_rates.csv" if searched else ""
    told = [f"AdamW {rate}{why}"]
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
    """Refuses what none of the optimizers would take."""
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
