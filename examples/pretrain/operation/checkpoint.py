"""Checkpoints from which a run carries on as if it had never stopped, and its models."""

import functools
import inspect
import logging
import pathlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from examples.pretrain.errors import RunError, UsageError
from examples.pretrain.operation.processes import is_first, others_are_gone
from examples.pretrain.operation.rundir import saved_config
from examples.pretrain.output import Output
from examples.pretrain.setup import Setup, State, split
from examples.pretrain.tasks import make_task

PyTree = Any
# By bytes of an entry; 8 bytes are two entries.
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class Checkpoints:
    """The newest checkpoints of a run with one optimizer; a context manager.

    They are written while training goes on. A checkpoint becomes visible by a rename,
    once it is complete: a process killed while saving leaves the one before. It holds the
    whole training state, in which every number is finite, the position in the data, and a
    checksum of every array. All processes share the folder.
    """

    def __init__(self, folder: pathlib.Path, keep: int, console: Output):
        for name in ("absl", "asyncio"):  # Orbax logs the traceback of all it raises.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _quiet_threads()
        self._folder, self._console = folder.absolute(), console
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,  # It reads nothing that may be damaged.
        )
        self._manager = _Manager(self._folder, options=self._options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or not others_are_gone(error):
            self._manager.close()  # Waits until all is written.

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: State) -> None:
        """Begins to save the state after `step` steps, unless that is there already."""
        if step == self._manager.latest_step():
            return
        if wrong := _not_finite(state):
            raise RunError(
                f"Step {step}: {wrong}, so the state is not saved. The same command "
                f"resumes from step {self.latest_step or 0}. If it happens again, begin "
                "anew with another --out and a lower --learning-rate or --clip."
            )
        position = {"next_batch": step, "checksums": checksums(state)}
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position)
        )
        self._manager.save(step, args=arguments)

    def begin(self, setup: Setup) -> State:
        """The initial state, as it is read back from its checkpoint.

        What cannot be restored is said here, before the first step.
        """
        self.save(0, setup.initial_state())
        self._manager.wait_until_finished()
        state, wrong = self._read(0, setup)
        if wrong:
            raise RunError(
                f"A checkpoint in {self._folder} was written, but cannot be read: "
                f"{wrong}. Nothing was trained. Choose another --out."
            )
        return state

    def restore(self, setup: Setup) -> tuple[State, int] | None:
        """The newest state that can be read and the batch to go on with, if any.

        It is laid out as the setup says, whatever mesh has saved it. A damaged checkpoint
        is moved aside if an older one can be read.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            state, wrong = self._read(step, setup)
            if not wrong:
                break
            damaged[step] = wrong
        else:
            if damaged:
                raise RunError(
                    f"No checkpoint in {self._folder} can be read: "
                    + "; ".join(f"step {step}: {why}" for step, why in damaged.items())
                    + ". Delete the folder to start anew."
                )
            return None
        for bad, reason in damaged.items() if is_first() else ():
            aside = self._folder / f"damaged_checkpoint_{bad}"  # On the same disk.
            while aside.exists():
                aside = aside.with_name(f"{aside.name}_again")
            (self._folder / str(bad)).rename(aside)
            self._console.print(
                f"The checkpoint of step {bad} is damaged ({reason}). It is now "
                f"{aside}, and the run carries on from step {step}."
            )
        if damaged:
            multihost_utils.sync_global_devices("damaged checkpoints are aside")
            self._manager.close()
            self._manager = _Manager(self._folder, options=self._options)
        return state, step

    def _read(self, step: int, setup: Setup) -> tuple[State, str]:
        """A state, and what is wrong with it, in this process or in another."""
        layout = ocp.args.StandardRestore(setup.abstract)
        state, sums, wrong = _read(self._folder / str(step), layout)
        if _in_all(step, not wrong):  # They compute the checksums together.
            wrong = _wrong(state, sums)
            if _in_all(step, not wrong):
                return state, ""
        return state, wrong or "another process cannot read it"


class _Manager(ocp.CheckpointManager):
    """Orbax's, but it is the run that asks JAX whether to stop."""

    def reached_preemption(self, step: int) -> bool:
        return False  # Orbax would look for times that it has not read.


def load_model(folder: pathlib.Path | str) -> nnx.Module:
    """The model that a run has trained so far, on the first device.

    Reads the newest checkpoint whose weights are what was saved, and writes nothing: the
    run may be going on. The folder is that of one optimizer, such as runs/demo/orscale.
    """
    folder = pathlib.Path(folder)
    config = saved_config(folder)
    task = make_task(config)
    model = nnx.eval_shape(lambda: task.create(nnx.Rngs(config.recipe.seed)))
    params, variables = split(model)
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    weights = jax.tree.map(
        lambda x: x.update(sharding=where), {"params": params, "variables": variables}
    )
    layout = ocp.args.PyTreeRestore(
        weights,
        restore_args=ocp.checkpoint_utils.construct_restore_args(weights),
        partial_restore=True,  # Without the optimizer's state.
    )
    reasons: list[str] = []
    for step in checkpoint_steps(folder):
        checkpoint = folder.absolute() / "checkpoints" / str(step)
        state, sums, wrong = _read(checkpoint, layout)
        if wrong := wrong or _wrong(state, sums):
            reasons.append(f"step {step}: {wrong}")
            continue
        if reasons:
            warnings.warn(
                f"{folder}: the weights are those of step {step}, since newer ones "
                f"cannot be read: {'; '.join(reasons)}",
                stacklevel=2,
            )
        return nnx.merge(nnx.graphdef(model), state["params"], state["variables"])
    why = "can be read: " + "; ".join(reasons) if reasons else "is there yet"
    raise UsageError(f"{folder / 'checkpoints'}: no checkpoint {why}.")


def checkpoint_steps(folder: pathlib.Path) -> list[int]:
    """The steps of a run's complete checkpoints, newest first."""
    found = (folder / "checkpoints").glob("[0-9]*")
    return sorted((int(p.name) for p in found if p.name.isdigit()), reverse=True)


def _in_all(step: int, fine: bool) -> bool:
    """Whether all processes have come to the same step, and find it fine."""
    found = multihost_utils.process_allgather(np.array([step, fine]))
    return bool((found == [step, True]).all())


def _read(folder: pathlib.Path, layout: Any) -> tuple[Any, dict[str, int], str]:
    """The state of a checkpoint, its checksums, and why it cannot be read, if so.

    It does not wait for other processes, which may fail.
    """
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    arguments = ocp.args.Composite(state=layout, position=ocp.args.JsonRestore())
    handler = ocp.CompositeCheckpointHandler()
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            found = reader.restore(folder, args=arguments)
        if (step := found.position["next_batch"]) != int(folder.name):
            raise ValueError(f"it is a checkpoint of step {step}")
        return found.state, {**found.position["checksums"]}, ""
    except Exception as error:  # A damaged file may raise anything.
        return None, {}, _shown(error)


def _wrong(state: PyTree, sums: Mapping[str, int]) -> str:
    """What is not as it was saved, or not finite; empty if nothing is."""
    found = checksums(state).items()
    names = (name for name, sum_ in found if sum_ != sums.get(name))
    wrong = next((f"{name} is not what was saved" for name in names), "")
    return wrong or _not_finite(state)


def _not_finite(state: PyTree) -> str:
    """Which array has a number that is not finite; empty if none has."""
    finite = jax.tree.leaves_with_path(jax.device_get(_all_finite(state)))
    return next((f"{_name(path)} is not finite" for path, fine in finite if not fine), "")


def _shown(error: Exception) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line[:300]}"


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


def checksums(tree: PyTree) -> dict[str, int]:
    """A checksum of every array by its path, computed where the array lies.

    A storage layer may give back zeros for a chunk whose file is gone, or other numbers
    for a file with wrong bits, without an error. It is the same for any sharding.
    """
    sums = jax.tree.leaves_with_path(jax.device_get(_checksums(tree)))
    return {_name(path): int(sum_) for path, sum_ in sums}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


_all_finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))
_checksums = jax.jit(lambda tree: jax.tree.map(_checksum, tree))


def _checksum(x: jax.Array) -> jax.Array:
    """The sum of a hash of each entry's bits and place, mod 2³².

    The hash tells all bits apart: another value of one entry is always seen.
    """
    if x.dtype != bool:
        x = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    place = jnp.zeros((), jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        along = jnp.arange(x.shape[axis], dtype=jnp.uint32) * jnp.uint32(stride % 2**32)
        place = place + along.reshape(-1, *(1,) * (x.ndim - 1 - axis))
        stride *= x.shape[axis]
    return jnp.sum(_hash(x.astype(jnp.uint32) ^ _hash(place)), dtype=jnp.uint32)


def _hash(x: jax.Array) -> jax.Array:
    """A permutation of the 32-bit integers: the last steps of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
