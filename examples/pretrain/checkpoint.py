"""Checkpoints from which a run carries on as if it had never stopped."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

PyTree = Any


class Checkpoints:
    """The checkpoints of one arm; the last two are kept.

    A checkpoint becomes visible by a rename, once it is complete: a process killed while
    saving leaves the one before. Saving is synchronous, because the next step donates the
    very buffers that are being saved.
    """

    def __init__(self, folder: pathlib.Path):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, state: PyTree) -> None:
        """Saves the state after ``step`` steps, unless that is there already."""
        if step == self._manager.latest_step():
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave({"next_batch": step}),
        )
        self._manager.save(step, args=arguments)

    def restore(self, state: PyTree) -> tuple[PyTree, int]:
        """The latest state and the batch to go on with.

        Args:
          state: The state to begin with if there is no checkpoint; else it only says what
            structure, shapes and dtypes to expect.
        """
        step = self._manager.latest_step()
        if step is None:
            return state, 0
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
        )
        restored = self._manager.restore(step, args=arguments)
        return restored.state, restored.data["next_batch"]
