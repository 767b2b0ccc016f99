"""Seconds for a step of every arm, in turns.

    python -m examples.study.seconds

writes ``docs/data/seconds.csv``. One thread; nothing else should run.
"""

import csv
import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from examples.pretrain.loading import Batches
from examples.pretrain.meshes import in_effect
from examples.study.arms import ARMS
from examples.study.results import read_rows
from examples.study.runs import Trainer
from examples.study.workloads import WORKLOADS

ROUNDS = 25


@dataclasses.dataclass(frozen=True)
class Options:
    """Time a step of every arm, in turns."""

    workloads: tuple[str, ...] = tuple(n for n in WORKLOADS if "init" not in n)
    out: pathlib.Path = pathlib.Path("docs/data/seconds.csv")


class Stepper:
    """Does one step after another on the same batch.

    Args:
      trainer: What is trained.
    """

    def __init__(self, trainer: Trainer):
        recipe = trainer.setup.recipe
        self._trainer, self._state = trainer, trainer.initial_state(0)
        data, mesh = trainer.data(0).train, trainer.setup.mesh
        with in_effect(mesh):
            self._batch = Batches(data, recipe.batch_size, mesh)[0]
        rate = jnp.float32(recipe.learning_rate)
        self._arguments: Any = (rate, rate, jnp.ones(recipe.num_steps))

    def seconds(self) -> float:
        """Those of one step."""
        began = time.perf_counter()
        step = self._trainer.step(self._state, self._batch, *self._arguments)
        self._state, _ = jax.block_until_ready(step)
        return time.perf_counter() - began


def read_seconds(path: pathlib.Path) -> Mapping[str, Mapping[str, float]]:
    """Seconds of a step by workload and arm; empty if there is no such file."""
    found: dict[str, dict[str, float]] = {}
    for row in read_rows(path):
        found.setdefault(row["workload"], {})[row["arm"]] = float(row["seconds"])
    return found


def main(options: Options) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["workload", "arm", "seconds"])
        for name in options.workloads:
            steppers = {
                arm: Stepper(Trainer(WORKLOADS[name], ARMS[arm]))
                for arm in ARMS
                if ARMS[arm].replays is None
            }
            rounds = [[s.seconds() for s in steppers.values()] for _ in range(ROUNDS)]
            for arm, times in zip(steppers, np.transpose(rounds[1:]), strict=True):
                writer.writerow([name, arm, f"{statistics.median(times):.4g}"])
            file.flush()
            jax.clear_caches()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
