"""Checks of the micro-batches and loss functions that are given."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from orscale_jax.trees.boxes import PyTree

LossFn: TypeAlias = Callable[[PyTree, Any], jax.Array]


def micro_batches(batches: Any, at_least: int = 2) -> list[Any]:
    """The micro-batches as a list, from an iterator or a tree that stacks them, too.

    Raises:
      ValueError: If there are too few, or their shapes differ.
    """
    found = (
        list(batches) if isinstance(batches, list | Iterator) else _along_first(batches)
    )
    if len(found) < at_least:
        raise ValueError(
            f"batches has {len(found)} micro-batches: pass at least {at_least}, better 8 "
            "or more."
        )
    shapes = [_shapes(batch) for batch in found]
    for index, of_batch in enumerate(shapes):
        if of_batch != shapes[0]:
            raise ValueError(
                "batches must have the same shapes, or their mean would weight them "
                f"wrongly: batch 0 has {shapes[0]} and batch {index} has {of_batch}."
            )
    return found


def require_scalar(loss_fn: LossFn, params: PyTree, batch: Any) -> None:
    """Refuse a loss function that does not return one scalar."""
    loss = jax.eval_shape(loss_fn, params, batch)
    if not jax.tree_util.all_leaves([loss]) or loss.shape:
        raise ValueError(
            f"loss_fn must return one scalar, the mean loss of the batch; it returns "
            f"{loss}."
        )


def _along_first(batches: Any) -> list[Any]:
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batches)}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(
            "batches must be a list of micro-batches, or a tree whose leaves count them "
            f"along their first axis: found leaves of shapes {_shapes(batches)}."
        )
    [(length,)] = lengths
    return [jax.tree.map(lambda leaf, i=i: leaf[i], batches) for i in range(length)]


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
