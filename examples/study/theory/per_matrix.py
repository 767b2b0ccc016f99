"""Trees with one entry for each matrix as vectors, and trees like the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import _checks
from orscale_jax.diagnostics.summaries import vector
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import name_and_shape, quoted


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
