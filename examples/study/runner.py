"""All runs of the study, with a process for every core."""

import dataclasses
import multiprocessing
import os
import pathlib
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import jax
from rich.console import Console

from examples.study.arms import ABLATIONS, ARMS, KNOWN, SENSITIVE
from examples.study.plan import find_workload, run_arm, table_of
from examples.study.prose import FOLDER, write_prose
from examples.study.results import read_results, sort_results
from examples.study.workloads import SEEDS, SENSITIVITY, WORKLOADS

Job = tuple[str, tuple[str, ...]]  # A workload and arms, in their order.


@dataclasses.dataclass(frozen=True)
class Options:
    """Do the runs of the study that are not written down."""

    workloads: tuple[str, ...] = (*WORKLOADS, *SENSITIVITY)
    arms: tuple[str, ...] = (*ARMS, *ABLATIONS)
    seeds: tuple[int, ...] = SEEDS
    """The first one is that of the search for rates."""
    out: pathlib.Path = pathlib.Path("docs/data")
    """Folder of the tables."""
    processes: int = os.cpu_count() or 1


def stages_of(options: Options) -> list[list[Job]]:
    """What is done: first AdamW, whose rates the others inherit.

    An arm that replays another is done right after it.
    """
    jobs = [
        (workload, (arm, *replays_of(arm, options)))
        for workload in options.workloads
        for arm in arms_of(workload)
        if arm in options.arms and KNOWN[arm].replays not in options.arms
    ]
    first = [job for job in jobs if job[1] == ("adamw",) and job[0] not in SENSITIVITY]
    return [first, [job for job in jobs if job not in first]]


def replays_of(arm: str, options: Options) -> list[str]:
    """The arms to run that replay this one."""
    return [name for name in options.arms if KNOWN[name].replays == arm]


def arms_of(workload: str) -> Sequence[str]:
    """The arms of a workload."""
    if workload in SENSITIVITY:
        return SENSITIVE
    if workload == "dense-small":
        return (*ARMS, *ABLATIONS)
    if workload == "dense-large":
        return (*ARMS, "bfloat16_calibration", "unclipped")
    return tuple(ARMS)


def run(options: Options, console: Console) -> None:
    """Does the runs that are not written down.

    Raises:
      RuntimeError: If an arm found no best rate; all others are done nevertheless.
    """
    tables = [table_of(options.out, name) for name in options.workloads]
    if any(str(FOLDER) in find_workload(name).config.data for name in options.workloads):
        write_prose()
    for table in tables:
        sort_results(table)
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for number in range(options.processes):
        cores.put(number)
    failed = []
    with ProcessPoolExecutor(options.processes, context, _begin, (cores,)) as pool:
        for stage in stages_of(options):
            work = {pool.submit(_do, job, options): job for job in stage}
            for done in as_completed(work):
                error = done.exception()
                workload, arms = work[done]
                name = " ".join([workload, *arms])
                found = error or f"{done.result()} new runs"
                console.print(f"{time.strftime('%X')} {name}: {found}")
                if error is not None:
                    failed.append(name)
    for table in tables:
        sort_results(table)
    if failed:
        raise RuntimeError(f"These did not come to an end: {', '.join(failed)}.")


def _begin(cores: Any) -> None:
    """Keeps a process to one core, and lets it use what another has compiled."""
    number = cores.get()
    if hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {available[number % len(available)]})
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")


def _do(job: Job, options: Options) -> int:
    """Does the runs of some arms, and counts those that were not written down."""
    workload, arms = job
    table = table_of(options.out, workload)
    before = _number_of_runs(table, arms)
    for arm in arms:
        if arm in arms_of(workload):
            run_arm(find_workload(workload), arm, options.out, options.seeds)
    jax.clear_caches()
    return _number_of_runs(table, arms) - before


def _number_of_runs(table: pathlib.Path, arms: Sequence[str]) -> int:
    return sum(result.arm in arms for result in read_results(table))
