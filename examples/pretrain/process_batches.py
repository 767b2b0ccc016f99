"""Which part of each batch a process reads."""

from collections.abc import Sequence
from typing import Any

import grain

from examples.pretrain.config import UsageError

# Grain counts the batches of a repeated data set in floats, which end at 2⁶³.
_ENDLESS = 2**48


def process_batches(
    examples: grain.MapDataset, batch_size: int, process: int = 0, processes: int = 1
) -> Sequence[Any]:
    """Process p's part of each batch; it reads no other example.

    Item i belongs to step i and has batch_size / processes examples. The parts of all
    processes, one after another, are the batch that a single process would have: the
    batches depend on the examples alone, and the position in them on the step alone. So
    a run may be carried on by another number of processes.

    Args:
      examples: In the order of training; endless, or at least as long as what is asked
        for.
      batch_size: Examples per step, over all processes.
      process: Whose part: :func:`jax.process_index`.
      processes: How many there are: :func:`jax.process_count`.

    Raises:
      UsageError: If the batch does not divide.
    """
    if batch_size % processes:
        raise UsageError(
            f"A batch of {batch_size} does not divide among {processes} processes: "
            f"choose a batch size that is a multiple of {processes}."
        )
    if not 0 <= process < processes:
        raise ValueError(f"process {process} is not one of {processes}: count from 0.")
    # Parts follow one another: part i·P + p is process p's of step i.
    parts = examples[:_ENDLESS].batch(batch_size // processes)
    return parts[process::processes]
