"""The rule for parameters without dimension numbers: by rank and by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.classes_by_name import VECTORS, ClassesByName
from orscale_jax.parameters.expressions import leaves_and_masks
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import listed, name_and_shape


def default_rule(
    tree: PyTree, decided: Callable[[Any], bool] = lambda path: False
) -> Callable[[Any, jax.Array], MatrixAxes | optax.MaskedNode]:
    """Make the rule for a tree: the axes of a leaf, given its path too.

    Args:
      tree: Bare parameters.
      decided: Whether another rule has decided the leaf of a path.

    Raises:
      ValueError: If leaves that are not decided have more than two axes (one error lists
        all of them). From the rule, if a matrix has no real floating-point dtype.
    """
    leaves = leaves_and_masks(tree)
    names = ClassesByName.of(leaves)
    _refuse_ambiguous(
        [(p, leaf) for p, leaf in leaves if np.ndim(leaf) > 2 and not decided(p)], names
    )

    def axes(path: Any, leaf: jax.Array) -> MatrixAxes | optax.MaskedNode:
        if np.ndim(leaf) < 2 or decided(path) or _takes_adamw(path, names):
            return optax.MaskedNode()
        check_dtype(path, leaf)
        return MatrixAxes(batch=(), rows=(0,), columns=(1,))

    return axes


def _takes_adamw(path: Any, names: ClassesByName) -> bool:
    return names.is_embedding_or_head(path) or names.layer_class(path) in VECTORS


def _refuse_ambiguous(leaves: list[tuple[Any, jax.Array]], names: ClassesByName) -> None:
    if not leaves:
        return
    ambiguous = [
        name_and_shape(path, leaf)
        + f" (class {names.layer_class(path)})" * _takes_adamw(path, names)
        for path, leaf in leaves
    ]
    raise ValueError(
        f"{listed(ambiguous)} ambiguous: more than two axes may be a stack of "
        "matrices, a convolution or a projection with heads. Pass "
        "weight_dimension_numbers with optax.contrib.MuonDimensionNumbers("
        "reduction_axis=..., output_axis=...) there, or None for AdamW, as for "
        "embeddings, heads, norms and biases; orscale_jax.by_path makes them from rules "
        "on paths."
    )


def check_dtype(path: Any, leaf: jax.Array) -> None:
    """Refuse integers and complex numbers as matrices."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"parameter {name_and_shape(path, leaf)} has dtype {leaf.dtype}, and only "
            "real floating-point matrices can be orthogonalized. Put None for it in "
            "weight_dimension_numbers, or keep it out with optax.masked."
        )
