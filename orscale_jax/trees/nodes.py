"""Nodes of trees: children, masked ones, those of a type; and notes for an audit."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar

import jax
import optax
from optax.transforms import PartitionState

from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import by_name, key_name, names_on

# Labels of optax.partition; those of an outer partition come first.
Labels: TypeAlias = tuple[Any, ...]
Value = TypeVar("Value")


class TraceLog(Generic[Value]):
    """What optimizers note while they are traced, for the audit that has opened it."""

    def __init__(self, name: str) -> None:
        self._found: ContextVar[list[Value] | None] = ContextVar(name, default=None)

    def note(self, value: Value) -> None:
        """Add a value to the innermost watch that is open in this context, if any."""
        if (notes := self._found.get()) is not None:
            notes.append(value)

    @contextlib.contextmanager
    def open(self) -> Iterator[list[Value]]:
        """Collect what is noted inside."""
        notes: list[Value] = []
        token = self._found.set(notes)
        try:
            yield notes
        finally:
            self._found.reset(token)


def children(node: Any) -> dict[str, Any]:
    """The children of a node by their names; none of a leaf."""
    pairs = jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node)
    return {key_name(path[0]): child for path, child in pairs if path}


def is_function(
    value: Any, is_leaf: Callable[[Any], bool]
) -> TypeGuard[Callable[[PyTree], PyTree]]:
    """Whether ``value`` makes a tree of such leaves; a callable module may be one."""
    if not callable(value):  # Nor can JAX flatten a mapping whose keys are patterns.
        return False
    leaves = jax.tree.leaves(value, is_leaf=is_leaf)
    return not (leaves and all(map(is_leaf, leaves)))


def is_masked(node: Any) -> bool:
    """Whether a node stands for a part of a tree that is left out."""
    return isinstance(node, optax.MaskedNode)


def is_absent(node: Any) -> bool:
    """Whether a node stands for no array: None, or masked."""
    return node is None or is_masked(node)


def leaves_and_masks(tree: PyTree) -> list[tuple[Any, Any]]:
    """The leaves and the masked nodes, each after its path."""
    return jax.tree.leaves_with_path(tree, is_leaf=is_masked)


def mask_like(
    other: PyTree, tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """Put masked nodes where another tree has them: what is given below is ignored."""
    masked = {path for path, x in by_name(tree, is_masked).items() if is_masked(x)}
    if not masked:
        return other
    return jax.tree.map_with_path(
        lambda path, node: optax.MaskedNode() if names_on(path) in masked else node,
        other,
        is_leaf=lambda path, node: (
            names_on(path) in masked or bool(is_leaf and is_leaf(node))
        ),
        is_leaf_takes_path=True,
    )


def broadcast_prefix(
    prefix: PyTree,
    tree: PyTree,
    misfit: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """What is given for a tree, or for a prefix of it, for each leaf of the tree."""
    structure: Any
    prefix, structure = jax.tree.flatten(mask_like(prefix, tree, is_leaf), is_leaf)
    try:  # Of numbers, at any mismatch: JAX's error would blame a leaf that is None.
        places = jax.tree.broadcast(structure.unflatten(range(len(prefix))), tree)
    except ValueError as error:
        raise ValueError(f"{misfit}: {error}") from error
    return jax.tree.map(prefix.__getitem__, places)


def nodes_of(tree: PyTree, *types: type) -> list[Any]:
    """The outermost nodes of these types."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, types))
    return [node for node in nodes if isinstance(node, types)]


def nodes_in_groups(
    tree: PyTree, *types: type, labels: Labels = ()
) -> Iterator[tuple[Labels, Any]]:
    """The outermost nodes of these types, each after the labels of the groups around."""
    for node in nodes_of(tree, PartitionState, *types):
        if isinstance(node, types):
            yield labels, node
        else:
            for label, group in node.inner_states.items():
                yield from nodes_in_groups(group, *types, labels=(*labels, label))
