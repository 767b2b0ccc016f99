"""Everything that a run with one optimizer tells: files, progress, warnings."""

import contextlib
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from examples.pretrain.config import Config
from examples.pretrain.errors import RunError
from examples.pretrain.operation.processes import is_first
from examples.pretrain.operation.progress import Display
from examples.pretrain.operation.readouts import Readouts
from examples.pretrain.operation.records import Recorder
from examples.pretrain.operation.tensorboard import TensorBoard
from examples.pretrain.operation.throughput import throughput
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.setup import Setup
from examples.pretrain.train import Interval
from orscale_jax import diagnostics


class Logs(contextlib.ExitStack):
    """Writes down what each interval tells; a context manager.

    Args:
      folder: Of the run with one optimizer.
      setup: What is trained.
      start: The step to go on from.
      config: How often readings are taken, and where they go.
      console: Where progress is shown.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        setup: Setup,
        start: int,
        config: Config,
        console: Console,
    ):
        super().__init__()
        self._setup, self._config, self._console = setup, config, console
        self._warned: set[str] = set()
        optimizer = OPTIMIZERS[setup.recipe.optimizer]
        self._readouts = Readouts(folder, setup, start) if optimizer.readable else None
        self._recorder = Recorder(folder, setup, start) if is_first() else None
        self._tensorboard = None
        if config.tensorboard and is_first():
            tensorboard = TensorBoard(folder / "tensorboard")
            self._tensorboard = self.enter_context(tensorboard)
        self._display = self.enter_context(
            Display(console, optimizer.label, start, setup.recipe.num_steps)
        )

    def write(
        self,
        interval: Interval,
        validation: Mapping[str, float],
        to_measure: Sequence[Any],
    ) -> None:
        """Writes an interval down.

        Args:
          interval: Its last step is what readings are of.
          validation: Of its last step; empty if there was none.
          to_measure: Batches to measure on; empty for no measurement.
        """
        step = interval.step
        reading = None
        if self._readouts is not None and (self.due(step) or to_measure):
            reading = self._readouts.record(
                step, interval.state, to_measure, loss=interval.loss
            )
        if self._recorder is None:
            return
        if reading is not None:
            self._warn(step, reading)
        recipe = self._setup.recipe
        examples = recipe.batch_size * len(interval.metrics)
        rate = throughput(self._setup.task, examples, interval.seconds)
        self._recorder.record(interval, validation)
        if self.due(step):
            self._recorder.record_loads(interval)
        self._display.update(step, interval.loss, rate)
        if self._tensorboard is not None:
            self._tensorboard.write(
                step,
                {"train/loss": interval.loss, f"{rate.item}/s": rate.items_per_second}
                | {"grad_norm": interval.metrics[-1]["grad_norm"]}
                | {f"val/{name}": value for name, value in validation.items()}
                | (diagnostics.summarize(reading) if reading is not None else {}),
            )

    def _warn(self, step: int, reading: diagnostics.Reading) -> None:
        """Prints what is wrong in a reading, each problem once."""
        for problem in diagnostics.find_problems(reading):
            if problem.title not in self._warned:
                self._warned.add(problem.title)
                self._console.print(f"Step {step}: {problem}", highlight=False)

    def due(self, step: int) -> bool:
        """Whether a reading is due."""
        return step % self._config.log_every == 0


def check_finite(interval: Interval, last_checkpoint: int | None) -> None:
    """Refuses to go on with what no step can repair.

    Raises:
      RunError: If a loss or a gradient is not finite.
    """
    for step, metrics in enumerate(interval.metrics, start=interval.first_step):
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                raise RunError(
                    f"Step {step}: {name} is {float(metrics[name])}. Nothing was saved "
                    f"since step {last_checkpoint or 0}, from which the same command "
                    "carries on. If it happens again, look at the data of this step, or "
                    "begin anew with another --out and a lower --learning-rate or --clip."
                )
