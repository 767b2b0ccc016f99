"""The journeys of :mod:`orscale_jax._placement`, made on every device by itself.

All of this runs where the mesh's axes are manual: shapes are those of one device.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from orscale_jax._placement import Journey, Leg, Part, Sharded, devices, plan
from orscale_jax._precision import Columns


def map_matrices(
    fn: Callable[..., jax.Array],
    shards: Sequence[jax.Array],
    arrays: Sequence[Sharded],
    sizes: Mapping[str, int],
    max_bytes: int,
) -> list[jax.Array]:
    """``fn`` of every matrix, each on one device or on a few.

    Args:
      fn: As for :func:`orscale_jax._stacking.map_stacks`. It keeps zeros, and of a matrix
        that this device has some columns of it takes ``columns=``, the devices that have
        them.
      shards: What this device has of each array.
      arrays: The whole arrays.
      sizes: The lengths of the mesh's axes.
      max_bytes: As for :func:`orscale_jax._placement.plan`.

    Returns:
      What this device has of the results.
    """
    found: dict[Part, jax.Array] = {}
    for journey in plan(arrays, sizes, max_bytes):
        found |= _through(fn, shards, journey, sizes)
    results = []
    for index, shard in enumerate(shards):
        parts = [found[part] for part in sorted(found) if part.array == index]
        result = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        results.append(result.reshape(shard.shape))
    return results


def _through(
    fn: Callable[..., jax.Array],
    shards: Sequence[jax.Array],
    journey: Journey,
    sizes: Mapping[str, int],
) -> dict[Part, jax.Array]:
    stack = jnp.concatenate(
        [_pieces(shards, leg, journey, sizes) for leg in journey.legs]
    )
    whole = _to_owners(stack, journey, sizes)
    if journey.sharers == 1:
        results = fn(whole)
    else:
        axes = journey.copies + journey.axes
        columns = Columns(axes, journey.owners, journey.sharers)
        results = fn(whole[0], columns=columns)[None]
    pieces = _to_pieces(results, journey, sizes)
    found: dict[Part, jax.Array] = {}
    first = 0
    for leg in journey.legs:
        ours = pieces[first : first + leg.matrices * journey.sharers]
        found |= _parts(ours, shards, leg, journey, sizes)
        first += len(ours)
    return found


def _pieces(
    shards: Sequence[jax.Array], leg: Leg, journey: Journey, sizes: Mapping[str, int]
) -> jax.Array:
    """What this device has of a leg's matrices, of the shape that they travel in."""
    m, n = _piece_shape(leg, journey, sizes)
    padded = []
    for part in leg.parts:
        shard = shards[part.array]
        x = shard.reshape(math.prod(shard.shape[:-2]), *shard.shape[-2:])
        x = x[part.start : part.stop]
        x = x.mT if part.transposed else x
        # Zeros among rows and columns change nothing in the others' results.
        padded.append(jnp.pad(x, [(0, 0), (0, m - x.shape[-2]), (0, n - x.shape[-1])]))
    pieces = _columns_apart(jnp.concatenate(padded), journey.sharers)
    return _long_side_last(pieces).reshape(-1, *_travelling_shape(journey, sizes))


def _parts(
    pieces: jax.Array,
    shards: Sequence[jax.Array],
    leg: Leg,
    journey: Journey,
    sizes: Mapping[str, int],
) -> dict[Part, jax.Array]:
    """The inverse of :func:`_pieces`."""
    pieces = _upright(pieces, leg, journey, sizes)
    padded = _columns_together(pieces, journey.sharers)
    found, first = {}, 0
    for part in leg.parts:
        *_, rows, columns = shards[part.array].shape
        if part.transposed:
            rows, columns = columns, rows
        x = padded[first : first + part.matrices, :rows, :columns]
        found[part] = x.mT if part.transposed else x
        first += part.matrices
    return found


def _piece_shape(leg: Leg, journey: Journey, sizes: Mapping[str, int]) -> tuple[int, int]:
    m, n = journey.shape
    return m // devices(leg.rows, sizes), n // devices(leg.columns, sizes)


def _travelling_shape(journey: Journey, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Of a piece: that of the first leg. The others' have as many entries."""
    m, n = _piece_shape(journey.legs[0], journey, sizes)
    short, long = sorted((m, n // journey.sharers))
    return short, long


def _long_side_last(x: jax.Array) -> jax.Array:
    """As a TPU stores it without padding, when pieces of several shapes become one's."""
    return x if x.shape[-2] <= x.shape[-1] else x.mT


def _upright(
    pieces: jax.Array, leg: Leg, journey: Journey, sizes: Mapping[str, int]
) -> jax.Array:
    """Pieces that travelled, ``(k, m, n)`` again."""
    m, n = _piece_shape(leg, journey, sizes)
    n //= journey.sharers
    return pieces.reshape(-1, m, n) if m <= n else pieces.reshape(-1, n, m).mT


def _to_owners(stack: jax.Array, journey: Journey, sizes: Mapping[str, int]) -> jax.Array:
    """Pieces of all matrices to whole matrices of this device, or to columns of them.

    The last owners get zeros.
    """
    places = journey.rounds * journey.owners
    stack = jnp.pad(stack, [(0, places - len(stack)), (0, 0), (0, 0)])
    if journey.copies:
        share = places * journey.pieces // journey.owners
        start = jax.lax.axis_index(journey.copies) * share
        stack = jax.lax.dynamic_slice_in_dim(stack, start, share)
    if journey.pieces == 1:
        return stack
    pieces = stack.reshape(journey.pieces, journey.rounds, *stack.shape[1:])
    pieces = _all_to_all(pieces, journey)
    wholes = [_whole(pieces, leg, journey, sizes) for leg in journey.legs]
    return _of_this_leg(wholes, journey)


def _to_pieces(whole: jax.Array, journey: Journey, sizes: Mapping[str, int]) -> jax.Array:
    """The inverse of :func:`_to_owners`, zeros included."""
    if journey.pieces > 1:
        m, n = _travelling_shape(journey, sizes)
        in_pieces = [
            _in_pieces(whole, leg, journey, sizes).reshape(journey.pieces, -1, m, n)
            for leg in journey.legs
        ]
        pieces = _all_to_all(_of_this_leg(in_pieces, journey), journey)
        whole = pieces.reshape(-1, m, n)
    if journey.copies:
        whole = jax.lax.all_gather(whole, journey.copies, tiled=True)
    return whole


def _of_this_leg(found: Sequence[jax.Array], journey: Journey) -> jax.Array:
    """What was found for the leg that this device's matrix comes by."""
    result, first = found[0], 0
    for leg, other in zip(journey.legs, found[1:], strict=False):
        first += leg.matrices * journey.sharers
        owner = jax.lax.axis_index(journey.copies + journey.axes)
        result = jnp.where(owner < first, result, other)
    return result


def _whole(
    pieces: jax.Array, leg: Leg, journey: Journey, sizes: Mapping[str, int]
) -> jax.Array:
    """A matrix from one piece of each device, or the columns that are sent."""
    pieces = _upright(pieces, leg, journey, sizes)
    lengths = [sizes[name] for name in journey.axes]
    pieces = pieces.reshape(*lengths, journey.rounds, *pieces.shape[1:])
    whole = pieces.transpose(_order(leg, journey))
    return whole.reshape(journey.rounds, journey.shape[0], -1)


def _in_pieces(
    whole: jax.Array, leg: Leg, journey: Journey, sizes: Mapping[str, int]
) -> jax.Array:
    """The inverse of :func:`_whole`."""
    m, n = _piece_shape(leg, journey, sizes)
    rows, columns = ([sizes[name] for name in axes] for axes in (leg.rows, leg.columns))
    pieces = whole.reshape(journey.rounds, *rows, m, *columns, n // journey.sharers)
    order = _order(leg, journey)
    back = sorted(range(len(order)), key=order.__getitem__)
    return _long_side_last(pieces.transpose(back))


def _order(leg: Leg, journey: Journey) -> tuple[int, ...]:
    """Of pieces ``(*axes, rounds, m, n)`` as ``(rounds, *rows, m, *columns, n)``."""
    rounds = len(journey.axes)
    rows, columns = (
        tuple(journey.axes.index(name) for name in axes)
        for axes in (leg.rows, leg.columns)
    )
    return (rounds, *rows, rounds + 1, *columns, rounds + 2)


def _columns_apart(x: jax.Array, count: int) -> jax.Array:
    """``(k, m, n)`` to ``(k · count, m, n / count)``."""
    if count == 1:
        return x
    k, m, n = x.shape
    return x.reshape(k, m, count, -1).swapaxes(1, 2).reshape(k * count, m, n // count)


def _columns_together(x: jax.Array, count: int) -> jax.Array:
    """The inverse of :func:`_columns_apart`."""
    if count == 1:
        return x
    k, m, n = x.shape
    return x.reshape(-1, count, m, n).swapaxes(1, 2).reshape(k // count, m, n * count)


def _all_to_all(pieces: jax.Array, journey: Journey) -> jax.Array:
    """One to each device, in the order of the axes; one from each."""
    return jax.lax.all_to_all(pieces, journey.axes, split_axis=0, concat_axis=0)
