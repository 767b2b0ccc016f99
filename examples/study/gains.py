"""The theory's statistics along OrScale's runs at the inherited rate.

    python -m examples.study.gains

writes ``docs/data/gains.csv``; measurements that it holds are not done again.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import tyro

from examples.pretrain.loading import Batches
from examples.pretrain.meshes import in_effect
from examples.pretrain.operation.records import write_csv
from examples.pretrain.setup import State
from examples.pretrain.step import loss_of
from examples.study import theory
from examples.study.arms import ARMS
from examples.study.results import inherited_rate, read_rows
from examples.study.runs import Trainer
from examples.study.search import Rates
from examples.study.theory.curvature import shape_scale
from examples.study.workloads import SEEDS, WORKLOADS
from orscale_jax import diagnostics
from orscale_jax.transforms.stages import Scale

PyTree = Any
BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Gains:
    """A row.

    Attributes:
      workload: Its name.
      seed: Of the run.
      step: After which it was measured.
      kappa: Gain of a step over Muon's, along the step.
      kappa_stderr: Its standard error over batches.
      kappa_eff: The same in the paper's model.
      kappa_eff_stderr: Its standard error.
      nu: ν of r̂√b, heterogeneity (S1).
      rho: ρ, alignment (S2).
    """

    workload: str
    seed: int
    step: int
    kappa: float
    kappa_stderr: float
    kappa_eff: float
    kappa_eff_stderr: float
    nu: float
    rho: float


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure the theory's statistics along OrScale's runs."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    seeds: tuple[int, ...] = SEEDS[:3]
    tables: pathlib.Path = pathlib.Path("docs/data")
    """Folder of the results, from which the inherited rates come."""
    out: pathlib.Path = pathlib.Path("docs/data/gains.csv")


def gains_along(trainer: Trainer, rates: Rates, seed: int) -> Iterator[Gains]:
    """What is measured at a third and at two thirds of a run."""
    steps = trainer.setup.recipe.num_steps
    unseen = batches_after(trainer, seed)
    for step, state, _ in trainer.states(rates, seed):
        if step in (steps // 3, 2 * steps // 3):
            yield Gains(
                trainer.workload.name, seed, step, **_measure(trainer, state, unseen)
            )
        if step == 2 * steps // 3:
            return


def batches_after(trainer: Trainer, seed: int) -> list[PyTree]:
    """Batches that follow on those of the run."""
    setup = trainer.setup
    with in_effect(setup.mesh):
        batches = Batches(trainer.data(seed).train, setup.recipe.batch_size, setup.mesh)
        return [batches[setup.recipe.num_steps + i] for i in range(BATCHES)]


def _measure(trainer: Trainer, state: State, batches: list[PyTree]) -> dict[str, float]:
    params, numbers = state["params"], trainer.setup.weight_dimension_numbers
    reading = diagnostics.read(
        state["opt_state"], params, weight_dimension_numbers=numbers
    )
    loss_fn = loss_along(trainer, state)
    matrices: dict[str, Any] = {"weight_dimension_numbers": numbers}
    along = diagnostics.step_gain(
        loss_fn, params, batches, reading.trust_ratio, **matrices
    )
    found = theory.estimate(loss_fn, params, batches, **matrices)
    verdict = theory.verdict(reading, found, params, **matrices).numbers
    signal, curvature = signal_and_curvature(trainer, found, params)
    model = theory.gain(reading.trust_ratio, signal, curvature)
    return {
        "kappa": float(along.kappa.value),
        "kappa_stderr": float(along.kappa.stderr),
        "kappa_eff": verdict["kappa_eff"],
        "kappa_eff_stderr": verdict["kappa_eff_stderr"],
        "nu": float(model.nu_r),
        "rho": float(model.rho),
    }


def loss_along(trainer: Trainer, state: State) -> Callable[[PyTree, PyTree], jax.Array]:
    """The loss of parameters on a batch; other variables are those of a state."""
    of_all = loss_of(trainer.setup)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        return of_all(params, state["variables"], batch)[0]

    return loss_fn


def signal_and_curvature(
    trainer: Trainer, found: Any, params: PyTree
) -> tuple[PyTree, PyTree]:
    """a and b of the paper's model for each matrix, along Muon+Moonlight's step.

    Args:
      trainer: Of the run.
      found: What `theory.estimate` found.
      params: The parameters at which it was found.
    """
    numbers = trainer.setup.weight_dimension_numbers
    curvature = theory.curvature(found.smoothness.value, params, numbers)
    scale = Scale.of(0.2)
    return (
        shape_scale(found.signal.value, params, numbers, scale, power=1),
        shape_scale(curvature, params, numbers, scale, power=2),
    )


def read_gains(path: pathlib.Path) -> list[Gains]:
    """The rows of the table; none if there is no such file."""
    types = {field.name: field.type for field in dataclasses.fields(Gains)}
    rows = read_rows(path)
    return [Gains(**{k: types[k](v) for k, v in row.items()}) for row in rows]  # type: ignore[operator]


def main(options: Options) -> None:
    found = read_gains(options.out)
    done = {(row.workload, row.seed) for row in found}
    for name in options.workloads:
        workload = WORKLOADS[name]
        rate = inherited_rate(options.tables / f"{name}.csv")
        trainer = Trainer(workload, ARMS["orscale"])
        for seed in options.seeds:
            if (name, seed) in done:
                continue
            for row in gains_along(trainer, Rates(rate, rate), seed):
                found.append(row)
                print(row, flush=True)
            _write(options.out, found)
        jax.clear_caches()  # A process may only map so many pieces of code.


def _write(path: pathlib.Path, rows: list[Gains]) -> None:
    names = [field.name for field in dataclasses.fields(Gains)]
    cells = [
        {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in vars(row).items()}
        for row in rows
    ]
    write_csv(path, names, cells)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
