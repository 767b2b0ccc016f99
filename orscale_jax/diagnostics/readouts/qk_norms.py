"""Norms of query and key heads, whose products bound the attention logits."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orscale_jax.transforms.matrices import compute_dtype
from orscale_jax.transforms.qk_clip import (
    Attentions,
    Place,
    check_attentions,
    find_attentions,
    named_leaves,
)
from orscale_jax.trees.boxes import PyTree, unbox


class QKNorms(NamedTuple):
    """Frobenius norms of the heads of one attention module."""

    #: Norms of the queries, with rotated parts, of shape (layers..., query heads).
    query: jax.Array
    #: Norms of the keys, of shape (layers..., key heads).
    key: jax.Array


def qk_norms(params: PyTree, attentions: Attentions) -> PyTree:
    r"""Measure the norm of every query head and every key head.

    :math:`|q_h \cdot k_h| \le \|x\| \|y\| \|W_{q,h}\|_F \|W_{k,h}\|_F` for inputs x of
    the query and y of the key, but for biases and parts that are shared or rotated: the
    logits of heads whose norms grow may explode; :func:`orscale_jax.qk_clip` prevents
    that. This
    function costs one pass over these parameters, inside or outside of ``jax.jit``.

    Args:
      params: The parameters.
      attentions: See :func:`orscale_jax.qk_clip`.

    Returns:
      A tree like ``attentions``, with :class:`QKNorms` for each
      :class:`orscale_jax.QueryKey`.

    Raises:
      ValueError: If a name matches no parameter or heads do not fit, as in
        :func:`orscale_jax.qk_clip`.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import QueryKey, diagnostics
      >>> params = {  # 4 inputs, 2 heads of 3 features
      ...     "query": {"kernel": jnp.ones((4, 2, 3))},
      ...     "key": {"kernel": jnp.ones((4, 2, 3))},
      ... }
      >>> norms = diagnostics.qk_norms(params, QueryKey("query.kernel", "key.kernel"))
      >>> print(norms.query.round(3))
      [3.464 3.464]
    """
    if not callable(attentions):
        check_attentions(attentions)
    bare = unbox(params)
    modules, structure = find_attentions(attentions, bare)
    leaves = {name: found[0] for name, found in named_leaves(bare).items()}
    norms = [
        QKNorms(
            _norms(attention.query + attention.rotary_query, leaves),
            _norms(attention.key, leaves),
        )
        for attention in modules
    ]
    return structure.unflatten(norms)


def _norms(places: Sequence[Place], leaves: dict[str, jax.Array]) -> jax.Array:
    squares = [_squares(place, jnp.asarray(leaves[place.name])) for place in places]
    return jnp.sqrt(jnp.sum(jnp.stack(squares), axis=0))


def _squares(place: Place, leaf: jax.Array) -> jax.Array:
    """The sum of squares of each head, of shape (layers..., heads)."""
    kept = (*place.layer_axes, place.axis)
    others = tuple(axis for axis in range(leaf.ndim) if axis not in kept)
    squares = jnp.square(jnp.where(place.mask, leaf.astype(compute_dtype(leaf)), 0))
    in_order = sorted(kept)
    sums = jnp.sum(squares, axis=others).transpose(
        [in_order.index(axis) for axis in kept]
    )
    heads = jax.nn.one_hot(place.head_at, place.heads, dtype=sums.dtype)
    return jnp.matmul(sums, heads, precision=jax.lax.Precision.HIGHEST)
