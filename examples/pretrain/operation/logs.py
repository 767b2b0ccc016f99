"""Everything that a run with one optimizer tells: files, progress, warnings."""

import contextlib
import dataclasses
import datetime
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from examples.pretrain.config import Config
from examples.pretrain.errors import RunError
from examples.pretrain.operation.peaks import peak_flops
from examples.pretrain.operation.processes import is_first
from examples.pretrain.operation.records import Readouts, Recorder, TensorBoard
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.setup import Setup
from examples.pretrain.task import Task
from examples.pretrain.train import Interval
from orscale_jax import diagnostics

SECONDS_BETWEEN_LINES = 15.0


class Logs(contextlib.ExitStack):
    """Writes down and shows what each interval tells; a context manager.

    On a terminal there is a progress bar, elsewhere a line now and then.
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
        self._label, self._start = optimizer.label, start
        bar = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[reading]:<40}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        steps = setup.recipe.num_steps
        self._bar = self.enter_context(bar)
        self._shown = bar.add_task(
            optimizer.label, total=steps, completed=start, reading="compiling"
        )
        self._began = self._said = time.monotonic()

    def write(
        self,
        interval: Interval,
        validation: Mapping[str, float],
        to_measure: Sequence[Any],
    ) -> None:
        """Writes an interval down; readings and the validation are of its last step."""
        step, due = interval.step, interval.step % self._config.log_every == 0
        reading = None
        if self._readouts is not None and (due or to_measure):
            reading = self._readouts.record(
                step, interval.state, to_measure, loss=interval.loss
            )
        if self._recorder is None:
            return
        if reading is not None:
            for problem in diagnostics.find_problems(reading):
                if problem.title not in self._warned:  # Once each.
                    self._warned.add(problem.title)
                    self._console.print(f"Step {step}: {problem}", highlight=False)
        examples = self._setup.recipe.batch_size * len(interval.metrics)
        rate = throughput(self._setup.task, examples, interval.seconds)
        self._recorder.record(interval, validation)
        if due:
            self._recorder.record_loads(interval)
        steps, now = self._setup.recipe.num_steps, time.monotonic()
        shown = f"loss {interval.loss:.3f}  {rate}"
        self._bar.update(self._shown, completed=step, reading=shown)
        late = now - self._said > SECONDS_BETWEEN_LINES or step == steps
        if late and not self._console.is_terminal:
            self._said = now
            left = (now - self._began) / (step - self._start) * (steps - step)
            self._console.print(
                f"{self._label:<14} step {step}/{steps}  {shown}  "
                f"{datetime.timedelta(seconds=round(left))} left",
                highlight=False,
            )
        if self._tensorboard is not None:
            self._tensorboard.write(
                step,
                {"train/loss": interval.loss, f"{rate.item}/s": rate.items_per_second}
                | {"grad_norm": interval.metrics[-1]["grad_norm"]}
                | {f"val/{name}": value for name, value in validation.items()}
                | (diagnostics.summarize(reading) if reading is not None else {}),
            )


def check_finite(interval: Interval, last_checkpoint: int | None) -> None:
    """Refuses to go on with what no step can repair."""
    for step, metrics in enumerate(interval.metrics, start=interval.first_step):
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                raise RunError(
                    f"Step {step}: {name} is {float(metrics[name])}. Nothing was saved "
                    f"since step {last_checkpoint or 0}, from which the same command "
                    "resumes. If it happens again, look at the data of this step, or "
                    "begin anew with another --out and a lower --learning-rate or --clip."
                )


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What some steps have come to, over all devices."""

    items_per_second: float
    item: str  # "tokens" or "images".
    # Model FLOPs per second as a share of the peak (MFU), where both are known.
    utilization: float | None

    def __str__(self) -> str:
        text = f"{self.items_per_second:,.0f} {self.item}/s"
        if self.utilization is None:
            return text
        return f"{text}  {self.utilization:.1%} MFU"


def throughput(task: Task, examples: int, seconds: float) -> Throughput:
    """The throughput of examples that took so long."""
    utilization = None
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is not None and task.flops_per_example is not None:
        achieved = task.flops_per_example * examples / seconds
        utilization = achieved / (peak * jax.device_count())
    items = examples * task.items_per_example / seconds
    return Throughput(items, task.item, utilization)
