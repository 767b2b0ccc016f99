"""Messages instead of tracebacks, at the end of a command."""

import sys
from collections.abc import Callable

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
