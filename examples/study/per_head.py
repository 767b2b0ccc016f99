"""Each head of attention as a matrix, or not: the runs of docs/per_head_protocol.md.

    python -m examples.study.per_head

does the runs that are missing in ``docs/data/per_head``, and prints their table.
"""

import pathlib

import jax

from examples.study import endpoints
from examples.study.arms import KNOWN
from examples.study.plan import Runs, find_workload, prepare
from examples.study.search import Rates, Search, best_point, cross
from examples.study.second import best_rates, job_of
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


def rates_of(workload: str, arm: str, kind: str, folder: pathlib.Path = FOLDER) -> Rates:
    """The best rates of an arm; ``kind`` is ``BY_HEAD``, or empty without it."""
    first = best_rates(job_of(WORKLOADS[workload], arm), endpoints.FOLDER)
    runs = Runs(find_workload(workload + kind), arm, folder)
    point = best_point(
        SEARCH, lambda point: runs.mean_loss(first.at(point), SEARCH_SEEDS)
    )
    return first.at(point)


def losses(
    workload: str, arm: str, kind: str, folder: pathlib.Path = FOLDER
) -> dict[int, float]:
    """The final validation loss of each seed at the best rates, in nats."""
    rates = rates_of(workload, arm, kind, folder)
    runs = Runs(find_workload(workload + kind), arm, folder)
    return {seed: runs.result(rates, seed).loss for seed in SEEDS}


def table(folder: pathlib.Path = FOLDER) -> str:
    """Heads as matrices against whole projections, each at its own best rates."""
    rows = [_row(workload, arm, folder) for workload in WORKLOADS for arm in ARMS]
    return "\n".join([*_HEAD, *rows])


def _row(workload: str, arm: str, folder: pathlib.Path) -> str:
    kinds = ("", BY_HEAD)
    rates = [rates_of(workload, arm, kind, folder) for kind in kinds]
    whole, per_head = (losses(workload, arm, kind, folder) for kind in kinds)
    difference = interval(list(paired(per_head, whole).values()))
    cells = [
        f"`{workload}`",
        KNOWN[arm].label,
        *(f"{matrix:.3g}, {adam:.3g}" for matrix, adam in rates),
        *(f"{sum(found.values()) / len(found):.4f}" for found in (whole, per_head)),
        "{:+.4f} [{:+.4f}, {:+.4f}]".format(*difference),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Does the runs that are missing, and prints the table."""
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")
    names = [name + kind for name in WORKLOADS for kind in ("", BY_HEAD)]
    FOLDER.mkdir(exist_ok=True)
    prepare(names, FOLDER)
    for workload in WORKLOADS:
        for arm in ARMS:
            print(_row(workload, arm, FOLDER), flush=True)
    print(table())
    prepare(names, FOLDER)


if __name__ == "__main__":
    main()
