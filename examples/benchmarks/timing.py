"""Quartiles, and the times that calls take."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

TURNS = 9
_TURN_SECONDS, _MOST_CALLS = 0.02, 16


class Quartiles(NamedTuple):
    """The quartiles of some values, and their number."""

    low: float
    median: float
    high: float
    number: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quartiles":
        """NaN makes all three NaN."""
        found = list(values)
        low, median, high = (float(x) for x in np.quantile(found, [0.25, 0.5, 0.75]))
        return cls(low, median, high, len(found))

    def map(self, monotone: Callable[[float], float]) -> "Quartiles":
        """Those of a rising or falling function of the values."""
        low, median, high = map(monotone, (self.low, self.median, self.high))
        low, high = (high, low) if high < low else (low, high)
        return Quartiles(low, median, high, self.number)

    def times(self, factor: float) -> "Quartiles":
        """Those of the values times a positive factor."""
        return self.map(lambda x: factor * x)


def seconds_of(run: Callable[[], Any], turns: int = TURNS) -> Quartiles:
    """The seconds of a call that has been compiled.

    A turn makes several short calls and waits for the last: the next is launched while
    one runs, as in a training loop.
    """
    calls = min(_MOST_CALLS, math.ceil(_TURN_SECONDS / seconds_each(run)))
    return Quartiles.of(seconds_each(run, calls) for _ in range(turns))


def repeated(
    step: Callable[..., Iterable[Any]], held: Iterable[Any], *given: Any
) -> Callable[[], Any]:
    """A call that takes a step from where the last one ended.

    Args:
      step: Of what is held and what is given; its results are held next.
      held: At first.
      given: To every step.
    """
    held = list(held)

    def run() -> Any:
        held[:] = step(*held, *given)
        return held

    return run


def seconds_each(run: Callable[[], Any], calls: int = 1) -> float:
    """The seconds of each of several calls, of which the last is waited for."""
    began = time.perf_counter()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / calls
