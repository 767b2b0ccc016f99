"""Writers of scalars by name, for common loggers."""

import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from orscale_jax import _checks


def to_floats(scalars: Mapping[str, Any]) -> dict[str, float]:
    """Fetch scalars from the device, all at once.

    Args:
      scalars: Arrays of one element, or numbers, by name, such as those of
        :func:`summarize`.

    Returns:
      Python floats by name, as ``wandb.log`` takes them.

    Raises:
      ValueError: If an array has more than one element.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import diagnostics
      >>> diagnostics.to_floats({"loss": jnp.array(2.5), "step": 3})
      {'loss': 2.5, 'step': 3.0}
    """
    fetched = jax.device_get(dict(scalars))
    for name, value in fetched.items():
        if np.size(value) != 1:
            raise ValueError(f"{name} has shape {np.shape(value)}: pass scalars only.")
    return {name: float(np.asarray(x).item()) for name, x in fetched.items()}


class JsonLines:
    r"""A file of JSON lines, one object for each step, with the key ``"step"`` first.

    NaN and infinities are written as null, since JSON has neither. The first ``write``
    removes an unfinished last line, which a killed process may have left.

    Example:
      >>> import pathlib, tempfile
      >>> from orscale_jax import diagnostics
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> diagnostics.JsonLines(path).write(1, {"loss": 2.5})
      >>> path.read_text()
      '{"step": 1, "loss": 2.5}\n'
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Set the path of the file, which the first ``write`` creates or continues."""
        self.path = pathlib.Path(path)
        self._begun = False

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Add the scalars of a step.

        Raises:
          ValueError: If the step is no whole number, or a scalar is called "step".
        """
        step = _checks.whole("step", step)
        if "step" in scalars:
            _checks.refuse("scalars", scalars, 'give "step" another name')
        numbers = {
            name: value if math.isfinite(value) else None
            for name, value in to_floats(scalars).items()
        }
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_half_a_line(self.path)
            self._begun = True
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")


def _drop_half_a_line(path: pathlib.Path) -> None:
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


class TensorBoard:
    """Event files for TensorBoard, written by tensorboardX; a context manager.

    Args:
      folder: Where they go: TensorBoard's ``--logdir``, or a folder in it.

    Raises:
      ImportError: If tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Begin an event file."""
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

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Add the scalars of a step; they are in the file when it returns."""
        now = time.time()
        for name, value in to_floats(scalars).items():
            summary = self._scalar(name, value)
            event = self._event(wall_time=now, step=step, summary=summary)
            self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def __enter__(self) -> "TensorBoard":
        """Open for ``with``."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()
