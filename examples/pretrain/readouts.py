"""What an arm's optimizer does, written down: readings, and now and then measurements."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from examples.pretrain.config import Config
from orscale_jax import describe, diagnostics
from orscale_jax.diagnostics.history import FILE_NAME

PyTree = Any
OF_MOMENTUM = ("momentum_stable_rank", "polar_error")
STATISTICS = ("signal", "noise", "smoothness")
OF_STEP = ("kappa_step", "kappa_step_stderr")
MEASUREMENTS = (
    *OF_MOMENTUM,
    *(name + end for name in STATISTICS for end in ("", "_stderr")),
)
MICRO_BATCHES = 8  # The standard errors are over these.


class Readouts:
    """The history of one arm, which `python -m orscale_jax.diagnostics` reports on.

    Args:
      folder: Of the arm.
      start: The step to go on from.
      schedule: The learning rates.
      loss_fn: Of parameters and a batch.
      params: The initial parameters.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        start: int,
        schedule: optax.Schedule,
        loss_fn: Callable[[PyTree, Any], jax.Array],
        params: PyTree,
    ):
        self._read = jax.jit(functools.partial(diagnostics.read, learning_rate=schedule))
        self._loss_fn = loss_fn
        self.history = diagnostics.History(
            folder / FILE_NAME,
            classes=diagnostics.layer_classes(params),
            measurements=MEASUREMENTS,
            scalars=("loss", *OF_STEP),
        )
        self.history.rewind(start)
        (folder / "audit.csv").write_text(describe(params).to_csv())

    def read(self, state: dict[str, PyTree]) -> diagnostics.Reading:
        """What the optimizer has done in the last step."""
        return self._read(state["opt_state"], state["params"])

    def record(
        self,
        step: int,
        state: dict[str, PyTree],
        examples: np.ndarray,
        **scalars: Any,
    ) -> None:
        """Writes a reading down and, if there are examples, what is measured on them."""
        reading = self.read(state)
        # Without ratios the theory has nothing to say of their gain.
        measuring = len(examples) and reading.trust_ratio is not None
        measured = {}
        if measuring:
            micro_batches = _cut(examples)
            measured = self._measured(state, micro_batches)
            gained = diagnostics.step_gain(
                self._loss_fn, state["params"], micro_batches, reading.trust_ratio
            )
            scalars |= dict(zip(OF_STEP, gained.kappa, strict=True))
        self.history.append(step, reading, measured, **scalars)

    def _measured(
        self, state: dict[str, PyTree], micro_batches: list[np.ndarray]
    ) -> dict[str, PyTree]:
        params = state["params"]
        statistics = diagnostics.estimate(self._loss_fn, params, micro_batches)
        of_momentum = diagnostics.measure(state["opt_state"], params, names=OF_MOMENTUM)
        return of_momentum | {
            name + end: getattr(getattr(statistics, name), field)
            for name in STATISTICS
            for end, field in (("", "value"), ("_stderr", "stderr"))
        }


def _cut(examples: np.ndarray) -> list[np.ndarray]:
    """Cuts examples into micro-batches of one size."""
    size = max(len(examples) // MICRO_BATCHES, 1)
    starts = range(0, len(examples) - size + 1, size)
    return [examples[start : start + size] for start in starts]


def due(step: int, config: Config) -> bool:
    """Whether a reading is due."""
    return step % config.log_every == 0 or step % config.measure_every == 0


def examples_to_measure(
    step: int, batches: Sequence[np.ndarray], config: Config
) -> np.ndarray:
    """The next batches, none of them seen yet, where a measurement is due."""
    if step % config.measure_every:
        return batches[step][:0]
    following = range(step, step + config.measure_batches)
    return np.concatenate([batches[index] for index in following])
