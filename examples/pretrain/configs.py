"""Whole runs by name: the demos, and one for each of the paper's recipes."""

import dataclasses
import pathlib

from examples.pretrain.config import Config, ModelConfig
from examples.pretrain.errors import UsageError
from examples.pretrain.models import dense, moonlight
from examples.pretrain.recipe import Recipe
from examples.pretrain.recipes import RECIPES
from examples.vision import davidnet

# Presets of the recipes' models.
MODELS: dict[str, ModelConfig] = {
    **{name: config for name, config in dense.PRESETS.items() if name != "tiny"},
    "moonlight_16b_a3b": moonlight.PRESETS["moonlight_16b_a3b"],
    "davidnet": davidnet.PRESETS["davidnet"],
}
COMPARED = ("adamw", "muon_moonlight", "orscale")

_TEXT = Recipe(
    model="demo",
    optimizer="orscale",
    learning_rate=4e-3,
    clip=None,
    warmup_steps=25,
    steps=500,
    seq_len=64,
    batch_size=16,
    seed=0,
    val_every=50,
    val_batches=10,
    compute_dtype="float32",
)

# A Moonlight of the same width, and a DavidNet of an eighth.
_MIXTURE = moonlight.MoonlightConfig(
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
_IMAGES = dataclasses.replace(
    _TEXT,
    learning_rate=0.02,
    adam_b2=0.999,
    weight_decay=5e-4,
    warmup_steps=12,
    steps=128,
    seq_len=None,
    batch_size=128,
    val_every=32,
    val_batches=None,
)

DEMOS: dict[str, Config] = {
    "demo": Config(
        recipe=_TEXT,
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
        # The usual balance rate would take thousands of steps.
        recipe=dataclasses.replace(
            _TEXT, steps=250, warmup_steps=12, seq_len=128, balance_rate=1e-2
        ),
        model=_MIXTURE,
        optimizer=COMPARED,
        out=pathlib.Path("runs/demo-moe"),
        time_optimizer=True,
    ),
    "demo-vision": Config(
        recipe=_IMAGES,
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
    if name not in RECIPES:
        known = ", ".join([*DEMOS, *sorted(RECIPES)])
        raise UsageError(f"--recipe {name} is unknown. Choose one of: {known}.")
    recipe = RECIPES[name]
    return Config(
        recipe=recipe,
        model=MODELS[recipe.model],
        optimizer=(recipe.optimizer,),
        out=pathlib.Path("runs") / name,
    )
