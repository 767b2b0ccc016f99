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
    nodes = jax.tree.leaves_with_path(tree, is_leaf=_is_mask)
    masked = {names_on(path) for path, node in nodes if _is_mask(node)}
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


def _is_mask(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
