"""Repeat a part of the study, with a process for every core, and compare.

    python -m examples.study.repeat

repeats the second study's runs of OrScale and Muon+Moonlight on a dense model and on a
mixture, at the rates that its searches found, and writes their losses to ``runs/study``.
Runs that are there are not done again. Losses are equal to the last digit only on a like
processor; compare the intervals.
"""

import csv
import dataclasses
import multiprocessing
import os
import pathlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import numpy as np
import tyro
from flax import nnx

from examples.pretrain.config import Config
from examples.pretrain.errors import UsageError
from examples.pretrain.loading import Batches
from examples.pretrain.meshes import in_effect, make_mesh
from examples.pretrain.optimizers import OPTIMIZERS, find_optimizer
from examples.pretrain.setup import Setup, State, set_up, split
from examples.pretrain.step import make_train_step
from examples.pretrain.task import Data
from examples.pretrain.tasks import make_task, read_data
from examples.pretrain.train import evaluation
from examples.study.contrasts import REFERENCE, SEEDS, confirmed, losses_of
from examples.study.statistics import interval, markdown, paired
from examples.study.workloads import Workload, find_workload
from examples.track0.prose import FOLDER, write_prose


@dataclasses.dataclass(frozen=True)
class Options:
    """Repeat runs of the second study."""

    workloads: tuple[str, ...] = ("dense-small", "mixture-small-small-init")
    arms: tuple[str, ...] = ("orscale",)
    """Optimizers, each of which is compared with Muon+Moonlight."""
    out: pathlib.Path = pathlib.Path("runs/study")
    """Folder of the new losses."""
    processes: int = os.cpu_count() or 1


def train(
    workload: Workload, arm: str, rates: tuple[float, ...], seeds: Iterable[int]
) -> Iterator[tuple[int, float]]:
    """Trains an optimizer once for each seed, and yields the seed and its final loss.

    The loss is the last validation loss in nats, at most that of a uniform guess. The
    rates are those of the matrices and of AdamW's parameters.
    """
    config = workload.config
    recipe = dataclasses.replace(
        config.recipe_of(arm), rates="shared", learning_rate=rates[0]
    )
    if find_optimizer(arm).has_matrices:
        recipe = dataclasses.replace(recipe, adam_learning_rate=rates[1])
    setup = set_up(make_task(config), recipe, make_mesh(config.mesh, jax.devices()[:1]))
    step = jax.jit(make_train_step(setup, 1), donate_argnums=0)
    # All seeds are validated on the same examples.
    evaluate = evaluation(setup, _data(config, 0), recipe.batch_size)
    sizes: Any = config.model
    guess = np.log(sizes.classes if hasattr(sizes, "classes") else sizes.vocab_size)
    with in_effect(setup.mesh):
        for seed in seeds:
            state = initial_state(setup, seed, workload.initial_scale)
            examples, first = _data(config, seed).train, workload.first_batch
            batches = Batches(examples, recipe.batch_size, setup.mesh)
            if first is not None:
                state, _ = step(state, Batches(examples, first, setup.mesh)[0])
            done = 0 if first is None else 1
            for batch in batches.read_ahead(done, recipe.steps):
                state, _ = step(state, batch)
            loss = evaluate(state)["loss"]
            yield seed, round(float(loss if loss <= guess else guess), 5)


def initial_state(setup: Setup, seed: int, scale: float) -> State:
    """The state before the first step, with the initial matrices times a scale."""

    @jax.jit
    def make(key: jax.Array) -> State:
        params, variables = split(setup.task.create(nnx.Rngs(key)))
        params = jax.tree.map(
            lambda p, numbers: p if numbers is None else p * scale,
            *(params, setup.weight_dimension_numbers(params)),
            is_leaf=lambda x: x is None,
        )
        opt_state = setup.optimizer.init(params)
        return {"params": params, "variables": variables, "opt_state": opt_state}

    return make(jax.random.key(seed))


def _data(config: Config, seed: int) -> Data:
    recipe = dataclasses.replace(config.recipe, seed=seed)
    return read_data(dataclasses.replace(config, recipe=recipe))


def repeat(workload: str, arm: str, out: pathlib.Path) -> dict[int, float]:
    """The losses of an arm's runs in the study's table, done again, by seed."""
    known = confirmed(f"two_rates/{workload}", arm)
    by_rates = losses_of(f"two_rates/{workload}", arm)
    [rates] = [x for x, losses in by_rates.items() if known.items() <= losses.items()]
    path = out / f"{workload}-{arm}.csv"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {int(seed): float(loss) for seed, loss in csv.reader(lines)}
    missing = [seed for seed in SEEDS if seed not in found]
    runs = train(find_workload(workload), arm, rates, missing) if missing else ()
    for seed, loss in runs:
        found[seed] = loss
        with path.open("a") as file:
            file.write(f"{seed},{loss}\n")
    return {seed: found[seed] for seed in SEEDS}


def _begin(cores: Any) -> None:
    """Keeps a process to one core, and lets it use what another has compiled."""
    number = cores.get()
    if hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {available[number % len(available)]})
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")


def run(options: Options) -> str:
    """Repeats the runs; a table of old and new differences from Muon+Moonlight."""
    for workload in options.workloads:
        if str(FOLDER) in find_workload(workload).config.data:
            write_prose()
        for arm in options.arms:
            find_optimizer(arm)
            if not losses_of(f"two_rates/{workload}", arm):
                raise UsageError(f"--arms {arm} was not run on {workload}: leave it out.")
    options.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for number in range(options.processes):
        cores.put(number)
    cells = [
        (workload, arm)
        for workload in reversed(options.workloads)
        for arm in (REFERENCE, *options.arms)
    ]
    with ProcessPoolExecutor(options.processes, context, _begin, (cores,)) as pool:
        found = {cell: pool.submit(repeat, *cell, options.out) for cell in cells}
        again = {cell: done.result() for cell, done in found.items()}
    rows = []
    for workload in options.workloads:
        for arm in options.arms:
            pairs = [(workload, arm), (workload, REFERENCE)]
            table = [confirmed(f"two_rates/{name}", x) for name, x in pairs]
            new = [again[pair] for pair in pairs]
            equal = sum(x[seed] == y[seed] for x, y in zip(table, new, strict=True)
                        for seed in SEEDS)  # fmt: skip
            label = f"{OPTIMIZERS[arm].label} − {OPTIMIZERS[REFERENCE].label}"
            told = [str(interval(paired(*losses))) for losses in (table, new)]
            rows.append([f"`{workload}`", label, *told, f"{equal} of {2 * len(SEEDS)}"])
    heading = ["workload", "difference", "in docs/data", "again", "equal losses"]
    return markdown(heading, rows, left=2)


if __name__ == "__main__":
    try:
        print(run(tyro.cli(Options, description=__doc__)))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
