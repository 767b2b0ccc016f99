"""A progress bar on a terminal, a line now and then elsewhere."""

import datetime
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from examples.pretrain.operation.throughput import Throughput

SECONDS_BETWEEN_LINES = 15.0


class Display:
    """Shows how far the training with one optimizer has come; a context manager.

    Args:
      console: Where to.
      label: The optimizer's name.
      start: The step to go on from.
      steps: The step to end at.
    """

    def __init__(self, console: Console, label: str, start: int, steps: int):
        self._console, self._label = console, label
        self._start, self._steps = start, steps
        self._bar = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[reading]:<40}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            label, total=steps, completed=start, reading="compiling"
        )
        self._began = self._said = time.monotonic()

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float, throughput: Throughput) -> None:
        """Shows a reading."""
        reading = f"loss {loss:.3f}  {throughput}"
        self._bar.update(self._task, completed=step, reading=reading)
        now = time.monotonic()
        late = now - self._said > SECONDS_BETWEEN_LINES or step == self._steps
        if late and not self._console.is_terminal:
            self._said = now
            left = (now - self._began) / (step - self._start) * (self._steps - step)
            self._console.print(
                f"{self._label:<14} step {step}/{self._steps}  {reading}  "
                f"{datetime.timedelta(seconds=round(left))} left",
                highlight=False,
            )
