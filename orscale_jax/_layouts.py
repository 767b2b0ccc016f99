"""The order of an array's entries in memory."""

import math

import jax
from jax.experimental.layout import Layout, with_layout_constraint

_TILE = (8, 128)  # Of a TPU's memory: the last two axes are padded to multiples.


def as_tpus_store(x: jax.Array) -> jax.Array:
    """Keep an array in the layout that a parameter of its shape has on TPUs.

    That is the one of the last two axes' two orders that takes less padding. The compiler
    may otherwise take the order that suits a result, to which it turns all that the array
    is made of: the gradient and the momentum, in float32.
    """
    if x.ndim < 2:
        return x
    *batch, m, n = range(x.ndim)
    rows, columns = x.shape[-2:]
    turned = _padded(columns, rows) < _padded(rows, columns)
    order = (*batch, n, m) if turned else (*batch, m, n)
    return with_layout_constraint(x, Layout(order))


def _padded(*shape: int) -> int:
    pairs = zip(shape, _TILE, strict=True)
    return math.prod(math.ceil(size / tile) * tile for size, tile in pairs)
