"""Stopping between two steps instead of in the middle of one."""

import contextlib
import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils

_STDERR = 2  # Its file descriptor.


class Stopped(Exception):
    """The run was asked to stop, and did.

    Attributes:
      signum: The signal that asked.
    """

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


class StopSignal:
    """Notes the first SIGINT (Ctrl-C) or SIGTERM, and says so; a second one acts as ever.

    Of several processes, JAX tells all when one gets a SIGTERM, as a preempted machine
    does, and they stop at the same step.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._alone = jax.process_count() == 1

    def __enter__(self) -> "StopSignal":
        signums = (signal.SIGINT, signal.SIGTERM) if self._alone else ()
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
        self._signum = signum
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _say(
            f"{signal.Signals(signum).name} received: the run stops with a checkpoint as "
            "soon as the current step, and its measurement or validation, is complete. A "
            "second signal ends it at once; the last checkpoint then is an earlier one."
        )


def _say(message: str) -> None:
    """Prints from a signal handler, which may have interrupted another print."""
    with contextlib.suppress(OSError):  # A closed terminal is no reason not to save.
        os.write(_STDERR, f"\n{message}\n".encode())
