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

from examples.study.arms import ABLATIONS, ARMS, SENSITIVE
from examples.study.plan import find_workload, run_arm, table_of
from examples.study.prose import FOLDER, write_prose
from examples.study.results import sort_results
from examples.study.workloads import SEEDS, SENSITIVITY, WORKLOADS

Job = tuple[str, str]  # A workload and an arm.


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
    """What is done: AdamW, whose rates the others inherit, and replays at the end."""
    jobs = [
        (workload, arm)
        for workload in options.workloads
        for arm in arms_of(workload)
        if arm in options.arms
    ]
    stages: list[list[Job]] = [[], [], []]
    for workload, arm in jobs:
        inherits = arm != "adamw" or workload in SENSITIVITY
        replays = inherits and (ARMS | ABLATIONS)[arm].replays is not None
        stages[inherits + replays].append((workload, arm))
    return stages


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
                name = " ".join(work[done])
                console.print(f"{time.strftime('%X')} {name} {error or ''}".rstrip())
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


def _do(job: Job, options: Options) -> None:
    workload, arm = job
    run_arm(find_workload(workload), arm, options.out, options.seeds)
    jax.clear_caches()
