"""The model of a run, from its newest checkpoint."""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from examples.pretrain.configs import saved_config
from examples.pretrain.errors import UsageError
from examples.pretrain.kinds import make_task
from examples.pretrain.operation.checkpoint import read_alone
from examples.pretrain.operation.checksums import checksums
from examples.pretrain.operation.rundir import read_facts
from examples.pretrain.setup import split

PyTree = Any


def load_model(folder: pathlib.Path | str) -> nnx.Module:
    """The model that a run has trained so far, on the first device.

    Reads the newest checkpoint whose weights are what was saved, and writes nothing: the
    run may be going on.

    Args:
      folder: Of the run with one optimizer, such as runs/demo/orscale.

    Raises:
      UsageError: If there is no run in the folder, or no checkpoint that can be read.
    """
    folder = pathlib.Path(folder)
    config = saved_config(run_facts(folder), folder.name)
    task = make_task(config)
    model = nnx.eval_shape(lambda: task.create(nnx.Rngs(config.recipe.seed)))
    params, variables = split(model)
    weights = _newest(folder, {"params": params, "variables": variables})
    return nnx.merge(nnx.graphdef(model), weights["params"], weights["variables"])


def run_facts(folder: pathlib.Path) -> dict[str, Any]:
    """The configuration of the run that a folder with one optimizer belongs to.

    Raises:
      UsageError: If the folder is no such folder.
    """
    try:
        facts = read_facts(folder.absolute().parent)
    except (FileNotFoundError, NotADirectoryError):
        facts = {}
    if "unit" not in facts:
        raise UsageError(
            f"{folder} is not the folder of a run with one optimizer, such as "
            "runs/demo/orscale: the folder above it has no config.json of a run."
        )
    return facts


def checkpoint_steps(folder: pathlib.Path) -> list[int]:
    """The steps of a run's complete checkpoints, newest first."""
    found = (folder / "checkpoints").glob("[0-9]*")
    steps = (int(path.name) for path in found if path.name.isdigit())
    return sorted(steps, reverse=True)


def _newest(folder: pathlib.Path, weights: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The newest of these arrays that can be read."""
    reasons = []
    for step in checkpoint_steps(folder):
        try:
            found = _read(folder.absolute() / "checkpoints" / str(step), weights)
        except Exception as error:  # A damaged file may raise anything.
            first_line = (str(error).strip().splitlines() or [""])[0]
            reasons.append(f"step {step}: {type(error).__name__}: {first_line[:200]}")
            continue
        if reasons:
            warnings.warn(
                f"{folder}: the weights are those of step {step}, since newer ones "
                f"cannot be read: {'; '.join(reasons)}",
                stacklevel=3,
            )
        return found
    why = "can be read: " + "; ".join(reasons) if reasons else "is there yet"
    raise UsageError(f"{folder / 'checkpoints'}: no checkpoint {why}.")


def _read(path: pathlib.Path, weights: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """These arrays of a checkpoint, without those of the optimizer."""
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    weights = jax.tree.map(lambda x: x.update(sharding=where), dict(weights))
    restored = read_alone(
        path,
        ocp.args.PyTreeRestore(
            weights,
            restore_args=ocp.checkpoint_utils.construct_restore_args(weights),
            partial_restore=True,
        ),
    )
    for name, sum_ in checksums(restored.state).items():
        if sum_ != restored.position["checksums"].get(name):
            raise ValueError(f"{name} is not what was saved")
    return restored.state
