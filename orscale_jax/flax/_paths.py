"""Paths of parameters in trees that may hold variables or boxes."""

from typing import Any

import jax
from flax import nnx
from flax.core import meta

from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, names_on


def by_path(tree: PyTree) -> dict[Path, Any]:
    """The variables, boxes and arrays of a tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_holder)
    return {names_on(entries): leaf for entries, leaf in leaves}


def is_holder(node: Any) -> bool:
    """Whether ``node`` holds one parameter: a variable of NNX or a box of Linen."""
    return isinstance(node, nnx.Variable) or meta.is_axis_metadata(node)
