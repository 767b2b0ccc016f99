"""Where both learning rates and the weight decay are best.

A point is an offset from where the search begins, in quarters of an octave.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

Point = tuple[int, ...]
REACH = 4  # Quarters from the middle: of a design's corners, and of what is chosen.
_FAR, _FINE, _INSIDE = 6, 3, 3  # Of its other points; of the last ones; of no edge.
_CLOSE, _ENOUGH = 0.1, 12  # Nats above the lowest that are fitted; points at least.
_DESIGNS = 4
# The second-order terms are held near those of a bowl, in nats by octaves squared, with
# the weight of three points: noise that made a saddle would send the choice to a corner.
_BOWL = np.array([0.0, 0.0, 0.0, 0.0, 0.03, 0.03, 0.015, 0.0, 0.0, 0.0])
_HELD = np.diag([1e-9] * 4 + [3.0] * 6)


class Settings(NamedTuple):
    """Peak learning rates of the matrices and of AdamW's parameters; the weight decay.

    A decay of None is the workload's.
    """

    matrix: float
    adam: float
    decay: float | None = None

    def at(self, quarters: Iterable[int]) -> "Settings":
        """Those some quarters of an octave away, with six digits, as tables have them."""
        given = (value for value in self if value is not None)
        return Settings(
            *(
                float(f"{x * 2 ** (i / 4):.6g}")
                for x, i in zip(given, quarters, strict=True)
            )
        )


def _axes(length: int) -> list[Point]:
    """The six points at a distance along one axis."""
    unit = np.eye(3, dtype=int) * length
    return [tuple(map(int, sign * row)) for row in unit for sign in (-1, 1)]


# A central composite design.
_DESIGN: tuple[Point, ...] = (
    (0, 0, 0),
    *itertools.product((-REACH, REACH), repeat=3),
    *_axes(_FAR),
)


def best_shared(loss_of: Callable[[int], float]) -> int:
    """The lowest of a grid of factor 2, moved until both neighbours are worse.

    Args:
      loss_of: The loss some octaves from where the search begins.

    Raises:
      RuntimeError: If the best is seven octaves from there.
    """
    best, losses = 0, {0: loss_of(0)}
    while abs(best) < 7:
        losses |= {i: loss_of(i) for i in (best - 1, best + 1) if i not in losses}
        if losses[best] == min(losses.values()):
            return best
        best = min(losses, key=losses.__getitem__)
    raise RuntimeError(f"The best rate is {best} octaves from where the search begins.")


def optimum(loss_of: Callable[[Point], float]) -> Point:
    """The best point: designs around better and better points, then finer steps.

    Raises:
      RuntimeError: If the best point is at the edge of each of four designs.
    """
    losses: dict[Point, float] = {}

    def tried(middle: Point, offsets: Iterable[Point]) -> Point:
        for offset in offsets:
            point = tuple(i + j for i, j in zip(middle, offset, strict=True))
            if point not in losses:
                losses[point] = loss_of(point)
        return _lowest(losses, middle)

    middle: Point = (0, 0, 0)
    for _ in range(_DESIGNS):
        best = tried(middle, _DESIGN)
        if max(abs(i - j) for i, j in zip(best, middle, strict=True)) <= _INSIDE:
            return tried(best, [(0, 0, 0), *_axes(_FINE)])
        middle = best
    raise RuntimeError(f"The best point moved to {middle} and is still at an edge.")


def _lowest(losses: Mapping[Point, float], middle: Point) -> Point:
    """Where a quadratic of the losses near a point is lowest, within an octave of it.

    Fitted are the points at most six quarters from it, without those more than 0.1 nats
    above the lowest one unless fewer than twelve remain.
    """

    def terms(offsets: np.ndarray) -> np.ndarray:
        x, y, z = np.transpose(offsets).astype(float) / 4
        return np.transpose(
            [np.ones_like(x), x, y, z, x * x, y * y, z * z, x * y, x * z, y * z]
        )

    near = {
        point: loss
        for point, loss in losses.items()
        if max(abs(i - j) for i, j in zip(point, middle, strict=True)) <= _FAR
    }
    order = sorted(near, key=near.__getitem__)
    close = sum(loss <= near[order[0]] + _CLOSE for loss in near.values())
    fitted = order[: max(close, _ENOUGH)]
    of_fitted = terms(np.subtract(fitted, middle))
    left = np.array([near[point] for point in fitted]) - of_fitted @ _BOWL
    moved = np.linalg.solve(of_fitted.T @ of_fitted + _HELD, of_fitted.T @ left)
    steps = range(-REACH, REACH + 1)
    offsets = np.array([*itertools.product(steps, repeat=3)])
    best = offsets[np.argmin(terms(offsets) @ (_BOWL + moved))]
    return tuple(int(i + j) for i, j in zip(middle, best, strict=True))
