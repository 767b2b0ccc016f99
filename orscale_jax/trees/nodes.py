"""The nodes of a type in a tree, such as a state inside wrappers."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
from optax.transforms import PartitionState

from orscale_jax.trees.boxes import PyTree

# Labels of optax.partition; those of an outer partition come first.
Labels: TypeAlias = tuple[Any, ...]


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
