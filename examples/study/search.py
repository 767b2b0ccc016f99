"""Where to look for the best pair of learning rates, from what has been found so far.

A point (i, j) stands for the rates a·√2^i and b·√2^j, of matrices and of AdamW's
parameters, around those at which a search begins.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

Point = tuple[int, int]
Losses = Mapping[Point, float]
_FARTHEST = 14  # Half octaves.
# What the quadratic is fitted to: how many points, and how near in half octaves and nats.
_ENOUGH, _NEAR, _CLOSE = 8, 2, 0.1


class Rates(NamedTuple):
    """Peak learning rates: of the matrices, and of the parameters that AdamW trains."""

    matrix: float
    adam: float

    def at(self, point: Point) -> "Rates":
        """Those of a point around these, with six digits, as tables have them."""
        pairs = zip(self, point, strict=True)
        return Rates(*(float(f"{rate * 2 ** (i / 2):.6g}") for rate, i in pairs))


class Settings(NamedTuple):
    """What a search of three looks for: both peak rates, and the weight decay of all."""

    matrix: float
    adam: float
    decay: float

    def at(self, quarters: Iterable[int]) -> "Settings":
        """Those some quarters of an octave away, with six digits, as tables have them."""
        pairs = zip(self, quarters, strict=True)
        return Settings(*(float(f"{value * 2 ** (i / 4):.6g}") for value, i in pairs))


def square(length: int) -> frozenset[Point]:
    """The eight neighbours of the origin at a distance, diagonal ones too."""
    steps = (-length, 0, length)
    return frozenset(itertools.product(steps, steps)) - {(0, 0)}


def cross(length: int) -> frozenset[Point]:
    """The four neighbours of the origin at a distance."""
    return frozenset(point for point in square(length) if 0 in point)


@dataclasses.dataclass(frozen=True)
class Search:
    """A grid of factor 2, moved until its best point is inside; then finer steps.

    Attributes:
      coarse: Neighbours that the best point of the coarse grid must have.
      fine: Neighbours of that point that are tried in the end.
    """

    coarse: frozenset[Point] = square(2)
    fine: frozenset[Point] = cross(1)

    def missing(self, losses: Losses) -> list[Point]:
        """The points to try next; none once the search has ended.

        Args:
          losses: What was found at the points tried so far.

        Raises:
          RuntimeError: If the best point is seven octaves from the first.
        """
        coarse = {p: loss for p, loss in losses.items() if p not in self._fine(losses)}
        best = _lowest(coarse) if coarse else (0, 0)
        if max(map(abs, best)) >= _FARTHEST:
            raise RuntimeError(
                f"The best rates are {best} half octaves away from where the search "
                "begins: begin elsewhere."
            )
        wanted = {(0, 0), *_around(best, self.coarse)}
        if wanted <= losses.keys():
            wanted = set(_around(best, self.fine))
        return sorted(wanted - losses.keys())

    def _fine(self, losses: Losses) -> set[Point]:
        return {point for point in losses if any(i % 2 for i in point)}


def best_point(search: Search, loss_of: Callable[[Point], float]) -> Point:
    """The best point that a search finds.

    Args:
      search: Which points it tries.
      loss_of: The loss at a point.
    """
    losses: dict[Point, float] = {}
    while missing := search.missing(losses):
        losses |= {point: loss_of(point) for point in missing}
    return smoothed_best(losses)


def smoothed_best(losses: Losses) -> Point:
    """The point at which a quadratic is lowest; the lowest point where there are few.

    Of a mean over few seeds it is a better guide than the lowest point itself.
    """
    fitted = smoothed(losses)
    inside = {point: fitted[point] for point in fitted if is_inside(point, losses)}
    return _lowest(inside if fitted else losses)


def smoothed(losses: Losses) -> dict[Point, float]:
    """A quadratic at the points near the lowest one; none where there are few.

    It is fitted to the losses at these points.
    """
    lowest = _lowest(losses)
    near = [
        point
        for point, loss in losses.items()
        if max(abs(i - j) for i, j in zip(point, lowest, strict=True)) <= _NEAR
        and loss <= losses[lowest] + _CLOSE
    ]
    if len(near) < _ENOUGH:
        return {}
    i, j = np.transpose(near).astype(float)
    terms = np.transpose([np.ones_like(i), i, j, i * i, i * j, j * j])
    coefficients = np.linalg.lstsq(terms, np.array([losses[p] for p in near]))[0]
    return dict(zip(near, (terms @ coefficients).tolist(), strict=True))


def is_inside(point: Point, tried: Iterable[Point]) -> bool:
    """Whether smaller and larger rates of both kinds than a point's were tried."""
    ends = [[min(axis), max(axis)] for axis in zip(*tried, strict=True)]
    return all(low < i < high for i, (low, high) in zip(point, ends, strict=True))


def _around(point: Point, steps: Iterable[Point]) -> list[Point]:
    return [(point[0] + i, point[1] + j) for i, j in steps]


def _lowest(losses: Losses) -> Point:
    return min(losses, key=lambda point: (losses[point], math.hypot(*point), point))
