"""What comes to a process from outside: a cluster, signals, files that fail."""

import contextlib
import errno
import os
import pathlib
import re
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from examples.pretrain.errors import AGAIN, RunError, UsageError
from examples.pretrain.output import say

# Seconds for which a process waits for the others: to start, and once it has failed.
JOINING = 240
PATIENCE = 10
# What the system answers where it does not let a program write.
_NOT_WRITTEN = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM,
    errno.EIO,
}  # fmt: skip
_CODE_OF_TENSORSTORE = re.compile(r"os_error_code='(\d+)'")


def join_cluster() -> None:
    """Joins the other processes of the run.

    Slurm, Open MPI, Kubernetes and Cloud TPUs are found by themselves. Elsewhere
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say it. If one of them
    does not come, the process says so and ends; JAX would print addresses of functions.
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
    of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return jax.process_count() > 1 and (of_jax or "Gloo" in str(error))


class Stopped(Exception):
    """The run was asked to stop by a signal, and did."""

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


class StopSignal:
    """Notes the first signal that asks to stop, and says so; a second one acts as ever.

    These are SIGINT (Ctrl-C), SIGHUP (a closed terminal) and SIGTERM. The run then stops
    between two steps. Of several processes, JAX tells all when one gets a SIGTERM, as a
    preempted machine does, and they stop at the same step.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._alone = jax.process_count() == 1

    def __enter__(self) -> "StopSignal":
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signums = [signal.SIGINT, *[signal.SIGHUP] * (not nohup)]
        signums += [signal.SIGTERM] * self._alone
        self._previous = {signum: signal.signal(signum, self._note) for signum in signums}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def requested(self, step: int) -> bool:
        """Whether to stop after so many steps; processes ask at every step."""
        if not self._alone and multihost_utils.reached_preemption_sync_point(step):
            self._signum = signal.SIGTERM
        return self._signum is not None

    @property
    def noted(self) -> bool:
        """Whether a signal has come."""
        return self._signum is not None

    def check(self, message: str) -> None:
        """Raises :class:`Stopped` with the message if a signal has come."""
        if self._signum is not None:
            raise Stopped(message, self._signum)

    def _note(self, signum: int, _: FrameType | None) -> None:
        for each in self._previous:
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # A terminal may send two.
        say(
            f"\n{signal.Signals(signum).name} received: the run stops with a checkpoint "
            "as soon as the current step, and its measurement or validation, is "
            "complete. A second signal ends it at once; the last checkpoint then is an "
            "earlier one.\n"
        )
        if self._alone:
            self._signum = signum
        else:
            signal.raise_signal(signal.SIGTERM)  # JAX tells the others.


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """Names the folder and the cause where a file cannot be written."""
    try:
        yield
    except (RunError, UsageError):
        raise
    except Exception as error:
        cause = why_not_written(error)
        if cause is None:
            raise
        raise RunError(f"{folder} cannot be written to: {cause}.\n{AGAIN}") from error


def why_not_written(error: BaseException) -> str | None:
    """The system's words, such as "No space left on device", if they are behind an error.

    The operating system's own error may be the cause of the error, or a part of a group,
    and TensorStore only quotes it.
    """
    quoted = _CODE_OF_TENSORSTORE.search(str(error))
    code, file = (int(quoted[1]) if quoted else None), None
    if isinstance(error, OSError):
        code, file = error.errno, error.filename
    if code in _NOT_WRITTEN:
        return os.strerror(code) + (f": {file}" if file else "")
    grouped = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    origins = (*grouped, error.__cause__ or error.__context__)
    causes = (why_not_written(origin) for origin in origins if origin is not None)
    return next((cause for cause in causes if cause is not None), None)
