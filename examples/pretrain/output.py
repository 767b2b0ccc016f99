"""What a command prints, for as long as somebody reads it."""

import contextlib
import os
import sys
from typing import Any

from rich.console import Console


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
