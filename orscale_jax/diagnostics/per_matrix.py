"""Trees of a user: entries for each matrix as names and vectors; matrices gathered."""

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import _checks
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import distinct_names, name_and_shape, quoted
from orscale_jax.trees.nodes import is_function, is_masked, mask_like

OTHER = "other"

Classes: TypeAlias = PyTree | Callable[[PyTree], PyTree] | None


def names_of(tree: PyTree) -> list[str]:
    """The names of the matrices.

    ``blocks.0.up.kernel`` for a plain matrix, ``experts.up[3]`` and ``layers.up[2, 17]``
    for those of a stack.
    """
    # With masked leaves, which have names in the table of describe, too.
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_masked)
    names = distinct_names(path for path, _ in leaves)
    return [
        name + (str(list(index)) if index else "")
        for name, (_, array) in zip(names, leaves, strict=True)
        if not is_masked(array)
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
    if is_function(classes, is_label):
        _checks.refuse("classes", classes, "pass a tree, such as layer_classes(params)")
    if classes is None:
        return [OTHER] * len(jax.tree.leaves(tree))
    labels = class_labels(classes, tree, tree)
    # By the leaves of the tree, which may hold None beside them.
    return jax.tree.leaves(
        jax.tree.map(lambda _, label: OTHER if label is None else label, tree, labels)
    )


def class_labels(classes: Classes, params: PyTree, tree: PyTree) -> PyTree:
    """One label for each leaf of a tree: of the parameters, or of a part of them.

    Args:
      classes: A tree of strings like the tree (or None), a prefix of one, or a function
        from the parameters to one. None: one label for all.
      params: The parameters.
      tree: The tree.
    """
    if classes is None or not jax.tree.leaves(tree):
        # optax.tree.map_params passes a placeholder without leaves.
        return jax.tree.map(lambda _: "", tree)
    if is_function(classes, is_label):
        classes = classes(params)
    labels = mask_like(unbox(classes, is_label), tree, is_label)
    for label in jax.tree.leaves(labels, is_leaf=is_label):
        if not is_label(label):
            _checks.refuse("classes", label, "pass a tree of strings")

    try:
        return jax.tree.broadcast(labels, tree, is_leaf=is_label)
    except ValueError as error:
        raise ValueError(
            "classes must be a tree of the parameters' structure, or a prefix of it: "
            f"{error}"
        ) from error


def is_label(node: Any) -> bool:
    """Whether a node of a tree of labels is one, or None for none."""
    return node is None or isinstance(node, str)


def vector(leaves: list[Any]) -> jax.Array:
    """The entries of all leaves one after the other, whole on every device."""
    whole = (typed_sharding.gather(jnp.asarray(leaf)) for leaf in leaves)
    return jnp.concatenate([x.reshape(math.prod(x.shape)) for x in whole])


def vectors(**trees: PyTree) -> tuple[jax.Array, ...]:
    """Turn trees over the same matrices into vectors of all entries, in one order.

    Args:
      **trees: Arrays, or trees of arrays of any shape, by names for messages; None and
        :class:`optax.MaskedNode` hold no matrices.

    Returns:
      A vector for each tree: float64 if any leaf of any tree is, else float32.

    Raises:
      ValueError: If a tree holds other leaves or shapes than the first, or no real
        numbers.
    """
    leaves = {name: _leaves(name, tree) for name, tree in trees.items()}
    first, *others = leaves
    for other in others:
        _require_same(first, leaves[first], other, leaves[other])
    arrays = [list(by_path.values()) for by_path in leaves.values()]
    dtype = compute_dtype(arrays)
    return tuple(
        vector(of_tree).astype(dtype) if of_tree else jnp.zeros(0, dtype)
        for of_tree in arrays
    )


def whole_parts(matrices: Matrices, tree: PyTree) -> list[jax.Array]:
    """The parts of :meth:`Matrices.parts` in float32 or wider, without sharded matrices.

    Singular values need whole matrices, so matrices on Explicit axes are gathered.
    """
    wide = matrices.map(lambda _, leaf: leaf.astype(compute_dtype(leaf)), tree)
    return [
        typed_sharding.gather(part, (part.ndim - 2, part.ndim - 1))
        for part in matrices.parts(wide)
    ]


def matrices_like(
    argument: str, tree: PyTree, matrices: Matrices, params: PyTree
) -> PyTree:
    """The leaves of a tree where the parameters are matrices, masked elsewhere.

    Raises:
      ValueError: If the tree has another structure than the parameters, or other shapes.
    """
    try:
        arrays = matrices.leaves(unbox(tree))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{argument} must be a tree of the parameters' structure: {error}"
        ) from error
    pairs = zip(matrices.paths, matrices.leaves(unbox(params)), strict=True)
    for array, (path, param) in zip(arrays, pairs, strict=True):
        if not _is_array(array) or np.shape(array) != np.shape(param):
            found = f"shape {np.shape(array)}" if _is_array(array) else repr(array)
            raise ValueError(
                f"{argument} has {found} for parameter {name_and_shape(path, param)}: "
                "pass a tree of arrays like the parameters."
            )
    return matrices.tree_of(list(map(jnp.asarray, arrays)))


def _is_array(given: Any) -> bool:
    return isinstance(given, jax.Array | np.ndarray | np.generic | float | int)


def _leaves(name: str, tree: PyTree) -> dict[Any, jax.Array]:
    found = jax.tree.leaves_with_path(unbox(tree))
    for path, leaf in found:
        dtype = jnp.result_type(leaf)
        if not _checks.is_real(dtype):
            raise ValueError(
                f"{name}: {quoted(path)} has dtype {dtype}: pass real numbers, one for "
                "each matrix."
            )
    return {path: jnp.asarray(leaf) for path, leaf in found}


def _require_same(
    first: str, expected: dict[Any, jax.Array], other: str, found: dict[Any, jax.Array]
) -> None:
    if unmatched := [*(expected.keys() ^ found.keys())]:
        holder = first if unmatched[0] in expected else other
        raise ValueError(
            f"{first} and {other} must have the same matrices: {len(unmatched)} leaves, "
            f"such as {quoted(unmatched[0])} in {holder}, are in one of them only."
        )
    for path, leaf in expected.items():
        shape = np.shape(found[path])
        if shape != leaf.shape:
            raise ValueError(
                f"{first} and {other} must have the same shapes, one entry for each "
                f"matrix: {quoted(path)} is of shape {leaf.shape} in {first} and {shape} "
                f"in {other}."
            )
