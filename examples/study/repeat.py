"""Repeat runs of the first study, a process for every core: docs/study/study_protocol.md.

    python -m examples.study.repeat --workloads dense-small --arms orscale

repeats the runs that ``docs/data`` holds and ``runs/study`` does not.
"""

import dataclasses
import multiprocessing
import os
import pathlib
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import jax
import tyro
from rich.console import Console

from examples.pretrain.errors import UsageError
from examples.study.arms import ABLATIONS, ARMS, KNOWN
from examples.study.plan import Runs, find_workload, prepare, table_of
from examples.study.results import inherited_rate, read_results
from examples.study.search import Rates, Settings
from examples.study.workloads import SENSITIVITY, WORKLOADS

Job = tuple[str, tuple[str, ...]]  # A workload and arms, in their order.
Asked = tuple[Rates | Settings, int]  # Learning rates and a seed.


@dataclasses.dataclass(frozen=True)
class Options:
    """Repeat runs of the first study."""

    workloads: tuple[str, ...] = (*WORKLOADS, *SENSITIVITY)
    arms: tuple[str, ...] = (*ARMS, *ABLATIONS)
    tables: pathlib.Path = pathlib.Path("docs/data")
    """Folder of the study's tables."""
    out: pathlib.Path = pathlib.Path("runs/study")
    """Folder of the new ones."""
    processes: int = os.cpu_count() or 1


def jobs_of(options: Options) -> list[Job]:
    """What is repeated together: an arm, and right after it those that replay it."""
    return [
        (workload, (arm, *(a for a in options.arms if KNOWN[a].replays == arm)))
        for workload in options.workloads
        for arm in options.arms
        if KNOWN[arm].replays not in options.arms
    ]


def cells_of(tables: pathlib.Path, workload: str, arm: str) -> list[Asked]:
    """The learning rates and seeds of an arm's runs in the tables."""
    rows = [r for r in read_results(table_of(tables, workload)) if r.arm == arm]
    if KNOWN[arm].shared:
        return [(r.rates, r.seed) for r in rows]
    source = find_workload(workload).rates_of or workload
    adam_rate = inherited_rate(table_of(tables, source))
    return [(Rates(r.rate, adam_rate), r.seed) for r in rows]


def run(options: Options, console: Console) -> None:
    """Repeats the runs that the new tables do not hold."""
    prepare(options.workloads, options.out)
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for number in range(options.processes):
        cores.put(number)
    with ProcessPoolExecutor(options.processes, context, _begin, (cores,)) as pool:
        work = {pool.submit(_do, job, options): job for job in jobs_of(options)}
        for done in as_completed(work):
            workload, arms = work[done]
            name = " ".join([workload, *arms])
            console.print(f"{time.strftime('%X')} {name}: {done.result()} new runs")
    prepare(options.workloads, options.out)


def _begin(cores: Any) -> None:
    """Keeps a process to one core, and lets it use what another has compiled."""
    number = cores.get()
    if hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {available[number % len(available)]})
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")


def _do(job: Job, options: Options) -> int:
    """Repeats the runs of some arms, and counts those that were not written down."""
    workload, arms = job
    new = 0
    for arm in arms:
        runs = Runs(find_workload(workload), arm, options.out)
        for rates, seed in cells_of(options.tables, workload, arm):
            runs.result(rates, seed)
        new += runs.new
    jax.clear_caches()
    return new


if __name__ == "__main__":
    try:
        run(tyro.cli(Options, description=__doc__), Console())
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
