"""The journeys of :mod:`orscale_jax._placement`, made on every device by itself.

All of this runs where the mesh's axes are manual: shapes are those of one device.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from orscale_jax._placement import Journey, Sharded, devices, plan


def map_matrices(
    fn: Callable[[jax.Array], jax.Array],
    shards: Sequence[jax.Array],
    arrays: Sequence[Sharded],
    sizes: Mapping[str, int],
    max_bytes: int,
) -> list[jax.Array]:
    """``fn`` of every matrix, each on one device.

    Args:
      fn: As for :func:`orscale_jax._stacking.map_stacks`.
      shards: What this device has of each array.
      arrays: The whole arrays.
      sizes: The lengths of the mesh's axes.
      max_bytes: As for :func:`orscale_jax._placement.plan`.

    Returns:
      What this device has of the results.
    """
    found: dict[int, jax.Array] = {}
    for journey in plan(arrays, sizes, max_bytes):
        stack = jnp.concatenate(
            [_stacked(shards[i], arrays[i], journey) for i in journey.members]
        )
        whole = _to_owners(stack, journey, sizes)
        results = _to_pieces(fn(whole), journey, sizes)
        start = 0
        for i in journey.members:
            matrices = math.prod(shards[i].shape[:-2])
            part = results[start : start + matrices]
            found[i] = _oriented(part, arrays[i], journey).reshape(shards[i].shape)
            start += matrices
    return [found[i] for i in range(len(shards))]


def _stacked(shard: jax.Array, array: Sharded, journey: Journey) -> jax.Array:
    """One axis for all batches."""
    shard = _oriented(shard, array, journey)
    return shard.reshape(math.prod(shard.shape[:-2]), *shard.shape[-2:])


def _oriented(x: jax.Array, array: Sharded, journey: Journey) -> jax.Array:
    """To the journey's orientation, or back."""
    return x if array.shape[-2:] == journey.shape else x.mT


def _to_owners(stack: jax.Array, journey: Journey, sizes: Mapping[str, int]) -> jax.Array:
    """Pieces of all matrices to whole matrices of this device, with zeros at the end."""
    places = journey.rounds * journey.owners
    stack = jnp.pad(stack, [(0, places - len(stack)), (0, 0), (0, 0)])
    if journey.copies:
        share = places * journey.pieces // journey.owners
        start = jax.lax.axis_index(journey.copies) * share
        stack = jax.lax.dynamic_slice_in_dim(stack, start, share)
    if journey.pieces == 1:
        return stack
    rows, columns = (devices(axes, sizes) for axes in (journey.rows, journey.columns))
    m, n = stack.shape[-2:]
    pieces = stack.reshape(journey.pieces, journey.rounds, m, n)
    pieces = _all_to_all(pieces, journey).reshape(rows, columns, -1, m, n)
    return pieces.transpose(2, 0, 3, 1, 4).reshape(-1, *journey.shape)


def _to_pieces(whole: jax.Array, journey: Journey, sizes: Mapping[str, int]) -> jax.Array:
    """The inverse of :func:`_to_owners`."""
    if journey.pieces > 1:
        rows, columns = (devices(axes, sizes) for axes in (journey.rows, journey.columns))
        m, n = journey.shape[0] // rows, journey.shape[1] // columns
        pieces = whole.reshape(-1, rows, m, columns, n).transpose(1, 3, 0, 2, 4)
        pieces = _all_to_all(pieces.reshape(journey.pieces, -1, m, n), journey)
        whole = pieces.reshape(-1, m, n)
    if journey.copies:
        whole = jax.lax.all_gather(whole, journey.copies, tiled=True)
    return whole


def _all_to_all(pieces: jax.Array, journey: Journey) -> jax.Array:
    """One to each device, in the order of the axes; one from each."""
    axes = journey.rows + journey.columns
    return jax.lax.all_to_all(pieces, axes, split_axis=0, concat_axis=0)
