"""Trees for a whole model, beside a part of it in which nodes are masked."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import names_on


def mask_like(
    given: PyTree, tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """Put masked nodes where another tree has them: what is given below is ignored.

    :func:`optax.partition` and :func:`optax.masked` mask whole subtrees if their labels
    are prefixes, and what is given for the parameters has nothing there to belong to.
    """
    nodes = leaves_and_masks(tree)
    masked = {names_on(path) for path, node in nodes if is_masked(node)}
    if not masked:
        return given
    return jax.tree.map_with_path(
        lambda path, node: optax.MaskedNode() if names_on(path) in masked else node,
        given,
        is_leaf=lambda path, node: (
            names_on(path) in masked or bool(is_leaf and is_leaf(node))
        ),
        is_leaf_takes_path=True,
    )


def leaves_and_masks(tree: PyTree) -> list[tuple[Any, Any]]:
    """The leaves and the masked nodes, each after its path."""
    return jax.tree.leaves_with_path(tree, is_leaf=is_masked)


def is_masked(node: Any) -> bool:
    """Whether a node stands for a part of a tree that is left out."""
    return isinstance(node, optax.MaskedNode)
