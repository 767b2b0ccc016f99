"""What optimizers note while they are traced, for an audit that wants to know."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Watch(Generic[Value]):
    """Values of one kind, which go to the innermost watch that is open in this context.

    Args:
      name: What the values are, for the debugger.
    """

    def __init__(self, name: str) -> None:
        """Take no note of anything so far."""
        self._found: ContextVar[list[Value] | None] = ContextVar(name, default=None)

    def note(self, value: Value) -> None:
        """Add a value, if anyone watches."""
        found = self._found.get()
        if found is not None:
            found.append(value)

    @contextlib.contextmanager
    def open(self) -> Iterator[list[Value]]:
        """Collect what is noted inside."""
        found: list[Value] = []
        token = self._found.set(found)
        try:
            yield found
        finally:
            self._found.reset(token)
