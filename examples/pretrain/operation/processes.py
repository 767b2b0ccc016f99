"""One process or many: joining a cluster, and what only the first process does."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from examples.pretrain.errors import UsageError

# Seconds for which a process waits for the others: to start, and once it has failed.
JOINING = 240
PATIENCE = 10


def join_cluster() -> None:
    """Joins the other processes of the run.

    Slurm, Open MPI, Kubernetes and Cloud TPUs are found by themselves. Elsewhere
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say it.

    If one of them does not come, the process says so and ends. JAX would abort it, with
    nothing but the addresses of functions.

    Raises:
      UsageError: If nothing says which processes belong together.
    """
    number, index = (
        os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    )
    late = _end_after(
        JOINING,
        f"error: --distributed: not all processes have come within {JOINING} s. Look at "
        "the messages of the others, and start all of them again.",
    )
    try:
        jax.distributed.initialize(
            num_processes=None if number is None else int(number),
            process_id=None if index is None else int(index),
            initialization_timeout=2 * JOINING,
        )
    except ValueError as error:
        raise UsageError(
            f"--distributed: {error} Start this from Slurm, Open MPI, Kubernetes or a "
            "TPU pod, or set JAX_COORDINATOR_ADDRESS (host:port of the first process), "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from error
    finally:
        late.cancel()


@contextlib.contextmanager
def leaving_in_time() -> Iterator[None]:
    """Ends the process soon after a failure, even if the others never come.

    At its end JAX waits minutes for all processes, and they may be waiting for this one.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code and jax.distributed.is_initialized():
            sys.stdout.flush()
            _end_after(PATIENCE, code=code)
        raise


def _end_after(seconds: float, message: str = "", code: Any = 1) -> threading.Timer:
    """Ends the process then, whatever it is waiting for, unless this is cancelled."""

    def end() -> None:
        if message:
            print(message, file=sys.stderr, flush=True)
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def is_first() -> bool:
    """Whether this process writes files and messages for all."""
    return jax.process_index() == 0


def others_are_gone(error: BaseException) -> bool:
    """Whether an error may come from a process that has ended."""
    several = jax.process_count() > 1
    return several and isinstance(error, jax.errors.JaxRuntimeError)


def everywhere(here: bool) -> bool:
    """Whether something is true in all processes, which all have to ask."""
    if jax.process_count() == 1:
        return here
    return bool(multihost_utils.process_allgather(here).all())


def barrier(name: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
