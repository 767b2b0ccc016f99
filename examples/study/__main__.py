"""Do the runs of the second protocol: docs/study/study_protocol_2.md.

    python -m examples.study

Runs that the tables hold are not done again: the same command carries on. One process on
one core.
"""

import dataclasses
import os
import pathlib
import time

import jax
import tyro
from rich.console import Console

from examples.pretrain.errors import UsageError
from examples.study.plan import prepare
from examples.study.second import JOBS, Job, do

ALL = "all"


@dataclasses.dataclass(frozen=True)
class Options:
    """Do the runs of the second protocol that are not written down."""

    workloads: tuple[str, ...] = tuple(dict.fromkeys(job.workload for job in JOBS))
    arms: tuple[str, ...] = tuple(dict.fromkeys(job.arm for job in JOBS))
    out: pathlib.Path = pathlib.Path("docs/data/two_rates")
    """Folder of the tables."""


def run(options: Options, console: Console) -> None:
    """Does the jobs in their order.

    Raises:
      RuntimeError: If a search found no end; all others are done nevertheless.
    """
    prepare(options.workloads, options.out)
    wanted = [j for j in JOBS if j.workload in options.workloads if j.arm in options.arms]
    failed = []
    for job in wanted:
        try:
            _report(job, do(job, options.out), console)
        except RuntimeError as error:
            console.print(f"{job.workload} {job.arm}: {error}")
            failed.append(f"{job.workload} {job.arm}")
    prepare(options.workloads, options.out)
    if failed:
        raise RuntimeError(f"These did not come to an end: {', '.join(failed)}.")


def _report(job: Job, new: int, console: Console) -> None:
    if new:
        seconds = time.process_time()
        console.print(
            f"{time.strftime('%F %X')} {job.workload} {job.arm}: {new} new runs, "
            f"{seconds / 3600:.2f} hours of this process so far"
        )
        jax.clear_caches()  # A process may only map so many pieces of code.


def main(options: Options) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")
    run(options, Console())


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
