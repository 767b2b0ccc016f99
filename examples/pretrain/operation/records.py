"""What a run writes down as it goes, in CSV files."""

import contextlib
import csv
import io
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from examples.pretrain.errors import RunError
from examples.pretrain.operation.rundir import write_atomically
from examples.pretrain.setup import Setup
from examples.pretrain.train import Interval
from orscale_jax.diagnostics.history import StepFile

LOADS = ("step", "layer", "expert", "share")
Row = Mapping[str, Any]


@contextlib.contextmanager
def continuing(folder: pathlib.Path) -> Iterator[None]:
    """Names the folder where a table of an interrupted run cannot be continued.

    Raises:
      RunError: If that is so.
    """
    try:
        yield
    except ValueError as error:
        raise RunError(
            f"A table in {folder} cannot be continued: {error} Move it away to go on "
            "without its rows."
        ) from error


class Recorder:
    """Writes down the metrics of a run with one optimizer, a row per step.

    What it writes depends on the step alone (but for the seconds), wherever the run was
    interrupted.
    """

    def __init__(self, folder: pathlib.Path, setup: Setup, start: int):
        self._recipe, self._task = setup.recipe, setup.task
        steps = np.arange(setup.recipe.num_steps)
        self.learning_rates = jax.device_get(jax.jit(jax.vmap(setup.schedule))(steps))
        self._loads = None
        with continuing(folder):
            self._metrics = StepFile(folder / "metrics.csv", columns(setup.task.item))
            self._metrics.rewind(start)
            rows = read_csv(self._metrics.path)
            if setup.task.has_experts:
                self._loads = StepFile(folder / "expert_loads.csv", LOADS)
                self._loads.rewind(start)
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
                    "learning_rate": f"{self.learning_rates[step - 1]:.6g}",
                    "grad_norm": f"{metrics['grad_norm']:.6g}",
                    "seconds": f"{self._seconds:.3f}",
                }
            )
        rows[-1] |= {f"val_{name}": f"{x:.6f}" for name, x in validation.items()}
        self._metrics.append(
            [row.get(name, "") for name in self._metrics.columns] for row in rows
        )

    def record_loads(self, interval: Interval) -> None:
        """Writes the experts' shares in the last step down, if the model has experts."""
        if self._loads is None:
            return
        shares_LxE = interval.metrics[-1]["expert_load"]
        self._loads.append(
            (str(interval.step), str(layer), str(e), f"{share:.6f}")
            for (layer, e), share in np.ndenumerate(shares_LxE)
        )


def columns(item: str) -> list[str]:
    """The columns of metrics.csv."""
    before, after = ["optimizer", "step", item], ["learning_rate", "grad_norm", "seconds"]
    accuracy = ["val_accuracy"] if item == "images" else []
    return [*before, "train_loss", "val_loss", *accuracy, *after]


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file, up to its last line end."""
    with open(path, newline="") as file:
        whole, _, _ = file.read().rpartition("\n")
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def write_csv(path: pathlib.Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Writes a CSV file that is seen whole or not at all."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
