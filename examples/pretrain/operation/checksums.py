"""A checksum of every array of a tree, computed where the array lies.

A storage layer may give back zeros for a chunk whose file is gone, or other numbers for a
file with wrong bits, without an error.
"""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
# By bytes of an entry; 8 bytes are two entries.
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def checksums(tree: PyTree) -> dict[str, int]:
    """The checksums by path, the same for any sharding of the arrays."""
    sums = jax.device_get(_checksums(jax.tree.leaves(tree)))
    paths = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree.leaves_with_path(tree)
    ]
    return {path: int(sum_) for path, sum_ in zip(paths, sums, strict=True)}


@jax.jit
def _checksums(leaves: list[jax.Array]) -> list[jax.Array]:
    return [_checksum(leaf) for leaf in leaves]


def _checksum(x: jax.Array) -> jax.Array:
    """The sum of a hash of each entry's bits and place, mod 2³².

    The hash tells all bits apart: another value of one entry is always seen.
    """
    if x.dtype != bool:
        x = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    place = jnp.zeros((), jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        along = jnp.arange(x.shape[axis], dtype=jnp.uint32) * jnp.uint32(stride % 2**32)
        place = place + along.reshape(-1, *(1,) * (x.ndim - 1 - axis))
        stride *= x.shape[axis]
    return jnp.sum(_hash(x.astype(jnp.uint32) ^ _hash(place)), dtype=jnp.uint32)


def _hash(x: jax.Array) -> jax.Array:
    """A permutation of the 32-bit integers: the last steps of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
