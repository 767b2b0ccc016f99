"""Where to look for the best learning rate."""

from collections.abc import Callable

FACTOR = 2.0
_RATES = 5  # At least.
_MOST = 15


def best_rate(loss_of: Callable[[float], float], first: float) -> float:
    """The best rate of a grid, which is extended until the best is not at its edge.

    Args:
      loss_of: The loss at a rate.
      first: The middle of the grid. The other rates are powers of two times it.

    Raises:
      RuntimeError: If the best is still at the edge of fifteen rates.
    """
    low, high = -(_RATES // 2), _RATES // 2
    while high - low < _MOST:
        rates = [first * FACTOR**i for i in range(low, high + 1)]
        best = min(rates, key=loss_of)
        if best == rates[0]:
            low -= 1
        elif best == rates[-1]:
            high += 1
        else:
            return best
    raise RuntimeError(
        f"The best rate is at the edge of {low} to {high} octaves around {first}: "
        "begin the search elsewhere."
    )


def settle(mean_loss_of: Callable[[float], float], rate: float) -> float:
    """The rate whose mean loss is below that of its two neighbours, found downhill.

    Args:
      mean_loss_of: The mean loss over seeds at a rate.
      rate: Where to begin.
    """
    while True:
        near = (rate, rate / FACTOR, rate * FACTOR)
        best = min(near, key=mean_loss_of)
        if best == rate:
            return rate
        rate = best
