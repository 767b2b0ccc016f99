"""A process for each core, which keeps the programs that it has compiled."""

import functools
import multiprocessing
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax

from examples.track0.factories import find_factory
from examples.track0.losses import Losses
from examples.track0.runs import Program, Rates, Run
from examples.track0.workloads import Workload


class Workers:
    """Runs of one entry. Those that its table of losses has are not repeated.

    Args:
      entry: The MODULE:FACTORY.
      workloads: By name.
      losses: The table, to which each run is added as it ends.
      expected: How many runs there will be, of which the time that is left follows.
      processes: How many runs are trained at once.
      said: Takes a line for each run that ends.
    """

    def __init__(
        self,
        entry: str,
        workloads: Mapping[str, Workload],
        losses: Losses,
        expected: int,
        processes: int,
        said: Callable[[str], None],
    ):
        self._entry, self._workloads, self._losses = entry, workloads, losses
        self._said, self._lock = said, threading.Lock()
        context = multiprocessing.get_context("spawn")
        cores = context.Queue()
        for number in range(processes):
            cores.put(number)
        cache = losses.path.parent / "compiled"
        self._pool = ProcessPoolExecutor(processes, context, _begin, (cores, cache))
        self._expected = expected
        self._done, self._began = 0, time.monotonic()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(
        self, name: str, points: Sequence[Rates], seeds: Sequence[int]
    ) -> list[list[Run]]:
        """For all rates, a run of each seed."""
        keys = [[(name, rates, seed) for seed in seeds] for rates in points]
        workload = self._workloads[name]
        waiting = {
            key: self._pool.submit(_run, self._entry, workload, *key[1:])
            for row in keys
            for key in row
            if key not in self._losses
        }
        for (_, rates, seed), future in waiting.items():
            run = future.result()
            with self._lock:
                self._losses.add((name, rates, seed), run)
                self._done += 1
                spent = time.monotonic() - self._began
                left = max(self._expected - self._done, 0) * spent / self._done / 60
                self._said(
                    f"{name}, rates {rates.matrices:g} and {rates.others:g}, seed "
                    f"{seed}: {run.loss:.4f} nats. About {left:.0f} minutes are left."
                )
        return [[self._losses[key] for key in row] for row in keys]


def _begin(cores: Any, cache: pathlib.Path) -> None:
    """Keeps a process to one core, and lets it use what another has compiled."""
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
