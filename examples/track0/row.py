"""A row of the table: two rates that a search finds, and fresh seeds at these rates."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from examples.pretrain.errors import UsageError
from examples.track0.losses import Losses
from examples.track0.runs import Rates, Run, uniform_guess
from examples.track0.search import search
from examples.track0.workloads import WORKLOADS, Workload

SEARCH_SEEDS = (900, 901)
FIRST_FRESH_SEED = 1000
GUESS = Rates(0.016, 0.064)  # Our own searches found these rates for `muon`.
# From the name of a workload, rates and seeds to a run of each seed for each rate.
Runs = Callable[[str, Sequence[Rates], Sequence[int]], list[list[Run]]]


class Cell(NamedTuple):
    """What an entry did on one workload: the rates that it took, and its fresh runs."""

    rates: Rates
    runs: Sequence[Run]

    @property
    def finals(self) -> np.ndarray:
        """The losses at the end, by seed."""
        return np.array([run.loss for run in self.runs])

    @property
    def curve(self) -> np.ndarray:
        """The mean losses over the seeds, after each twelfth of the steps."""
        return np.mean([run.losses for run in self.runs], axis=0)

    @property
    def seconds(self) -> float:
        """The CPU time of a step, in seconds."""
        return min(run.seconds for run in self.runs)


def make_row(
    workloads: Mapping[str, Workload],
    runs: Runs,
    guess: Rates = GUESS,
    search_seeds: Sequence[int] = SEARCH_SEEDS,
) -> dict[str, Cell]:
    """Searches the rates on each workload, and trains with them on fresh seeds.

    Raises:
      UsageError: If a search fails, or all its runs end with a uniform guess.
    """

    def cell(name: str) -> Cell:
        def losses_at(points: Sequence[Rates]) -> list[float]:
            found = runs(name, points, search_seeds)
            return [float(np.mean([run.loss for run in at])) for at in found]

        rates, known = search(guess, losses_at)
        if min(known.values()) >= uniform_guess(workloads[name]):
            raise UsageError(
                f"All runs of the search on {name} diverged, with rates of half to twice "
                f"{guess.matrices:g} and {guess.others:g}: pass smaller ones by --guess."
            )
        [fresh] = runs(name, [rates], fresh_seeds(workloads[name]))
        return Cell(rates, fresh)

    with ThreadPoolExecutor(len(workloads)) as threads:
        return dict(zip(workloads, threads.map(cell, workloads), strict=True))


def stored_row(losses: Losses) -> dict[str, Cell]:
    """The row of a table that has all runs."""

    def cell(name: str) -> Cell:
        seeds = fresh_seeds(WORKLOADS[name])
        rates = losses.last_rates(name, seeds[-1])
        return Cell(rates, [losses[name, rates, seed] for seed in seeds])

    return {name: cell(name) for name in WORKLOADS}


def fresh_seeds(workload: Workload) -> range:
    """Seeds that no search has used."""
    return range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + workload.seeds)
