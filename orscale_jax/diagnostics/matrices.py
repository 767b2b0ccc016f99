"""Names, classes and vectors of the matrices in trees with one entry per matrix."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax import _checks
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.pooled_ratio import class_labels
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import distinct_names

OTHER = "other"


def names_of(tree: PyTree) -> list[str]:
    """The names of the matrices.

    ``blocks.0.up.kernel`` for a plain matrix, ``experts.up[3]`` and ``layers.up[2, 17]``
    for those of a stack.
    """
    # With masked leaves, which have names in the table of describe, too.
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )
    names = distinct_names(path for path, _ in leaves)
    return [
        name + (str(list(index)) if index else "")
        for name, (_, array) in zip(names, leaves, strict=True)
        if not isinstance(array, optax.MaskedNode)
        for index in np.ndindex(np.shape(array))
    ]


def leaf_of(name: str) -> str:
    """The name of a parameter, without the index of a matrix or the place of a block."""
    return re.sub(r"\[[\d, :]*\]$", "", name)


def classes_of(classes: PyTree | None, tree: PyTree) -> list[str]:
    """The class of each leaf.

    Args:
      classes: Tree of strings (None for "other") like the parameters, or a prefix of one.
        None: all are "other".
      tree: The tree with one entry per matrix.
    """
    if callable(classes):
        _checks.refuse("classes", classes, "pass a tree, such as layer_classes(params)")
    if classes is None:
        return [OTHER] * len(jax.tree.leaves(tree))
    labels = class_labels(classes, tree, tree)
    leaves = jax.tree.leaves(labels, is_leaf=lambda node: node is None)
    return [OTHER if label is None else label for label in leaves]


def vector(leaves: list[Any]) -> jax.Array:
    """The entries of all leaves one after the other, whole on every device."""
    arrays = map(jnp.asarray, leaves)
    whole = (typed_sharding.gather(x, tuple(range(x.ndim))) for x in arrays)
    return jnp.concatenate([x.reshape(math.prod(x.shape)) for x in whole])
