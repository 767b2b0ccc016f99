"""The first place at which two trees differ, for error messages."""

from typing import Any, NamedTuple

import jax
import numpy as np

from orscale_jax.trees.names import Path, key_name


class Difference(NamedTuple):
    """Two nodes at one path, of different types or with different children."""

    path: Path
    wanted: Any
    found: Any

    def in_words(self, wanted_tree: str, found_tree: str) -> str:
        """The difference, given what the trees are, such as "the gradients"."""
        wanted, found = children(self.wanted), children(self.found)
        if type(self.wanted) is type(self.found):
            missing, surplus = (
                [_place((*self.path, key)) for key in these if key not in those]
                for these, those in ((wanted, found), (found, wanted))
            )
            if missing:
                return f"{missing[0]} is missing from {found_tree}"
            return f"{surplus[0]} is in {found_tree}, but not in {wanted_tree}"
        return (
            f"{_place(self.path)} is {_kind(self.found)} in {found_tree}, and "
            f"{_kind(self.wanted)} in {wanted_tree}"
        )


def first_difference(wanted: Any, found: Any, path: Path = ()) -> Difference | None:
    """The first node that differs in its type or in the names of its children.

    Shapes are not compared, nor the static fields of nodes.
    """
    mine, other = children(wanted), children(found)
    is_leaf = jax.tree_util.all_leaves
    if is_leaf([wanted]) and is_leaf([found]):
        return None
    if type(wanted) is not type(found) or mine.keys() != other.keys():
        return Difference(path, wanted, found)
    below = (first_difference(mine[key], other[key], (*path, key)) for key in mine)
    return next(filter(None, below), None)


def children(node: Any) -> dict[str, Any]:
    """The children of a node by their names; none of a leaf."""
    pairs = jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node)
    return {key_name(path[0]): child for path, child in pairs if path}


def _place(path: Path) -> str:
    return repr(".".join(path)) if path else "the root"


def _kind(node: Any) -> str:
    if node is None:
        return "None"
    if hasattr(node, "shape"):
        return f"an array of shape {np.shape(node)}"
    name = type(node).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
