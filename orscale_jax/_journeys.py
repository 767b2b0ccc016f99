"""The journeys of :mod:`orscale_jax._placement`, made on every device by itself.

All of this runs where the mesh's axes are manual: shapes are those of one device.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orscale_jax._columns import Columns
from orscale_jax._placement import Axes, Journey, Leg, Part, Sharded, devices, plan


def map_journeys(
    fn: Callable[..., Sequence[jax.Array]],
    shards: Sequence[jax.Array],
    arrays: Sequence[Sharded],
    sizes: Mapping[str, int],
    max_bytes: int,
) -> list[jax.Array]:
    """``fn`` of every matrix, each on one device or on a few.

    Args:
      fn: As for :func:`orscale_jax._stacking.map_stacks`, but of squares that do not turn
        not like their transposes. It keeps zeros, and takes ``columns=``, of each array
        the devices that have the other columns, if any.
      shards: What this device has of each array.
      arrays: The whole arrays.
      sizes: The lengths of the mesh's axes.
      max_bytes: As for :func:`orscale_jax._placement.plan`.

    Returns:
      What this device has of the results.
    """
    journeys = plan(arrays, sizes, max_bytes)
    ways = [[_Way(leg, journey, sizes) for leg in journey.legs] for journey in journeys]
    wholes = [
        _to_owners(jnp.concatenate([way.pieces(shards) for way in group]), group)
        for group in ways
    ]
    found: dict[Part, jax.Array] = {}
    for group, result in zip(ways, _of_stacks(fn, wholes, journeys), strict=True):
        pieces, first = _to_pieces(result, group), 0
        for way in group:
            ours = pieces[first : first + way.leg.places]
            found |= way.parts(ours, shards)
            first += way.leg.places
    results = []
    for index, shard in enumerate(shards):
        parts = [found[part] for part in sorted(found) if part.array == index]
        result = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        results.append(result.reshape(shard.shape))
    return results


def _of_stacks(
    fn: Callable[..., Sequence[jax.Array]],
    wholes: Sequence[jax.Array],
    journeys: Sequence[Journey],
) -> list[jax.Array]:
    """``fn`` of all stacks, of which large ones are neighbours of large ones."""
    order = sorted(range(len(wholes)), key=lambda i: -wholes[i].size)
    # A shared matrix is no batch.
    stacks = [wholes[i][0] if journeys[i].sharers > 1 else wholes[i] for i in order]
    columns = [_columns(journeys[i]) for i in order]
    results = dict(zip(order, fn(stacks, columns=columns), strict=True))
    return [results[i].reshape(whole.shape) for i, whole in enumerate(wholes)]


def _columns(journey: Journey) -> Columns | None:
    """Who has the other columns of what a device has of a matrix."""
    if journey.sharers == 1:
        return None
    axes = journey.copies + journey.axes
    return Columns(axes, journey.owners, journey.sharers, journey.shared_places)


class _Way(NamedTuple):
    """How the pieces of a leg's matrices get to their owners and back."""

    leg: Leg
    journey: Journey
    sizes: Mapping[str, int]

    @property
    def piece(self) -> tuple[int, int]:
        """The shape of what a device has of a matrix."""
        m, n = self.sent
        return m, n * self.leg.sharers

    @property
    def sent(self) -> tuple[int, int]:
        """The shape of what it sends to each owner."""
        m, n = self.journey.shape
        rows, columns = self.leg.rows, self.leg.columns
        return m // devices(rows, self.sizes), n // devices(columns, self.sizes)

    @property
    def is_turned(self) -> bool:
        """Where pieces of two shapes take one for the way, a TPU would pad short axes."""
        m, n = self.sent
        return len({leg.axes for leg in self.journey.legs}) > 1 and m > n

    @property
    def sides(self) -> list[tuple[Axes, int]]:
        """The axes over which each side is sharded and what is sent of it, as turned."""
        m, n = self.sent
        sides = [(self.leg.rows, m), (self.leg.columns, n)]
        return sides[::-1] if self.is_turned else sides

    @property
    def common_shape(self) -> list[int]:
        """That pieces of all legs travel in: the first's, as turned."""
        first = self._replace(leg=self.journey.legs[0])
        return [length for _, length in first.sides]

    @property
    def order(self) -> list[int]:
        """Of pieces ``(*axes, rounds, m, n)`` as ``(rounds, *rows, m, *columns, n)``."""
        axes = self.journey.axes
        (first, _), (last, _) = self.sides
        rounds, m, n = range(len(axes), len(axes) + 3)
        return [rounds, *map(axes.index, first), m, *map(axes.index, last), n]

    def pieces(self, shards: Sequence[jax.Array]) -> jax.Array:
        """What this device has of the matrices, ready to be sent."""
        m, n = self.piece
        padded = []
        for part in self.leg.parts:
            shard = shards[part.array]
            x = shard.reshape(math.prod(shard.shape[:-2]), *shard.shape[-2:])
            x = x[part.start : part.stop]
            x = x.mT if part.transposed else x
            # Zeros among rows and columns change nothing in the others' results.
            pad = [(0, 0), (0, m - x.shape[-2]), (0, n - x.shape[-1])]
            padded.append(jnp.pad(x, pad))
        x = jnp.concatenate(padded)
        x = x.reshape(len(x), m, self.leg.sharers, -1).swapaxes(1, 2)
        return self.common(x.reshape(-1, *self.sent))

    def parts(
        self, pieces: jax.Array, shards: Sequence[jax.Array]
    ) -> dict[Part, jax.Array]:
        """The inverse of :meth:`pieces`."""
        x = self.own(pieces)
        x = x.reshape(-1, self.leg.sharers, *self.sent).swapaxes(1, 2)
        x = x.reshape(-1, *self.piece)
        found, first = {}, 0
        for part in self.leg.parts:
            *_, rows, columns = shards[part.array].shape
            if part.transposed:
                rows, columns = columns, rows
            matrices = x[first : first + part.matrices, :rows, :columns]
            found[part] = matrices.mT if part.transposed else matrices
            first += part.matrices
        return found

    def common(self, pieces: jax.Array) -> jax.Array:
        """Pieces ``(k, m, n)`` in the shape that those of all legs travel in."""
        turned = pieces.mT if self.is_turned else pieces
        return turned.reshape(-1, *self.common_shape)

    def own(self, pieces: jax.Array) -> jax.Array:
        """The inverse of :meth:`common`."""
        turned = pieces.reshape(-1, *(length for _, length in self.sides))
        return turned.mT if self.is_turned else turned

    def whole(self, pieces: jax.Array) -> jax.Array:
        """Matrices, or some columns, from one piece of each device, as they travel."""
        (first, m), (last, n) = self.sides
        lengths = [self.sizes[name] for name in self.journey.axes]
        pieces = pieces.reshape(*lengths, self.journey.rounds, m, n)
        sides = m * devices(first, self.sizes), n * devices(last, self.sizes)
        whole = pieces.transpose(self.order).reshape(-1, *sides)
        return whole.mT if self.is_turned else whole

    def in_pieces(self, whole: jax.Array) -> jax.Array:
        """The inverse of :meth:`whole`."""
        (first, m), (last, n) = self.sides
        rows, columns = ([self.sizes[name] for name in axes] for axes in (first, last))
        turned = whole.mT if self.is_turned else whole
        pieces = turned.reshape(-1, *rows, m, *columns, n)
        back = sorted(range(pieces.ndim), key=self.order.__getitem__)
        return pieces.transpose(back).reshape(-1, *self.common_shape)


def _to_owners(stack: jax.Array, ways: Sequence[_Way]) -> jax.Array:
    """Pieces of all matrices to whole matrices of this device, or to columns of them.

    The last owners get zeros.
    """
    journey = ways[0].journey
    places = journey.rounds * journey.owners
    stack = jnp.pad(stack, [(0, places - len(stack)), (0, 0), (0, 0)])
    if journey.copies:
        share = places * journey.pieces // journey.owners
        start = jax.lax.axis_index(journey.copies) * share
        stack = jax.lax.dynamic_slice_in_dim(stack, start, share)
    if journey.pieces == 1:
        return stack
    arrived = _all_to_all(stack, journey)
    return _of_this_leg(lambda way: way.whole(arrived), ways)


def _to_pieces(whole: jax.Array, ways: Sequence[_Way]) -> jax.Array:
    """The inverse of :func:`_to_owners`, zeros included."""
    journey = ways[0].journey
    if journey.pieces > 1:
        sent = _of_this_leg(lambda way: way.in_pieces(whole), ways)
        whole = _all_to_all(sent, journey)
    if journey.copies:
        whole = jax.lax.all_gather(whole, journey.copies, tiled=True)
    return whole


def _of_this_leg(fn: Callable[[_Way], jax.Array], ways: Sequence[_Way]) -> jax.Array:
    """``fn`` of the leg that this device's matrix comes by."""
    journey = ways[0].journey
    runs = [list(run) for _, run in itertools.groupby(ways, lambda way: way.leg.axes)]
    result, first = fn(runs[0][0]), 0
    for run, following in itertools.pairwise(runs):
        first += sum(way.leg.places for way in run)
        owner = jax.lax.axis_index(journey.copies + journey.axes)
        result = jnp.where(owner < first, result, fn(following[0]))
    return result


def _all_to_all(pieces: jax.Array, journey: Journey) -> jax.Array:
    """Equally many to each device, in the order of the axes; as many from each."""
    sent = pieces.reshape(journey.pieces, -1, *pieces.shape[1:])
    arrived = jax.lax.all_to_all(sent, journey.axes, split_axis=0, concat_axis=0)
    return arrived.reshape(pieces.shape)
