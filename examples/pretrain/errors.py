"""What ends a command with a message instead of a traceback."""


class UsageError(ValueError):
    """Something that the user can put right before the run starts. Exit code 2."""


class RunError(RuntimeError):
    """Something that stops a run on its way, such as a full disk. Exit code 1."""
