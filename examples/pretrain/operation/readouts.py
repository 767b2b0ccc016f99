"""What an optimizer does, written down: readings, and now and then measurements."""

import functools
import inspect
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from examples.pretrain.operation.processes import is_first
from examples.pretrain.operation.records import continuing
from examples.pretrain.optimizers import find_optimizer
from examples.pretrain.setup import Setup, State
from examples.pretrain.step import loss_of, on_auto_axes
from orscale_jax import Description, describe, diagnostics
from orscale_jax.diagnostics.history import FILE_NAME

PyTree = Any
OF_MOMENTUM = ("momentum_stable_rank", "polar_error")
SCALE = ("consistent_rms", "scale_mode")
MICRO_BATCHES = 8  # The standard errors are over these.


class Readouts:
    """The history of a run, which `python -m orscale_jax.diagnostics` reports on.

    All processes take part in a reading; the first one writes it down.

    Args:
      folder: Of the run with one optimizer.
      setup: What is trained.
      start: The step to go on from.
    """

    def __init__(self, folder: pathlib.Path, setup: Setup, start: int):
        everywhere = NamedSharding(setup.mesh, PartitionSpec())
        self._read = jax.jit(
            functools.partial(
                diagnostics.read,
                learning_rate=setup.schedule,
                weight_dimension_numbers=setup.weight_dimension_numbers,
            ),
            out_shardings=everywhere,
        )
        self._numbers = setup.weight_dimension_numbers
        self._scale = _scale(setup)
        self._loss_fn = on_auto_axes(setup, _plain_loss(setup), PartitionSpec())
        self._cut = jax.jit(on_auto_axes(setup, _cut, PartitionSpec()))
        if not is_first():
            return
        params = setup.abstract["params"]
        with continuing(folder):
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
        reading = self.read(state)
        measured, gained = {}, None
        # Without ratios there is no gain to measure.
        if batches and reading.trust_ratio is not None:
            micro_batches = [
                (state["variables"], part) for part in self._cut(list(batches))
            ]
            measured = diagnostics.measure(
                state["opt_state"],
                state["params"],
                self._numbers,
                names=OF_MOMENTUM,
            )
            gained = diagnostics.step_gain(
                self._loss_fn,
                state["params"],
                micro_batches,
                reading,
                self._numbers,
                **self._scale,
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
    return {n: optimizer.fixed.get(n, known[n].default) for n in SCALE if n in known}


def _plain_loss(setup: Setup) -> Any:
    """The loss as a function of parameters and of (other variables, batch)."""
    loss_of_all = loss_of(setup)

    def loss_fn(params: PyTree, batch: tuple[PyTree, PyTree]) -> jax.Array:
        return loss_of_all(params, *batch)[0]

    return loss_fn


def _cut(batches: list[PyTree]) -> list[PyTree]:
    """Cuts the examples of batches into micro-batches of one size."""
    examples = jax.tree.map(lambda *xs: jnp.concatenate(xs), *batches)
    count = len(jax.tree.leaves(examples)[0])
    size = max(count // MICRO_BATCHES, 1)

    def part(start: int) -> PyTree:
        return jax.tree.map(lambda x: x[start : start + size], examples)

    return [part(start) for start in range(0, count - size + 1, size)]
