"""Matrices that are whole on every device, from trees that a user passes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import name_and_shape


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
