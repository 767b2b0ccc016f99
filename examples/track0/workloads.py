"""What is trained: four texts that decide, and images, which stand beside them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from examples.pretrain.config import Config
from examples.pretrain.recipes import DEMOS
from examples.track0.prose import FOLDER


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data and how long it is trained.

    Attributes:
      config: The trainer's, without learning rates.
      initial_scale: Factor of the initial matrices, whose variance is 1/fan-in.
      seeds: Fresh seeds of a row.
      scanned: Whether steps run in a loop of the program. Convolutions in a loop are
        eight times slower on CPUs.
    """

    config: Config
    initial_scale: float = 1.0
    seeds: int = 24
    scanned: bool = True


def _sized(config: Config, recipe: Mapping[str, Any], **sizes: Any) -> Config:
    return dataclasses.replace(
        config,
        recipe=dataclasses.replace(config.recipe, **recipe),
        model=dataclasses.replace(config.model, **sizes),
    )


_TEXT = {"steps": 1200, "warmup_steps": 60, "batch_size": 8, "seq_len": 64}
_IMAGES = {"steps": 256, "warmup_steps": 16, "batch_size": 32}
_CODE = _sized(DEMOS["demo"], _TEXT, width=64, layers=2, heads=2)
_MIXTURE = _sized(
    DEMOS["demo-moe"], _TEXT, width=64, layers=2, heads=2, dense_hidden=192, kv_rank=16,
    experts=8, expert_hidden=64,
)  # fmt: skip
_DRAWINGS = _sized(DEMOS["demo-vision"], _IMAGES, widths=(4, 8, 16, 32))

# The names of the columns. Only the texts decide.
TEXTS = {
    "code": Workload(_CODE),
    "prose": Workload(dataclasses.replace(_CODE, data=(str(FOLDER),))),
    "mixture": Workload(_MIXTURE),
    # 0.27 is the initial standard deviation 0.006 of the paper's 16B run over 2048^-1/2.
    "mixture, small weights": Workload(_MIXTURE, initial_scale=0.27),
}
WORKLOADS = TEXTS | {"images": Workload(_DRAWINGS, seeds=12, scanned=False)}


def shortened(workload: Workload, steps: int, seeds: int) -> Workload:
    """The workload for a smoke run."""
    recipe = dataclasses.replace(
        workload.config.recipe, steps=steps, warmup_steps=steps // 20
    )
    config = dataclasses.replace(workload.config, recipe=recipe)
    return dataclasses.replace(workload, config=config, seeds=seeds)
