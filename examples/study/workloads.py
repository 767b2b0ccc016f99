"""What the second study trains: models, their data and how long."""

import dataclasses
from typing import Any

from examples.pretrain.config import Config
from examples.pretrain.errors import UsageError
from examples.pretrain.recipes import DEMOS
from examples.track0.prose import FOLDER

# Of the 16B run: the standard deviation 0.006 of its initial weights over 2048^-1/2.
SMALL_SCALE = 0.27
SMALL_INIT = "-small-init"  # How names of such workloads end.


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data and how long it is trained.

    Attributes:
      config: The trainer's, without learning rates.
      initial_scale: Factor of the initial matrices, whose variance is 1/fan-in.
      first_batch: Examples of the first batch, if it has another size than the others.
    """

    config: Config
    initial_scale: float = 1.0
    first_batch: int | None = None


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
WORKLOADS = {
    f"{name}{init}": Workload(config, scale)
    for name, config in _CONFIGS.items()
    for init, scale in (("", 1.0), (SMALL_INIT, SMALL_SCALE))
}


def _mixture_of(experts: int, **values: Any) -> Config:
    """The small mixture with other experts; a token's have the same size together."""
    # Elsewhere a token has two experts of this width together.
    alone = {"experts_per_token": 1, "expert_hidden": 128} if experts == 1 else {}
    return _sized(_CONFIGS["mixture-small"], experts=experts, **alone, **values)


# The mixture with small initial weights and other experts.
LADDER = {
    1: "experts-1",
    4: "experts-4",
    8: f"mixture-small{SMALL_INIT}",
    16: "experts-16",
    32: "experts-32",
}
WORKLOADS |= {LADDER[n]: Workload(_mixture_of(n), SMALL_SCALE) for n in LADDER if n != 8}
# The conditions of the paper's 16B run.
WORKLOADS["like-16b"] = Workload(
    _mixture_of(16, steps=600, warmup_steps=60, val_every=60, clip=1.0), SMALL_SCALE
)
# Asked for once the results were known: eight times as many tokens for an expert.
WORKLOADS |= {
    f"{name}-first-batch-64": dataclasses.replace(WORKLOADS[name], first_batch=64)
    for name in (LADDER[32], "like-16b")
}
# Longer runs.
WORKLOADS |= {
    f"{name}-{300 * factor}-steps": dataclasses.replace(
        WORKLOADS[name],
        config=_sized(
            WORKLOADS[name].config,
            steps=300 * factor,
            warmup_steps=factor * WORKLOADS[name].config.recipe.warmup_steps,
            val_every=30 * factor,
        ),
    )
    for name in ("dense-small", LADDER[8])
    for factor in (4, 16)
}


def find_workload(name: str) -> Workload:
    """The workload of a name.

    Raises:
      UsageError: If there is none.
    """
    if name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise UsageError(f"--workloads {name} is unknown. Choose of: {known}.")
    return WORKLOADS[name]
