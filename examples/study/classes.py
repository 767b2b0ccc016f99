"""Ratios by class of layers beside those that the paper's model would choose.

    python -m examples.study.classes

writes ``docs/data/two_rates/classes.csv``, once the searches for the best rates are done;
measurements that it holds are not done again. What for: docs/study/study_protocol_2.md.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tyro

from examples.pretrain.operation.records import write_csv
from examples.pretrain.setup import State
from examples.study.arms import KNOWN
from examples.study.gains import batches_after, loss_along, signal_and_curvature
from examples.study.plan import find_workload
from examples.study.results import read_rows
from examples.study.runs import Trainer
from examples.study.search import Rates
from examples.study.second import SEEDS, best_rates, job_of
from examples.study.theory import estimate
from examples.study.workloads import SMALL_INIT
from orscale_jax import diagnostics

PyTree = Any
Row = dict[str, str]
FIELDS = ("workload", "arm", "seed", "step", "class", "ratio", "optimum")
WORKLOADS = tuple(
    f"{name}{init}"
    for name in ("dense-small", "mixture-small")
    for init in ("", SMALL_INIT)
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure the ratios that the model would choose, by class of layers."""

    workloads: tuple[str, ...] = WORKLOADS
    arms: tuple[str, ...] = ("muon_moonlight", "orscale")
    seeds: tuple[int, ...] = SEEDS[:2]
    tables: pathlib.Path = pathlib.Path("docs/data/two_rates")
    """Folder of the results, from which the best rates come."""


def along(trainer: Trainer, rates: Rates, seed: int) -> Iterator[tuple[int, Row]]:
    """A step and a class, at a third and at two thirds of a run."""
    steps = trainer.setup.recipe.num_steps
    batches = batches_after(trainer, seed)
    for step, state, reading in trainer.states(rates, seed):
        if step in (steps // 3, 2 * steps // 3):
            ratios = jax.device_get(reading.get("class_ratio", {}))
            for name, optimum in _optima(trainer, state, batches).items():
                ratio = float(ratios.get(name, 1.0))
                yield step, {
                    "class": name, "ratio": f"{ratio:.4g}", "optimum": f"{optimum:.4g}",
                }  # fmt: skip
        if step == 2 * steps // 3:
            return


def _optima(trainer: Trainer, state: State, batches: list[PyTree]) -> dict[str, float]:
    """The mean of r* of each class, where r* ∝ a/b has mean 1 over all matrices."""
    params, numbers = state["params"], trainer.setup.weight_dimension_numbers
    found = estimate(
        loss_along(trainer, state), params, batches, weight_dimension_numbers=numbers
    )
    signal, curvature = signal_and_curvature(trainer, found, params)
    classes = diagnostics.layer_classes(params)
    optima: dict[str, list[np.ndarray]] = {}

    def collect(name: str, a: jax.Array | None, b: jax.Array | None) -> None:
        if a is not None:
            optima.setdefault(name, []).append(np.ravel(np.asarray(a) / np.asarray(b)))

    jax.tree.map(collect, classes, signal, curvature)
    return class_means({name: np.concatenate(parts) for name, parts in optima.items()})


def class_means(ratios: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The geometric mean of each class, over that of all; matrices without one left out.

    Where the curvature is negative, the model has no optimum.
    """
    logs = {name: np.log(x[np.isfinite(x) & (x > 0)]) for name, x in ratios.items()}
    logs = {name: x for name, x in logs.items() if x.size}
    middle = np.mean(np.concatenate(list(logs.values())))
    return {name: float(np.exp(np.mean(x) - middle)) for name, x in logs.items()}


def main(options: Options) -> None:
    path = options.tables / "classes.csv"
    rows = read_rows(path)
    done = {(row["workload"], row["arm"], int(row["seed"])) for row in rows}
    for name in options.workloads:
        for arm in options.arms:
            rates = best_rates(job_of(name, arm), options.tables)
            trainer = Trainer(find_workload(name), KNOWN[arm])
            for seed in options.seeds:
                if (name, arm, seed) not in done:
                    of_run = {"workload": name, "arm": arm, "seed": str(seed)}
                    for step, row in along(trainer, rates, seed):
                        rows.append(of_run | {"step": str(step)} | row)
                    write_csv(path, FIELDS, rows)
            jax.clear_caches()  # A process may only map so many pieces of code.


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
