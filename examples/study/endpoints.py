"""What the runs of the second protocol say: docs/study_protocol_2.md.

    python -m examples.study.endpoints

prints the best rates of each arm, the differences on fresh seeds, and the endpoints whose
runs are complete, from the tables in ``docs/data/two_rates``.
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from examples.study.plan import table_of
from examples.study.results import read_results
from examples.study.search import Rates
from examples.study.second import REFERENCE, TEXTS, job_of
from examples.study.statistics import Comparison, compare, endpoint, interval, paired
from examples.study.workloads import LADDER, SMALL_INIT

FOLDER = pathlib.Path("docs/data/two_rates")
MARGIN = 0.005  # Nats, of "as good as" in the first endpoint.
MIXTURES = (
    "mixture-small", f"mixture-small{SMALL_INIT}",
    *(LADDER[experts] for experts in (4, 16, 32)),
)  # fmt: skip


class Confirmed(NamedTuple):
    """The runs of an arm at its best rates, on seeds that no search has seen.

    Attributes:
      rates: The best rates.
      losses: The final validation loss of each seed, in nats.
    """

    rates: Rates
    losses: dict[int, float]


def confirmed(workload: str, arm: str, folder: pathlib.Path = FOLDER) -> Confirmed | None:
    """The confirmation of an arm; None unless all of its seeds are there."""
    seeds = job_of(workload, arm).seeds
    rows = [
        row
        for row in read_results(table_of(folder, workload))
        if row.arm == arm and row.seed in seeds
    ]
    losses = {row.seed: row.loss for row in rows}
    if sorted(losses) != sorted(seeds):
        return None
    [rates] = {row.rates for row in rows}
    return Confirmed(rates, losses)


def difference(
    workload: str, ours: str, theirs: str, folder: pathlib.Path = FOLDER
) -> dict[int, float] | None:
    """The paired differences of two arms by seed; None unless both are confirmed."""
    both = confirmed(workload, ours, folder), confirmed(workload, theirs, folder)
    if both[0] is None or both[1] is None:
        return None
    return paired(both[0].losses, both[1].losses)


def comparison(
    workloads: Sequence[str], ours: str, theirs: str, folder: pathlib.Path = FOLDER
) -> Comparison | None:
    """Two arms over several workloads; None unless all are confirmed."""
    found = [difference(name, ours, theirs, folder) for name in workloads]
    complete = [by_seed for by_seed in found if by_seed is not None]
    return compare(complete) if len(complete) == len(workloads) else None


def row_of(workload: str, ours: str, theirs: str) -> str:
    """A row of the page's table: rates of both arms, and the difference."""
    both = confirmed(workload, ours), confirmed(workload, theirs)
    cells = [
        "not complete"
        if found is None
        else f"{found.rates.matrix:.3g}, {found.rates.adam:.3g}"
        for found in both
    ]
    found = difference(workload, ours, theirs)
    number = (
        ""
        if found is None
        else "{:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(list(found.values())))
    )
    return f"| `{workload}` | {cells[0]} | {cells[1]} | {number} |"


def main() -> None:
    """Print the tables and the endpoints."""
    for title, workloads, theirs, margin in (
        ("OrScale − Muon+Moonlight on text", TEXTS, REFERENCE, MARGIN),
        ("OrScale − one ratio for all on mixtures", MIXTURES, "pooled", 0.0),
    ):
        print(f"{title}\n\n| workload | OrScale | the other | difference |")
        print("|---|---|---|--:|")
        for name in workloads:
            print(row_of(name, "orscale", theirs))
        found = comparison(workloads, "orscale", theirs)
        if found is None:
            print("\nnot complete\n")
            continue
        mean, low, high = found.average
        verdict = endpoint(found.average, margin)
        print(
            f"\nmean {mean:+.4f} [{low:+.4f}, {high:+.4f}]: {verdict}; surely lower in "
            f"{found.lower}, surely higher in {found.higher} of {len(workloads)}\n"
        )


if __name__ == "__main__":
    main()
