"""What the study trains: models, their data, two sizes and two initial scales."""

import dataclasses
from typing import Any

from examples.pretrain.config import Config
from examples.pretrain.recipes import DEMOS
from examples.study.prose import FOLDER
from examples.study.search import Rates

# Of the 16B run: the standard deviation 0.006 of its initial weights over 2048^-1/2.
SMALL_SCALE = 0.27
SMALL_INIT = "-small-init"  # How names of such workloads end.
SEEDS = (0, 1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data and how long it is trained.

    Attributes:
      name: In file names.
      config: The trainer's; its learning rate is where the search begins.
      initial_scale: Factor of the initial matrices, whose variance is 1/fan-in.
      first_batch: Examples of the first batch, if it has another size than the others.
      rates_of: The workload whose inherited rate this one has, or at whose best rates its
        search begins. Nothing: it has its own, or begins at `FIRST_RATES`.
    """

    name: str
    config: Config
    initial_scale: float = 1.0
    first_batch: int | None = None
    rates_of: str | None = None


def _sized(config: Config, **changes: Any) -> Config:
    """A run with other sizes of its model, and other values of its recipe."""
    fields = {field.name for field in dataclasses.fields(config.recipe)}
    recipe = {name: value for name, value in changes.items() if name in fields}
    sizes = {name: value for name, value in changes.items() if name not in fields}
    return dataclasses.replace(
        config,
        recipe=dataclasses.replace(config.recipe, **recipe),
        model=dataclasses.replace(config.model, **sizes),
    )


_TEXT = {
    "steps": 300, "warmup_steps": 15, "val_every": 30, "batch_size": 8, "seq_len": 64,
}  # fmt: skip
_MIXTURE = {**_TEXT, "layers": 2, "experts": 8}
_IMAGES = {
    "learning_rate": 0.01, "batch_size": 32, "steps": 256, "warmup_steps": 16,
    "val_every": 64,
}  # fmt: skip
_DENSE = _sized(DEMOS["demo"], width=64, layers=2, heads=2, **_TEXT)
_CONFIGS = {
    "dense-small": _DENSE,
    "dense-large": _sized(DEMOS["demo"], width=96, layers=3, heads=3, **_TEXT),
    "prose": dataclasses.replace(_DENSE, data=(str(FOLDER),)),
    "mixture-small": _sized(
        DEMOS["demo-moe"], width=64, heads=2, dense_hidden=192, kv_rank=16,
        expert_hidden=64, **_MIXTURE,
    ),
    "mixture-large": _sized(
        DEMOS["demo-moe"], width=96, heads=3, dense_hidden=288, kv_rank=24,
        expert_hidden=96, **_MIXTURE,
    ),
    "vision-small": _sized(DEMOS["demo-vision"], widths=(4, 8, 16, 32), **_IMAGES),
    "vision-large": _sized(DEMOS["demo-vision"], widths=(6, 12, 24, 48), **_IMAGES),
}  # fmt: skip

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for name, config in _CONFIGS.items()
    for workload in (
        Workload(name, config),
        Workload(f"{name}{SMALL_INIT}", config, SMALL_SCALE),
    )
}


def _varied(name: str, first_batch: int | None = None, **changes: Any) -> Workload:
    """The small decoder with something else, at the rates of the small decoder."""
    config = _sized(_DENSE, **changes)
    return Workload(
        f"dense-small-{name}", config, first_batch=first_batch, rates_of="dense-small"
    )


SENSITIVITY: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _varied("first-batch-1", first_batch=1),
        _varied("first-batch-64", first_batch=64),
        _varied("no-warmup", warmup_steps=0),
        _varied("four-times", steps=1200, warmup_steps=60, val_every=120),
        _varied("no-decay", weight_decay=0.0),
        _varied("more-decay", weight_decay=0.3),
    )
}

# Of the second protocol: where the search begins.
FIRST_RATES = {"text": Rates(0.016, 0.032), "images": Rates(0.01, 0.04)}


def _longer(name: str, factor: int, rates_of: str) -> Workload:
    """A workload with more steps, whose search begins at the best rates of another."""
    base = WORKLOADS[name]
    recipe = base.config.recipe
    config = _sized(
        base.config,
        steps=factor * 300,
        warmup_steps=factor * recipe.warmup_steps,
        val_every=factor * 30,
    )
    name = f"{name}-{config.recipe.steps}-steps"
    return dataclasses.replace(base, name=name, config=config, rates_of=rates_of)


def _mixture_of(experts: int) -> Workload:
    """The small mixture with other experts; a token's have the same size together."""
    base = WORKLOADS[f"mixture-small{SMALL_INIT}"]
    # Elsewhere a token has two experts of this width together.
    alone = {"experts_per_token": 1, "expert_hidden": 128} if experts == 1 else {}
    config = _sized(base.config, experts=experts, **alone)
    return dataclasses.replace(base, name=f"experts-{experts}", config=config)


def _like_the_16b_run() -> Workload:
    """16 experts, clipped gradients, twice the steps, a tenth of them for the warm-up."""
    base = _mixture_of(16)
    config = _sized(base.config, steps=600, warmup_steps=60, val_every=60, clip=1.0)
    return dataclasses.replace(base, name="like-16b", config=config)


LONG = ("dense-small", f"mixture-small{SMALL_INIT}")
LADDER = {
    1: "experts-1",
    4: "experts-4",
    8: f"mixture-small{SMALL_INIT}",
    16: "experts-16",
    32: "experts-32",
}
SECOND: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        *(_mixture_of(experts) for experts in (1, 4, 16, 32)),
        _like_the_16b_run(),
        *(_longer(name, 4, rates_of=name) for name in LONG),
        *(_longer(name, 16, rates_of=f"{name}-1200-steps") for name in LONG),
    )
}

# After the second protocol, two of its workloads with a first batch of eight times the
# size: c is not set at so few tokens for an expert.
FIRST_BATCH: dict[str, Workload] = {
    f"{name}-first-batch-64": dataclasses.replace(
        SECOND[name], name=f"{name}-first-batch-64", first_batch=64, rates_of=name
    )
    for name in ("experts-32", "like-16b")
}

# Of the third protocol: c is set at 128 sequences where it does not say otherwise, and
# 800 windows validate, once.
EXPERTS = (1, 4, 16, 32)
INITS = ("", SMALL_INIT)


def _rung(experts: int, init: str, few: bool) -> Workload:
    """A rung of the ladder; ``few``: a first batch like the others, 8 sequences."""
    name = f"ladder-{experts}{init}{'-first-batch-8' if few else ''}"
    base = _mixture_of(experts)
    config = _sized(base.config, val_every=300, val_batches=100)
    scale, first = SMALL_SCALE if init else 1.0, None if few else 128
    return Workload(name, config, scale, first)


def _recorded(init: str, **values: Any) -> Workload:
    """The small decoder with what runs of the paper's repository had."""
    config = _sized(_DENSE, val_every=300, val_batches=100, **values)
    ends = "".join(f"-{value}" for value in values.values())
    scale = SMALL_SCALE if init else 1.0
    return Workload(f"dense-small{init}-800-windows{ends}", config, scale, 128)


THIRD: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        *(_rung(n, init, few=False) for n in EXPERTS for init in INITS),
        *(_rung(n, init, few=True) for n in EXPERTS[1:] for init in INITS),
        *(
            _recorded(init, **values)
            for init in INITS
            for values in ({}, {"adam_b2": 0.999})
        ),
    )
}

# Their weights are bfloat16; activations, products and sums stay float32.
BFLOAT16 = "-bfloat16"
LOW_MEMORY: dict[str, Workload] = {
    f"{name}{BFLOAT16}": Workload(
        f"{name}{BFLOAT16}", _sized(_CONFIGS[name], param_dtype="bfloat16")
    )
    for name in ("dense-small", "prose", "mixture-small")
}

# Each head of attention is a matrix.
BY_HEAD = "-per-head"
PER_HEAD: dict[str, Workload] = {
    f"{name}{BY_HEAD}": Workload(
        f"{name}{BY_HEAD}", _sized(_CONFIGS[name], per_head=True)
    )
    for name in ("dense-small", "dense-large", "mixture-small")
}
KNOWN_WORKLOADS = (
    WORKLOADS | SENSITIVITY | SECOND | FIRST_BATCH | THIRD | LOW_MEMORY | PER_HEAD
)
