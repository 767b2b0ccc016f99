"""Stopping between two steps instead of in the middle of one."""

import signal
from types import FrameType


class Stopped(Exception):
    """The run was asked to stop, and did.

    Attributes:
      signum: The signal that asked.
    """

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


class StopSignal:
    """Notes the first SIGINT (Ctrl-C) or SIGTERM; a second one acts as it always does."""

    def __init__(self) -> None:
        self._signum: int | None = None

    def __enter__(self) -> "StopSignal":
        self._previous = {
            signum: signal.signal(signum, self._note)
            for signum in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @property
    def requested(self) -> bool:
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
