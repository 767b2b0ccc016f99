"""The rule for parameters without dimension numbers: by rank and by name."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.trees.names import key_name, listed, name_and_shape, words

# Words in names of tables and heads, and words at the end of such names.
_WORDS = frozenset({"wte", "wpe", "emb", "vocab", "tok", "pos", "logits"})
_LAST_WORDS = frozenset({"head", "classifier"})


def default_axes(path: Any, leaf: jax.Array) -> MatrixAxes | optax.MaskedNode:
    """The axes of a leaf of at most two axes; fewer than two take AdamW."""
    if np.ndim(leaf) < 2 or any(names_embedding_or_head(key_name(key)) for key in path):
        return optax.MaskedNode()
    check_dtype(path, leaf)
    return MatrixAxes(batch=(), rows=(0,), columns=(1,))


def refuse_ambiguous(leaves: Iterable[tuple[Any, jax.Array]]) -> None:
    """Refuse leaves of more than two axes, all of them in one error."""
    ambiguous = [name_and_shape(path, leaf) for path, leaf in leaves if np.ndim(leaf) > 2]
    if ambiguous:
        raise ValueError(
            f"{listed(ambiguous)} ambiguous: more than two axes may be a stack of "
            "matrices, a convolution or a projection with heads. Pass "
            "weight_dimension_numbers with optax.contrib.MuonDimensionNumbers("
            "reduction_axis=..., output_axis=...) there, or None for AdamW; "
            "orscale_jax.by_path makes them from rules on paths."
        )


def names_embedding_or_head(key: str) -> bool:
    """Whether a key of a path is the name of an embedding table or an output head."""
    parts = words(key)
    return "embed" in key.lower() or bool(
        _WORDS.intersection(parts) or _LAST_WORDS.intersection(parts[-1:])
    )


def check_dtype(path: Any, leaf: jax.Array) -> None:
    """Refuse integers and complex numbers as matrices."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"parameter {name_and_shape(path, leaf)} has dtype {leaf.dtype}, and only "
            "real floating-point matrices can be orthogonalized. Put None for it in "
            "weight_dimension_numbers, or keep it out with optax.masked."
        )
