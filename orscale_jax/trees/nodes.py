"""The nodes of a type in a tree, such as a state inside wrappers."""

from typing import Any

import jax

from orscale_jax.trees.boxes import PyTree


def nodes_of(tree: PyTree, *types: type) -> list[Any]:
    """The outermost nodes of these types."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, types))
    return [node for node in nodes if isinstance(node, types)]
