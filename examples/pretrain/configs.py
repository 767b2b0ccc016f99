"""Whole runs by name: the demos, and one for each of the paper's recipes."""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from examples.pretrain.config import Config
from examples.pretrain.errors import UsageError
from examples.pretrain.kinds import recorded_kind
from examples.pretrain.models import dense
from examples.pretrain.moonlight.config import MOONLIGHT_16B_A3B, MoonlightConfig
from examples.pretrain.optimizers import find_optimizer
from examples.pretrain.options import refuse_useless, replacing_steps
from examples.pretrain.recipe import DecoderRecipe, ImageRecipe, MixtureRecipe
from examples.pretrain.recipes import ROWS
from examples.vision import davidnet

# Presets of the recipes' models.
MODELS: dict[str, Any] = {
    **dense.PRESETS,
    "moonlight_16b_a3b": MOONLIGHT_16B_A3B,
    "davidnet": davidnet.PRESETS["davidnet"],
}
COMPARED = ("adamw", "muon_moonlight", "orscale")

_DEMO: dict[str, Any] = {
    "optimizer": "orscale",
    "clip": None,
    "seed": 0,
    "compute_dtype": "float32",
}
_TEXT = {
    **_DEMO,
    "learning_rate": 4e-3,
    "batch_size": 16,
    "val_every": 50,
    "val_batches": 10,
}
_DECODER = DecoderRecipe(steps=500, warmup_steps=25, seq_len=64, **_TEXT)
# The usual balance rate would take thousands of steps.
_MIXTURE = MixtureRecipe(
    steps=250, warmup_steps=12, seq_len=128, balance_rate=1e-2, **_TEXT
)
_IMAGES = ImageRecipe(
    learning_rate=0.02,
    adam_b2=0.999,
    weight_decay=5e-4,
    steps=128,
    warmup_steps=12,
    batch_size=128,
    val_every=32,
    val_batches=None,
    **_DEMO,
)

# A Moonlight of the decoder's width.
_MOONLIGHT = MoonlightConfig(
    vocab_size=256,
    width=128,
    layers=3,
    dense_hidden=384,
    heads=4,
    kv_rank=32,
    nope_dim=32,
    rope_dim=16,
    value_dim=32,
    experts=16,
    experts_per_token=2,
    shared_experts=1,
    expert_hidden=128,
)

DEMOS: dict[str, Config] = {
    "demo": Config(
        recipe=_DECODER,
        model=dense.DenseConfig(
            vocab_size=256, width=128, layers=3, heads=4, fused_qkv=False, scan=False
        ),
        optimizer=COMPARED,
        out=pathlib.Path("runs/demo"),
        measure_every=125,
        measure_batches=2,
        time_optimizer=True,
    ),
    "demo-moe": Config(
        recipe=_MIXTURE,
        model=_MOONLIGHT,
        optimizer=COMPARED,
        out=pathlib.Path("runs/demo-moe"),
        time_optimizer=True,
    ),
    "demo-vision": Config(
        recipe=_IMAGES,
        # An eighth of DavidNet's widths.
        model=davidnet.DavidNetConfig(widths=(8, 16, 32, 64)),
        optimizer=COMPARED,
        out=pathlib.Path("runs/demo-vision"),
        time_optimizer=True,
    ),
}


def find_config(name: str) -> Config:
    """The run of a name.

    Raises:
      UsageError: If there is none.
    """
    if name in DEMOS:
        return DEMOS[name]
    if name not in ROWS:
        known = ", ".join([*DEMOS, *sorted(ROWS)])
        raise UsageError(f"--recipe {name} is unknown. Choose one of: {known}.")
    row = ROWS[name]
    return Config(
        recipe=row.recipe,
        model=MODELS[row.model],
        optimizer=(row.recipe.optimizer,),
        out=pathlib.Path("runs") / name,
    )


def saved_config(facts: Mapping[str, Any], optimizer: str) -> Config:
    """The run that a `config.json` describes, with one of its optimizers.

    What this program does not know any more is left out.

    Args:
      facts: What the file holds.
      optimizer: The one of the optimizers.
    """
    kind = recorded_kind(facts)
    return Config(
        recipe=_filled(kind.recipe, {**facts, "optimizer": optimizer}),
        model=_filled(kind.model, _below(facts, "model.")),
        optimizer=(optimizer,),
        out=pathlib.Path(),
        loss_chunks=facts["loss_chunks"],
    )


def parse(arguments: Sequence[str], prog: str) -> Config:
    """The run of a command line: a recipe's, with the options that are given.

    Raises:
      UsageError: If an option is impossible, or would change nothing.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", default="demo")
    chosen, others = first.parse_known_args(arguments)
    config = tyro.cli(
        Config,
        args=replacing_steps(others),
        prog=prog,
        default=find_config(chosen.recipe),
        config=(tyro.conf.SuppressFixed,),
    )
    for name in config.optimizer:
        find_optimizer(name)
    refuse_useless(others, config)
    return config


def _below(facts: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    named = (name for name in facts if name.startswith(prefix))
    return {name.removeprefix(prefix): facts[name] for name in named}


def _filled(cls: type, values: Mapping[str, Any]) -> Any:
    """A dataclass with those of the values that it has; JSON's lists are tuples here."""
    fields = {field.name for field in dataclasses.fields(cls)}
    taken = {name: value for name, value in values.items() if name in fields}
    return cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in taken.items()})
