"""What a run writes down as it goes: metrics, readings of the optimizer, events."""

import contextlib
import csv
import functools
import inspect
import io
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from examples.pretrain.errors import RunError
from examples.pretrain.operation.processes import is_first
from examples.pretrain.operation.rundir import write_atomically
from examples.pretrain.optimizers import find_optimizer
from examples.pretrain.setup import Setup, State
from examples.pretrain.step import loss_of, on_auto_axes
from examples.pretrain.train import Interval
from orscale_jax import Description, describe, diagnostics
from orscale_jax.diagnostics.history import FILE_NAME, StepFile

PyTree = Any
LOADS = ("step", "layer", "expert", "share")
OF_MOMENTUM = ("momentum_stable_rank", "polar_error")
MICRO_BATCHES = 8  # The standard errors are over these.


class Recorder:
    """Writes down the metrics of a run with one optimizer, a row per step.

    What it writes depends on the step alone (but for the seconds), wherever the run was
    interrupted.
    """

    def __init__(self, folder: pathlib.Path, setup: Setup, start: int):
        self._recipe, self._task = setup.recipe, setup.task
        steps = np.arange(setup.recipe.num_steps)
        self.learning_rates = jax.device_get(jax.jit(jax.vmap(setup.schedule))(steps))
        accuracy = ["val_accuracy"] if setup.task.item == "images" else []
        columns = ["optimizer", "step", setup.task.item, "train_loss", "val_loss"]
        columns += [*accuracy, "learning_rate", "grad_norm", "seconds"]
        self._loads = None
        with _continuing(folder):
            self._metrics = StepFile(folder / "metrics.csv", columns)
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
        self._scale = _scale(setup)
        loss_of_all = loss_of(setup)

        def loss_fn(params: PyTree, batch: tuple[PyTree, PyTree]) -> jax.Array:
            return loss_of_all(params, *batch)[0]

        def in_micro_batches(batches: list[PyTree]) -> list[PyTree]:
            examples = jax.tree.map(lambda *xs: jnp.concatenate(xs), *batches)
            count = len(jax.tree.leaves(examples)[0])
            size = max(count // MICRO_BATCHES, 1)
            parts = [slice(i, i + size) for i in range(0, count - size + 1, size)]
            return [jax.tree.map(lambda x, p=p: x[p], examples) for p in parts]

        self._loss_fn = on_auto_axes(setup, loss_fn, PartitionSpec())
        self._cut = jax.jit(on_auto_axes(setup, in_micro_batches, PartitionSpec()))
        if not is_first():
            return
        params = setup.abstract["params"]
        with _continuing(folder):
            self.history = diagnostics.History(
                folder / FILE_NAME,
                classes=diagnostics.layer_classes(params),
                measurements=OF_MOMENTUM,
                scalars=("loss",),
            )
            self.history.rewind(start)
        (folder / "audit.csv").write_text(audit(setup).to_csv())

    def read(self, state: State) -> diagnostics.Reading:
        """What the optimizer has done in the last step."""
        return self._read(state["opt_state"], state["params"])

    def record(
        self, step: int, state: State, batches: Sequence[PyTree], **scalars: Any
    ) -> diagnostics.Reading:
        """Writes a reading down and, if there are batches, what is measured on them."""
        reading, params = self.read(state), state["params"]
        measured, gained = {}, None
        # Without ratios there is no gain to measure.
        if batches and reading.trust_ratio is not None:
            parts = [(state["variables"], part) for part in self._cut(list(batches))]
            measured = diagnostics.measure(
                state["opt_state"], params, self._numbers, names=OF_MOMENTUM
            )
            gained = diagnostics.step_gain(
                self._loss_fn, params, parts, reading, self._numbers, **self._scale
            )
        if is_first():
            self.history.append(step, reading, measured, gained=gained, **scalars)
        return reading


def audit(setup: Setup) -> Description:
    """What the run's optimizer does with each parameter.

    Controls and members of the family that do not take the arguments of s are shown with
    the default's.
    """
    return describe(
        setup.abstract["params"],
        setup.weight_dimension_numbers,
        optimizer=setup.optimizer,
        **_scale(setup),
    )


def _scale(setup: Setup) -> dict[str, Any]:
    """The arguments by which the run's optimizer has its s."""
    optimizer = find_optimizer(setup.recipe.optimizer)
    known = inspect.signature(optimizer.constructor).parameters
    names = [name for name in ("consistent_rms", "scale_mode") if name in known]
    return {name: optimizer.fixed.get(name, known[name].default) for name in names}


class TensorBoard:
    """Event files for TensorBoard, written by tensorboardX; a context manager."""

    def __init__(self, folder: str | os.PathLike[str]):
        try:
            from tensorboardX import event_file_writer, proto, summary
        except ImportError as error:
            raise ImportError(
                "TensorBoard needs tensorboardX: pip install 'orscale-jax[report]'."
            ) from error
        self._event, self._scalar = proto.event_pb2.Event, summary.scalar
        # Not its SummaryWriter: the thread that this writes in ends with the first error,
        # such as a full disk, and then the tenth scalar waits for it for ever.
        os.makedirs(folder, exist_ok=True)
        prefix = os.path.join(folder, "events")
        self._writer = event_file_writer.EventsWriter(prefix)

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.close()

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Adds the scalars of a step; they are in the file when it returns."""
        now = time.time()
        for name, value in jax.device_get(dict(scalars)).items():
            summary = self._scalar(name, float(value))
            event = self._event(wall_time=now, step=step, summary=summary)
            self._writer.write_event(event)
        self._writer.flush()


@contextlib.contextmanager
def _continuing(folder: pathlib.Path) -> Iterator[None]:
    """Raises RunError where a table of an interrupted run cannot be continued."""
    try:
        yield
    except ValueError as error:
        raise RunError(
            f"A table in {folder} cannot be continued: {error} Move it away to go on "
            "without its rows."
        ) from error


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file, up to its last line end."""
    with open(path, newline="") as file:
        whole, _, _ = file.read().rpartition("\n")
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def write_csv(
    path: pathlib.Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Writes a CSV file that is seen whole or not at all."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())
