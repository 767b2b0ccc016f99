"""Each head of attention as a matrix, or not: docs/study/per_head_protocol.md.

    python -m examples.study.per_head

does the runs that are missing in ``docs/data/per_head``, and prints their table.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import jax

from examples.study.arms import KNOWN
from examples.study.plan import Runs, find_workload, prepare
from examples.study.search import Rates, Search, cross
from examples.study.second import FOLDER as SECOND, best_rates, job_of
from examples.study.statistics import interval, paired
from examples.study.workloads import BY_HEAD

FOLDER = pathlib.Path("docs/data/per_head")
ARMS = ("muon_moonlight", "orscale")
# A search begins at the best rates that the second protocol found for this workload.
WORKLOADS = {
    "dense-small": "dense-small",
    "mixture-small": "mixture-small",
    "dense-large": "dense-small",
}
SEARCH = Search(coarse=cross(2), fine=frozenset())
SEARCH_SEEDS = (20, 21)
SEEDS = (300, 301, 302, 303, 304)
_HEAD = (
    "| workload | optimizer | rates, whole | rates, per head | loss, whole "
    "| loss, per head | difference |",
    "|---|---|---|---|--:|--:|--:|",
)


class Found(NamedTuple):
    """A search, and the runs at the best rates that it found.

    Attributes:
      rates: The best rates.
      losses: The final validation loss of each seed at these, in nats.
    """

    rates: Rates
    losses: dict[int, float]

    @property
    def mean_loss(self) -> float:
        """The mean over the seeds."""
        return sum(self.losses.values()) / len(self.losses)


def find(workload: str, arm: str, kind: str, folder: pathlib.Path = FOLDER) -> Found:
    """What an arm comes to; ``kind`` is ``BY_HEAD``, or empty without it."""
    first = best_rates(job_of(WORKLOADS[workload], arm), SECOND)
    runs = Runs(find_workload(workload + kind), arm, folder)
    rates = runs.best(SEARCH, first, SEARCH_SEEDS)
    return Found(rates, runs.losses(rates, SEEDS))


def lines(folder: pathlib.Path = FOLDER) -> Iterator[str]:
    """The table: heads against whole projections, each at its own best rates."""
    yield from _HEAD
    for workload in WORKLOADS:
        for arm in ARMS:
            whole, by_head = (find(workload, arm, kind, folder) for kind in ("", BY_HEAD))
            differences = paired(by_head.losses, whole.losses)
            cells = [
                f"`{workload}`",
                KNOWN[arm].label,
                *("{:.3g}, {:.3g}".format(*found.rates) for found in (whole, by_head)),
                *(f"{found.mean_loss:.4f}" for found in (whole, by_head)),
                "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval([*differences.values()])),
            ]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Does the runs that are missing, and prints the table."""
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")
    names = [name + kind for name in WORKLOADS for kind in ("", BY_HEAD)]
    prepare(names, FOLDER)
    for line in lines():
        print(line, flush=True)
    prepare(names, FOLDER)


if __name__ == "__main__":
    main()
