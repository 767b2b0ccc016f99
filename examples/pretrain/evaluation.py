"""Validation: the mean of a task's metrics over the same examples every time."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from examples.pretrain.errors import UsageError
from examples.pretrain.loading import Batches
from examples.pretrain.meshes import batch_shards, in_effect
from examples.pretrain.setup import Setup, State
from examples.pretrain.step import on_auto_axes
from examples.pretrain.task import Data, Metrics

PyTree = Any


def evaluation(
    setup: Setup, data: Data, largest_batch: int
) -> Callable[[State], dict[str, float]]:
    """The metrics as a function of the training state.

    The validation examples are kept on the devices, in batches of at most this size.
    """
    shards = batch_shards(setup.mesh)
    size = evaluation_batch_size(len(data.validation), largest_batch, shards)
    batches = Batches(data.validation, size, setup.mesh)
    held = [batches[index] for index in range(len(batches))]

    def metrics_of(params: PyTree, variables: PyTree, batch: PyTree) -> Metrics:
        return setup.task.evaluate(setup.merge(params, variables), batch)

    metrics_of = jax.jit(on_auto_axes(setup, metrics_of, PartitionSpec()))

    def evaluate(state: State) -> dict[str, float]:
        params, variables = state["params"], state["variables"]
        with in_effect(setup.mesh):
            found = [metrics_of(params, variables, batch) for batch in held]
        found = jax.device_get(found)
        return {name: float(np.mean([m[name] for m in found])) for name in found[0]}

    return evaluate


def evaluation_batch_size(examples: int, largest: int, shards: int) -> int:
    """The largest batch of which the examples make whole ones, on all devices."""
    sizes = range(largest - largest % shards, 0, -shards)
    for size in sizes:
        if examples % size == 0:
            return size
    raise UsageError(
        f"{examples} validation examples make no whole batches of at most {largest} on "
        f"{shards} devices: change --val-batches, --batch-size or the mesh."
    )
