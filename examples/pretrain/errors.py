"""What a command says: its output, and messages instead of tracebacks at its end."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

AGAIN = "Rerun the same command to resume from the last checkpoint."


class UsageError(ValueError):
    """Something that the user can put right before the run starts. Exit code 2."""


class RunError(RuntimeError):
    """Something that stops a run on its way, such as a full disk. Exit code 1."""


def exit_code_of(command: Callable[[], None]) -> int:
    """Runs a command, and gives its exit code; on these errors, it says what they say."""
    try:
        command()
    except (UsageError, RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


class Output(Console):
    """Prints what it is given, names with brackets too, for as long as somebody reads."""

    def __init__(self, **options: Any):
        as_it_is: dict[str, Any] = dict.fromkeys(("markup", "emoji", "highlight"), False)
        super().__init__(soft_wrap=True, **as_it_is, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """The same, but for a closed pipe or a full disk, which must not end a run."""
        try:
            super().print(*objects, **options)
        except (OSError, SystemExit):  # rich ends the program at a closed pipe.
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            say("The output cannot be written any more. The run goes on without it.\n")


def say(text: str) -> None:
    """Writes to the standard error, also from within another print, if that is open."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
