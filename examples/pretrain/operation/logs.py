"""What a run with one optimizer tells as it goes: files, progress, warnings."""

import contextlib
import datetime
import functools
import math
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from examples.pretrain.config import Config
from examples.pretrain.errors import RunError
from examples.pretrain.operation.peaks import peak_flops
from examples.pretrain.operation.processes import is_first
from examples.pretrain.operation.rundir import read_csv, write_atomically
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.output import Output
from examples.pretrain.setup import Setup, State
from examples.pretrain.task import Task
from examples.pretrain.train import Interval
from orscale_jax import Description, describe, diagnostics
from orscale_jax.diagnostics.history import FILE_NAME, StepFile

PyTree = Any
SECONDS_BETWEEN_LINES = 15.0
OF_MOMENTUM = ("momentum_stable_rank", "polar_error")


class Logs:
    """Writes down what each interval tells, and shows a line of it now and then."""

    def __init__(
        self,
        folder: pathlib.Path,
        setup: Setup,
        start: int,
        config: Config,
        console: Output,
    ):
        self._setup, self._config, self._console = setup, config, console
        self._warned: set[str] = set()
        optimizer = OPTIMIZERS[setup.recipe.optimizer]
        readable = optimizer.readable and setup.layers is None
        self._readouts = Readouts(folder, setup, start) if readable else None
        self._recorder = Recorder(folder, setup, start) if is_first() else None
        self._label, self._start = optimizer.label, start
        self._began = self._said = time.monotonic()
        if self._recorder is not None:
            steps = range(1, start + 1)
            self._say_lost(folder / "metrics.csv", steps)
            if self._readouts is not None:
                read = [step for step in steps if any(self._reading_due(step))]
                self._say_lost(folder / FILE_NAME, read)

    def write(self, interval: Interval, validation: Mapping[str, float]) -> None:
        """Writes an interval down; readings and the validation are of its last step."""
        step, reading = interval.step, None
        due, measuring = self._reading_due(step)
        if self._readouts is not None and (due or measuring):
            reading = self._readouts.record(
                step, interval.state, measuring, loss=interval.loss
            )
        if self._recorder is None:
            return
        if reading is not None:
            for problem in diagnostics.find_problems(reading):
                if problem.title not in self._warned:  # Once each.
                    self._warned.add(problem.title)
                    self._console.print(f"Step {step}: {problem}")
        examples = self._setup.recipe.batch_size * len(interval.metrics)
        _, speed = throughput(self._setup.task, examples, interval.seconds)
        self._recorder.record(interval, validation)
        steps, now = self._setup.recipe.steps, time.monotonic()
        if now - self._said > SECONDS_BETWEEN_LINES or step == steps:
            self._said = now
            left = (now - self._began) / (step - self._start) * (steps - step)
            self._console.print(
                f"{self._label:<14} step {step}/{steps}  loss {interval.loss:.3f}  "
                f"{speed}  {datetime.timedelta(seconds=round(left))} left"
            )

    def _reading_due(self, step: int) -> tuple[bool, bool]:
        """Whether a step is read, and whether its momentum is measured."""
        every = self._config.measure_every
        return step % self._config.log_every == 0, every is not None and step % every == 0

    def _say_lost(self, table: pathlib.Path, steps: Collection[int]) -> None:
        """Says which steps before the checkpoint have no row."""
        found = {int(row["step"]) for row in read_csv(table)}
        if lost := [step for step in steps if step not in found]:
            self._console.print(
                f"{table} lacks {len(lost)} of {len(steps)} steps before the checkpoint, "
                f"the first of them step {lost[0]}. The run goes on without their rows."
            )


class Recorder:
    """Writes down the metrics of a run with one optimizer, a row per step.

    What it writes depends on the step alone (but for the seconds), wherever the run was
    interrupted.
    """

    def __init__(self, folder: pathlib.Path, setup: Setup, start: int):
        self._recipe, self._task = setup.recipe, setup.task
        steps = np.arange(setup.recipe.steps)
        self._rates = jax.device_get(jax.jit(jax.vmap(setup.schedule))(steps))
        accuracy = ["val_accuracy"] if setup.task.item == "images" else []
        columns = ["optimizer", "step", setup.task.item, "train_loss", "val_loss"]
        columns += [*accuracy, "learning_rate", "grad_norm", "seconds"]
        with _continuing(folder / "metrics.csv"):
            self._metrics = StepFile(folder / "metrics.csv", columns)
            self._metrics.rewind(start)
            rows = read_csv(self._metrics.path)
        self._seconds = float(rows[-1]["seconds"]) if rows else 0.0

    def record(self, interval: Interval, validation: Mapping[str, float]) -> None:
        """Writes an interval down; the validation belongs to its last step."""
        items_per_step = self._recipe.batch_size * self._task.items_per_example
        rows: list[dict[str, str]] = []
        for step, metrics in enumerate(interval.metrics, start=interval.first_step):
            # Single steps are not timed.
            self._seconds += interval.seconds / len(interval.metrics)
            rows.append(
                {
                    "optimizer": self._recipe.optimizer,
                    "step": str(step),
                    self._task.item: str(step * items_per_step),
                    "train_loss": f"{metrics['loss']:.6f}",
                    "learning_rate": f"{self._rates[step - 1]:.6g}",
                    "grad_norm": f"{metrics['grad_norm']:.6g}",
                    "seconds": f"{self._seconds:.3f}",
                }
            )
        rows[-1] |= {f"val_{name}": f"{x:.6f}" for name, x in validation.items()}
        self._metrics.append(
            [row.get(name, "") for name in self._metrics.columns] for row in rows
        )


class Readouts:
    """The history of a run, which `python -m orscale_jax.diagnostics` reports on.

    All processes take part in a reading; the first one writes it down.
    """

    def __init__(self, folder: pathlib.Path, setup: Setup, start: int):
        self._read = jax.jit(
            functools.partial(
                diagnostics.read,
                learning_rate=setup.schedule,
                weight_dimension_numbers=setup.weight_dimension_numbers,
            ),
            out_shardings=NamedSharding(setup.mesh, PartitionSpec()),
        )
        self._numbers = setup.weight_dimension_numbers
        if not is_first():
            return
        params = setup.abstract["params"]
        with _continuing(folder / FILE_NAME):
            self.history = diagnostics.History(
                folder / FILE_NAME,
                classes=diagnostics.layer_names(params),
                measurements=OF_MOMENTUM,
                scalars=("loss",),
            )
            self.history.rewind(start)
        write_atomically(folder / "audit.csv", audit(setup).to_csv())

    def record(
        self, step: int, state: State, measuring: bool, **scalars: Any
    ) -> diagnostics.Reading:
        """Writes a reading down, and measurements of the momentum if they are due."""
        opt_state, params = state["opt_state"], state["params"]
        reading, measured = self._read(opt_state, params), {}
        if measuring:
            measured = diagnostics.measure(opt_state, params, self._numbers)
        if is_first():
            self.history.append(step, reading, measured, **scalars)
        return reading


def throughput(task: Task, examples: int, seconds: float) -> tuple[float, str]:
    """Items per second of examples that took so long, over all devices; and in words.

    Where the peak and the model's FLOPs are known, the words tell the share of the peak.
    """
    rate = examples * task.items_per_example / seconds
    shown = f"{rate:,.0f} {task.item}/s"
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is not None and task.flops_per_example is not None:
        achieved = task.flops_per_example * examples / seconds
        shown += f"  {achieved / (peak * jax.device_count()):.1%} MFU"
    return rate, shown


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


def audit(setup: Setup) -> Description:
    """What the run's optimizer does with each parameter."""
    return describe(setup.abstract["params"], setup.optimizer)


@contextlib.contextmanager
def _continuing(table: pathlib.Path) -> Iterator[None]:
    """Raises RunError where a table of an interrupted run cannot be continued."""
    try:
        if table.is_symlink():
            raise ValueError(f"{table} is a link, and may lead to any file.")
        yield
    except ValueError as error:
        raise RunError(
            f"A table in {table.parent} cannot be continued: {error} Move it away to go "
            "on without its rows."
        ) from error
