"""Checkpoints from which a run carries on as if it had never stopped."""

import contextlib
import functools
import inspect
import itertools
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from rich.console import Console

from examples.pretrain.errors import AGAIN, RunError
from examples.pretrain.operation.checksums import checksums
from examples.pretrain.operation.processes import (
    barrier,
    everywhere,
    is_first,
    others_are_gone,
)
from examples.pretrain.operation.write_failures import why_not_written
from examples.pretrain.setup import Setup, State


class Checkpoints:
    """The newest checkpoints of a run with one optimizer; a context manager.

    They are written while training goes on. A checkpoint becomes visible by a rename,
    once it is complete: a process killed while saving leaves the one before. It holds the
    whole training state, the position in the data, and a checksum of every array.

    Args:
      folder: Where they go; processes share it.
      keep: How many are kept.
      console: For what the reader should know.
    """

    def __init__(self, folder: pathlib.Path, keep: int, console: Console):
        for name in ("absl", "asyncio"):  # Orbax logs the traceback of all it raises.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _quiet_threads()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True
        )
        self._folder, self._console = folder.absolute(), console
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or not others_are_gone(error):
            with self._writing():
                self._manager.close()  # Waits until all is written.

    def save(self, step: int, state: State) -> None:
        """Begins to save the state after `step` steps, unless that is there already.

        Raises:
          RunError: If this or an earlier checkpoint cannot be written.
        """
        if step == self._manager.latest_step():
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            position=ocp.args.JsonSave(
                {"next_batch": step, "checksums": checksums(state)}
            ),
        )
        with self._writing():
            self._manager.save(step, args=arguments)

    def restore(self, setup: Setup) -> tuple[State, int] | None:
        """The newest state that can be read and the batch to go on with, if any.

        It is laid out as the setup says, whatever mesh has saved it. A damaged checkpoint
        is moved aside if an older one can be read.

        Raises:
          RunError: If there are checkpoints, but none can be read.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            state, reason = self._read(step, setup)
            if state is not None:
                self._move_aside(damaged, step)
                return state, step
            damaged[step] = reason
        if damaged:
            raise RunError(
                f"No checkpoint in {self._folder} can be read: "
                + "; ".join(f"step {step}: {why}" for step, why in damaged.items())
                + ". Delete the folder to start anew."
            )
        return None

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def _newest(self) -> str:
        return "none" if self.latest_step is None else f"step {self.latest_step}"

    def _read(self, step: int, setup: Setup) -> tuple[State | None, str]:
        """A state, or why there is none; the same on all processes."""
        state, expected, reason = None, {}, ""
        try:
            restored = read_alone(
                self._folder / str(step), ocp.args.StandardRestore(setup.abstract)
            )
            state, expected = restored.state, restored.position["checksums"]
        except Exception as error:  # A damaged file may raise anything.
            reason = f"{type(error).__name__}: {_first_line(error)[:200]}"
        if not everywhere(state is not None):
            return None, reason or "another process cannot read it"
        found = checksums(state)
        wrong = [name for name in found if found[name] != expected.get(name)]
        if wrong:
            return None, f"{wrong[0]} is not what was saved"
        return state, ""

    def _move_aside(self, damaged: dict[int, str], good: int) -> None:
        if not damaged:
            return
        for step, reason in damaged.items() if is_first() else ():
            aside = _free_name(self._folder.parent / f"damaged_checkpoint_{step}")
            (self._folder / str(step)).rename(aside)
            self._console.print(
                f"The checkpoint of step {step} is damaged ({reason}). It is now "
                f"{aside}, and the run carries on from step {good}.",
                highlight=False,
            )
        barrier("damaged checkpoints are aside")
        self._manager.reload()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says of what goes wrong that a checkpoint is not written."""
        try:
            yield
        except Exception as error:
            if others_are_gone(error):
                raise
            reason = why_not_written(error) or _first_line(error)[:300]
            raise RunError(
                f"A checkpoint in {self._folder} could not be written: {reason}. "
                f"Newest complete one: {self._newest()}.\n{AGAIN}"
            ) from error


def read_alone(folder: pathlib.Path, state: Any) -> Any:
    """Reads a checkpoint without waiting for other processes, which may fail.

    Args:
      folder: Of the checkpoint.
      state: Orbax's arguments for the training state.
    """
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    arguments = ocp.args.Composite(state=state, position=ocp.args.JsonRestore())
    handler = ocp.CompositeCheckpointHandler()
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        return reader.restore(folder, args=arguments)


@functools.cache
def _quiet_threads() -> None:
    """Silences the reads and writes that TensorStore goes on with after one has failed.

    Orbax has given them up, and has closed the event loop that they report to.
    """
    hook = sys.unraisablehook

    def all_others(unraisable: Any) -> None:
        given_up = inspect.iscoroutine(unraisable.object)
        if not given_up and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = all_others


def _free_name(path: pathlib.Path) -> pathlib.Path:
    """The path, or with a number after it the first one that is not there."""
    numbered = (path.with_name(f"{path.name}_{n}") for n in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
