"""The trees like the parameters in the state of an optimizer, found by its types."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import optax
from optax.transforms import MaskedState, PartitionState

from orscale_jax.transforms.matrices import ADAMW, MATRIX
from orscale_jax.transforms.relatives import InitialNormState
from orscale_jax.transforms.stages import FromFirstNonzeroUpdateState
from orscale_jax.transforms.trust_ratio import CalibratedTrustRatioState
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.nodes import is_masked, nodes_of

Rule: TypeAlias = Literal["matrix", "adamw", "other", "stateless"]
STATELESS: Rule = "stateless"
OTHER: Rule = "other"
#: A parameter that several trees of the state have takes the last of their rules.
RULES: tuple[Rule, ...] = (STATELESS, OTHER, "adamw", "matrix")

# The states that only matrices of this library have; the field has one entry per matrix.
_PER_MATRIX: dict[type, str] = {
    FromFirstNonzeroUpdateState: "started",
    InitialNormState: "initial_norm",
    CalibratedTrustRatioState: "trust_ratio",
}


class StateTree(NamedTuple):
    """A tree like the parameters in a state, or an array that is no parameter's.

    Attributes:
      arrays: The arrays by the path of their parameter, or under None.
      rule: Which optimizer keeps them; "stateless" for gradients that a wrapper adds up.
      label: The labels of the user's partitions around it, such as ``"decoder/frozen"``.
      scope: A number of the innermost mask around it; 0 outside of all.
    """

    arrays: Mapping[Any, list[Any]]
    rule: Rule = OTHER
    label: str = ""
    scope: int = 0


_OUTSIDE = StateTree({})


def state_trees(
    node: Any, params: PyTree, around: StateTree = _OUTSIDE
) -> Iterator[StateTree]:
    """The trees in a state, each with the parameters that are not masked in it.

    Args:
      node: The state, or a part of it.
      params: The parameters, without boxes.
      around: The rule, label and scope of the part.
    """
    if isinstance(node, PartitionState):
        ours = _is_ours(node)
        for key, group in node.inner_states.items():
            rule: Rule = key if ours else around.rule
            label = around.label if ours else _joined(around.label, key)
            inside = around._replace(rule=rule, label=label)
            yield from state_trees(group, params, inside)
        return
    if isinstance(node, MaskedState):
        around = around._replace(scope=id(node))
    if isinstance(node, tuple(_PER_MATRIX)):
        around = around._replace(rule="matrix")
    if isinstance(node, optax.MultiStepsState):
        summed = around._replace(rule=STATELESS)
        yield from state_trees(node.acc_grads, params, summed)
        node = node._replace(acc_grads=None)
    yield from _plain_trees(node, params, around)


def _plain_trees(node: Any, params: PyTree, around: StateTree) -> Iterator[StateTree]:
    """The trees in a node that is no wrapper of Optax's."""
    like = _like(params, node)
    if like and () in like and getattr(node, "shape", None) != params.shape:
        like = None  # Of a single array without a name, only the shape tells its state.
    if like is not None and all(map(_is_array, like.values())):
        yield around._replace(arrays={path: [array] for path, array in like.items()})
        return
    children, _ = _children(node)
    if () in children:  # It is a leaf.
        yield around._replace(arrays={None: [node]})
        return
    inside = (state_trees(child, params, around) for child in children.values())
    found = [*itertools.chain(*inside)]
    # A state may keep several arrays for a parameter, in a node of one type.
    several = like and len({*map(type, like.values())}) == 1
    if like and several and all(None in tree.arrays for tree in found):
        leaves = {path: jax.tree.leaves(part) for path, part in like.items()}
        found = [around._replace(arrays=leaves)]
    yield from found


def batch_shapes(state: Any, params: PyTree) -> dict[Any, tuple[int, ...]]:
    """The batch shapes of the matrices of this library, by path."""
    trees = [
        _like(params, getattr(node, field)) or {}
        for cls, field in _PER_MATRIX.items()
        for node in nodes_of(state, cls)
    ]
    return {path: array.shape for tree in trees for path, array in tree.items()}


def groups_of(state: Any, trees: Iterable[StateTree]) -> tuple[frozenset[str], str]:
    """The innermost groups of the user's partitions, in a state that has these trees.

    Returns:
      Their labels, and that of a parameter without state: the labels of all groups that
      keep none for some of their parameters.
    """
    keeping = {tree.label for tree in trees if None not in tree.arrays}
    groups = list(_groups(state))
    without = [label for label, masked in groups if masked or label not in keeping]
    names = dict.fromkeys(label or "no label" for label in without)
    labels = frozenset(label for label, _ in groups if label)
    return labels, " or ".join(names) if any(without) else ""


def _groups(node: Any, label: str = "") -> Iterator[tuple[str, bool]]:
    """The innermost groups of partitions; and what is around masks, with True."""
    for found in nodes_of(node, PartitionState, MaskedState):
        if isinstance(found, MaskedState):
            yield label, True
            yield from _groups(found.inner_state, label)
        elif not _is_ours(found):
            for key, group in found.inner_states.items():
                inner = _joined(label, key)
                yield from [*_groups(group.inner_state, inner)] or [(inner, False)]


def _is_ours(partition: PartitionState) -> bool:
    """Whether an optimizer of this library made a partition."""
    groups = partition.inner_states
    if {*groups} != {MATRIX, ADAMW}:
        return False
    found = nodes_of(groups[MATRIX], PartitionState, *_PER_MATRIX)
    return bool(found) and not isinstance(found[0], PartitionState)


def _joined(label: str, key: Any) -> str:
    return f"{label}/{key}" if label else str(key)


def _like(params: PyTree, node: Any, path: Any = ()) -> dict[Any, Any] | None:
    """What a tree like the parameters has for each that is not masked; None if unlike."""
    if is_masked(node):
        return {}
    children, structure = _children(params)
    if () in children:  # It is a leaf.
        return {} if node is None else {path: node}
    theirs, other = _children(node)
    if structure != other:
        return None
    parts = [_like(children[key], theirs[key], (*path, *key)) for key in children]
    if any(part is None for part in parts):
        return None
    return {path: leaf for part in parts for path, leaf in (part or {}).items()}


def _children(node: Any) -> tuple[dict[Any, Any], Any]:
    """The children of a node, by key, and its structure."""
    children, structure = jax.tree.flatten_with_path(
        node, is_leaf=lambda other: other is not node
    )
    return dict(children), structure


def _is_array(node: Any) -> bool:
    return hasattr(node, "shape") and hasattr(node, "dtype")
