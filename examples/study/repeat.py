"""Repeat a part of the study, with a process for every core, and compare.

    python -m examples.study.repeat

repeats the second protocol's runs of OrScale and Muon+Moonlight on a dense model and on a
mixture, at the rates that its searches found, and writes them to ``runs/study``. Runs
that are there are not done again. Losses are equal to the last digit only on a like
processor; compare the intervals.
"""

import dataclasses
import multiprocessing
import os
import pathlib
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import tyro

from examples.pretrain.errors import UsageError
from examples.pretrain.optimizers import OPTIMIZERS
from examples.study.contrasts import DATA, REFERENCE, SEEDS, confirmed
from examples.study.results import Runs, prepare, read_results
from examples.study.statistics import interval, markdown, paired

TABLES = DATA / "two_rates"


@dataclasses.dataclass(frozen=True)
class Options:
    """Repeat runs of the second protocol."""

    workloads: tuple[str, ...] = ("dense-small", "mixture-small-small-init")
    arms: tuple[str, ...] = ("orscale",)
    """Each is compared with Muon+Moonlight."""
    out: pathlib.Path = pathlib.Path("runs/study")
    """Folder of the new tables."""
    processes: int = os.cpu_count() or 1


def repeat(workload: str, arm: str, out: pathlib.Path) -> dict[int, float]:
    """The losses of an arm's runs in the study's table, done again."""
    losses = confirmed(f"two_rates/{workload}", arm)
    [settings] = {
        row.settings
        for row in read_results(TABLES / f"{workload}.csv")
        if row.arm == arm and losses.get(row.seed) == row.loss
    }
    return Runs(workload, arm, out).losses(settings, SEEDS)


def _begin(cores: Any) -> None:
    """Keeps a process to one core, and lets it use what another has compiled."""
    number = cores.get()
    if hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {available[number % len(available)]})
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")


def run(options: Options) -> str:
    """Repeats the runs; a table of old and new differences from Muon+Moonlight."""
    prepare(options.workloads, options.out)
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
    prepare(options.workloads, options.out)
    rows = []
    for workload in options.workloads:
        for arm in options.arms:
            pairs = [(workload, arm), (workload, REFERENCE)]
            table = [confirmed(f"two_rates/{name}", x) for name, x in pairs]
            new = [again[pair] for pair in pairs]
            equal = sum(a == b for x, y in zip(table, new, strict=True)
                        for a, b in zip(x.values(), y.values(), strict=True))  # fmt: skip
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
