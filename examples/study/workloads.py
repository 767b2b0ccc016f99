"""What the study trains: three kinds of models, two sizes and two initial scales each."""

import dataclasses
from typing import Any

from examples.pretrain.config import Config
from examples.pretrain.configs import DEMOS

# Of the 16B run: the standard deviation 0.006 of its initial weights over 2048^-1/2.
SMALL_SCALE = 0.27
SEEDS = (0, 1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data and how long it is trained.

    Attributes:
      name: In file names.
      config: The trainer's; its learning rate is where the search begins.
      initial_scale: Factor of the initial matrices, whose variance is 1/fan-in.
    """

    name: str
    config: Config
    initial_scale: float = 1.0


def _sized(demo: str, **changes: Any) -> Config:
    """A demo with other sizes of its model, and other values of its recipe."""
    config = DEMOS[demo]
    fields = {field.name for field in dataclasses.fields(config.recipe)}
    recipe = {name: value for name, value in changes.items() if name in fields}
    sizes = {name: value for name, value in changes.items() if name not in fields}
    return dataclasses.replace(
        config,
        recipe=dataclasses.replace(config.recipe, **recipe),
        model=dataclasses.replace(config.model, **sizes),
    )


_LENGTH = {"steps": 300, "warmup_steps": 15, "val_every": 30}
_CONFIGS = {
    "dense-small": _sized("demo", width=64, layers=2, heads=2, **_LENGTH),
    "dense-large": _sized("demo", width=128, layers=3, heads=4, **_LENGTH),
    "mixture-small": _sized(
        "demo-moe", width=64, layers=2, heads=2, dense_hidden=192, kv_rank=16, experts=8,
        expert_hidden=64, seq_len=64, **_LENGTH,
    ),
    "mixture-large": _sized(
        "demo-moe", width=128, layers=2, experts=8, seq_len=64, **_LENGTH
    ),
    "vision-small": _sized("demo-vision", widths=(4, 8, 16, 32)),
    "vision-large": _sized("demo-vision"),
}  # fmt: skip

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for name, config in _CONFIGS.items()
    for workload in (
        Workload(name, config),
        Workload(f"{name}-small-init", config, SMALL_SCALE),
    )
}
