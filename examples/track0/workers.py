"""A process for each core, which keeps the programs that it has compiled."""

import contextlib
import functools
import multiprocessing
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax

from examples.track0.factories import find_factory
from examples.track0.losses import Losses, facts_of
from examples.track0.row import Runs
from examples.track0.runs import Program, Rates, Run
from examples.track0.workloads import Workload


@contextlib.contextmanager
def workers(
    entry: str,
    workloads: Mapping[str, Workload],
    table: pathlib.Path,
    expected: int,
    processes: int,
) -> Iterator[Runs]:
    """Trains an entry, a MODULE:FACTORY. A run that its table has is not repeated.

    The time that is left follows from the expected number of runs.
    """
    losses = Losses(table, facts_of(entry, find_factory(entry)))
    began, done, lock = time.monotonic(), 0, threading.Lock()

    def runs(name: str, points: Sequence[Rates], seeds: Sequence[int]) -> list[list[Run]]:
        nonlocal done
        keys = [(rates, seed) for rates in points for seed in seeds]
        waiting = {
            key: pool.submit(_run, entry, workloads[name], *key)
            for key in keys
            if (name, *key) not in losses
        }
        for (rates, seed), future in waiting.items():
            run = future.result()
            with lock:
                losses.add((name, rates, seed), run)
                done += 1
                spent = time.monotonic() - began
                left = max(expected - done, 0) * spent / done / 60
                print(
                    f"{table.stem} on {name}, rates {rates.matrices:g} and "
                    f"{rates.others:g}, seed {seed}: {run.loss:.4f} nats. About "
                    f"{left:.0f} minutes are left for {table.stem}."
                )
        return [[losses[name, rates, seed] for seed in seeds] for rates in points]

    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for number in range(processes):
        cores.put(number)
    given = cores, table.parent / "compiled"
    pool = ProcessPoolExecutor(processes, context, _begin, given)
    try:
        yield runs
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(cores: Any, cache: pathlib.Path) -> None:
    """Keeps a process to one core, and lets it use what another has compiled."""
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()
    number = cores.get()
    if hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {available[number % len(available)]})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1)


@functools.cache
def _program(entry: str, workload: Workload) -> Program:
    return Program(workload, find_factory(entry))


def _run(entry: str, workload: Workload, rates: Rates, seed: int) -> Run:
    return _program(entry, workload).run(rates, seed)
