"""The rule for parameters without dimension numbers: by rank and by name."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.classes_by_name import VECTORS, ClassesByName
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import keys_on, listed, name_and_shape, names_on
from orscale_jax.trees.nodes import leaves_and_masks

_NO_MATRICES = (
    " Those marked with a class are no matrices, by their names: None for them, even if "
    "a rule for the others fits their shape."
)
_LINEN = "orscale_jax.flax.linen_dimension_numbers(module, *inputs)"
_NNX = "orscale_jax.flax.nnx_dimension_numbers(model)"
_LINEN_NAME = re.compile(r"[A-Z]\w*_\d+")  # Of a module without one, such as Dense_0.


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
    paths = [path for path, _ in leaves]
    marked = [_takes_adamw(path, names) for path in paths]
    ambiguous = [
        name_and_shape(path, leaf) + f" (class {names.layer_class(path)})" * mark
        for (path, leaf), mark in zip(leaves, marked, strict=True)
    ]
    raise ValueError(
        f"{listed(ambiguous)} ambiguous: more than two axes may be a stack of "
        "matrices, a convolution or a projection with heads. Pass "
        "weight_dimension_numbers with optax.contrib.MuonDimensionNumbers("
        "reduction_axis=..., output_axis=...) there, or None for AdamW, as for "
        "embeddings, heads, norms and biases; orscale_jax.by_path makes them from rules "
        "on paths." + _NO_MATRICES * any(marked) + _flax_function(paths)
    )


def _flax_function(paths: list[Any]) -> str:
    """The function that reads the axes off the modules, if the names are Flax's."""
    if all(keys_on(path)[-1:] != ("kernel",) for path in paths):
        return ""
    names = {name for path in paths for name in names_on(path)}
    linen = "params" in names or any(map(_LINEN_NAME.fullmatch, names))
    nnx = any(map(str.isdigit, names))  # An entry of a list, which Linen has none of.
    functions = [_LINEN] * (linen or not nnx) + [_NNX] * (nnx or not linen)
    return (
        f" If the model is Flax's, {' or '.join(functions)} takes all of this from the "
        "types of its modules."
    )


def check_dtype(path: Any, leaf: jax.Array) -> None:
    """Refuse integers and complex numbers as matrices."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"parameter {name_and_shape(path, leaf)} has dtype {leaf.dtype}, and only "
            "real floating-point matrices can be orthogonalized. Put None for it in "
            "weight_dimension_numbers, or keep it out with optax.masked."
        )
