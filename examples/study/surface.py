"""Where both rates and the weight decay are best: a quadratic through designed points.

A point is an offset from where the search begins, in quarters of an octave.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Point = tuple[int, ...]
REACH = 4  # Quarters from the middle: of a design's corners, and of what is chosen.
_FAR, _FINE, _INSIDE = 6, 3, 3  # Of its other points; of the last ones; of no edge.
_CLOSE, _ENOUGH = 0.1, 12  # Nats above the lowest that are fitted; points at least.
_MOVES = 4
# The second-order terms are held near those of a bowl, in nats by octaves squared, with
# the weight of three points: noise that made a saddle would send the choice to a corner.
_BOWL = np.array([0.0, 0.0, 0.0, 0.0, 0.03, 0.03, 0.015, 0.0, 0.0, 0.0])
_HELD = np.diag([1e-9] * 4 + [3.0] * 6)


def axes(length: int) -> list[Point]:
    """The six points at a distance along one axis."""
    unit = np.eye(3, dtype=int) * length
    return [tuple(map(int, sign * row)) for row in unit for sign in (-1, 1)]


# A central composite design.
DESIGN: tuple[Point, ...] = (
    (0, 0, 0),
    *itertools.product((-REACH, REACH), repeat=3),
    *axes(_FAR),
)


def optimum(loss_of: Callable[[Point], float]) -> Point:
    """The best point: designs around better and better points, then finer steps.

    Raises:
      RuntimeError: If the best point is at the edge of each of four designs.
    """
    losses: dict[Point, float] = {}
    middle: Point = (0, 0, 0)
    for _ in range(_MOVES):
        _try(loss_of, losses, middle, DESIGN)
        best = lowest(losses, middle)
        if max(abs(i - j) for i, j in zip(best, middle, strict=True)) <= _INSIDE:
            _try(loss_of, losses, best, [(0, 0, 0), *axes(_FINE)])
            return lowest(losses, best)
        middle = best
    raise RuntimeError(f"The best point moved to {middle} and is still at an edge.")


def _try(
    loss_of: Callable[[Point], float],
    losses: dict[Point, float],
    middle: Point,
    offsets: Sequence[Point],
) -> None:
    for offset in offsets:
        point = tuple(i + j for i, j in zip(middle, offset, strict=True))
        if point not in losses:
            losses[point] = loss_of(point)


def lowest(losses: Mapping[Point, float], middle: Point) -> Point:
    """Where a quadratic of the losses near a point is lowest, within an octave of it.

    Fitted are the points at most six quarters from it, without those more than 0.1 nats
    above the lowest one unless fewer than twelve remain.
    """
    near = {
        point: loss
        for point, loss in losses.items()
        if max(abs(i - j) for i, j in zip(point, middle, strict=True)) <= _FAR
    }
    order = sorted(near, key=near.__getitem__)
    close = sum(loss <= near[order[0]] + _CLOSE for loss in near.values())
    fitted = order[: max(close, _ENOUGH)]
    terms = _terms(np.subtract(fitted, middle))
    left = np.array([near[point] for point in fitted]) - terms @ _BOWL
    coefficients = _BOWL + np.linalg.solve(terms.T @ terms + _HELD, terms.T @ left)
    steps = range(-REACH, REACH + 1)
    offsets = np.array([*itertools.product(steps, repeat=3)])
    best = offsets[np.argmin(_terms(offsets) @ coefficients)]
    return tuple(int(i + j) for i, j in zip(middle, best, strict=True))


def _terms(offsets: np.ndarray) -> np.ndarray:
    x, y, z = np.transpose(offsets).astype(float) / 4
    return np.transpose(
        [np.ones_like(x), x, y, z, x * x, y * y, z * z, x * y, x * z, y * z]
    )
