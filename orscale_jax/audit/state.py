"""The abstract state of an optimizer: its arrays by parameter, and its matrices."""

import collections
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from orscale_jax import _checks
from orscale_jax._algorithm import ADAMW, MATRIX
from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.parameters.dimension_numbers import is_axes_leaf
from orscale_jax.transforms.first_update import FromFirstNonzeroUpdateState
from orscale_jax.transforms.initial_norm import InitialNormState
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import dotted
from orscale_jax.trees.nodes import nodes_of


class AbstractState(NamedTuple):
    """The state that an optimizer would have.

    Attributes:
      tree: The abstract state, without boxes.
      arrays: Its arrays, by the path of the parameter to which they belong; under None
        those that belong to no parameter.
    """

    tree: PyTree
    arrays: Mapping[Any, list[Any]]

    @classmethod
    def of(cls, optimizer: Any, params: PyTree) -> "AbstractState":
        """Trace an optimizer's ``init``.

        An array whose path ends in that of a parameter belongs to it.
        optax.tree.map_params would tell, too, but calls ``init`` with a placeholder
        that most label functions of :func:`optax.partition` cannot read.
        """
        if not callable(getattr(optimizer, "init", None)):
            _checks.refuse("optimizer", optimizer, "pass an Optax optimizer, or None")
        state = unbox(jax.eval_shape(optimizer.init, params))
        leaf_of = leaves_by_path(unbox(params))
        arrays = collections.defaultdict(list)
        for path, array in jax.tree_util.tree_leaves_with_path(state):
            ends = (path[i:] for i in range(len(path) + 1))
            owner = next((end for end in ends if end in leaf_of), None)
            if owner == () and array.shape != np.shape(leaf_of[()]):
                owner = None  # The only leaf has an empty path, in which all paths end.
            arrays[owner].append(array)
        return cls(state, arrays)

    def refuse_other_matrices(
        self, axes_of: Mapping[Any, LeafAxes], leaf_of: Mapping[Any, Any]
    ) -> None:
        """Refuse an optimizer of this library that has other matrices than these."""
        for path, theirs in _rules(self.tree):
            axes = axes_of.get(path)
            ours = None if axes is None else axes.batch_shape(leaf_of[path])
            if path in leaf_of and theirs != ours:
                raise ValueError(
                    f"parameter {dotted(path)!r} is {_rule(ours, theirs)} here and "
                    f"{_rule(theirs, ours)} in the optimizer: pass describe() the "
                    "weight_dimension_numbers that the optimizer was built with."
                )


# Every optimizer of this library has one of these nodes; the field has one entry per
# matrix.
_PER_MATRIX: dict[type, str] = {
    FromFirstNonzeroUpdateState: "started",
    InitialNormState: "initial_norm",
}


def _rules(state: PyTree) -> Iterator[tuple[Any, tuple[int, ...] | None]]:
    """For each parameter, the batch shape of its matrices, or None for AdamW."""
    for partition in nodes_of(state, optax.transforms.PartitionState):
        groups = partition.inner_states
        matrices = [
            getattr(node, field)
            for cls, field in _PER_MATRIX.items()
            for node in nodes_of(groups.get(MATRIX), cls)
        ]
        if not matrices:
            yield from _rules(tuple(groups.values()))
        for path, array in jax.tree_util.tree_leaves_with_path(matrices):
            yield path[1:], array.shape
        for group in (
            nodes_of(groups.get(ADAMW), optax.ScaleByAdamState) if matrices else ()
        ):
            for path, _ in jax.tree_util.tree_leaves_with_path(group.mu):
                yield path, None


def _rule(batch_shape: Any, other: Any) -> str:
    """A rule as the message calls it; batch shapes only where both are matrices."""
    if batch_shape is None:
        return "adamw"
    return "matrix" if other is None else f"matrices of batch shape {batch_shape}"


def leaves_by_path(tree: PyTree) -> dict[Any, Any]:
    """The leaves that are not masked, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_axes_leaf)
    return {path: leaf for path, leaf in leaves if not isinstance(leaf, optax.MaskedNode)}


def nbytes(arrays: Iterable[Any]) -> int:
    """The bytes of arrays, which may be abstract."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
