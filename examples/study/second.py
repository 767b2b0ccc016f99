"""The second protocol: which searches and which runs, in this order.

docs/study/study_protocol_2.md says why.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

from examples.study.arms import KNOWN
from examples.study.plan import Runs, find_workload
from examples.study.search import Rates, Search, cross
from examples.study.study import kind_of
from examples.study.workloads import (
    FIRST_BATCH,
    FIRST_RATES,
    LADDER,
    LONG,
    SMALL_INIT,
    Workload,
)

FOLDER = pathlib.Path("docs/data/two_rates")
REFERENCE = "muon_moonlight"
TEXTS = tuple(
    f"{name}{init}"
    for name in ("dense-small", "prose", "mixture-small")
    for init in ("", SMALL_INIT)
)
SMALLER = ("dense-small", "mixture-small", f"mixture-small{SMALL_INIT}")
RUNGS = tuple(name for name in LADDER.values() if name not in TEXTS)
IMAGES = tuple(f"vision-{size}{SMALL_INIT}" for size in ("small", "large"))
LARGE = tuple(
    f"{name}{init}"
    for name in ("dense-large", "mixture-large")
    for init in ("", SMALL_INIT)
)

# Of searches.
FULL = Search()
QUICK = Search(coarse=cross(2), fine=frozenset())
NONE = Search(coarse=frozenset(), fine=frozenset())
SEARCH_SEEDS = (20, 21, 22)
SEEDS = tuple(range(100, 112))


@dataclasses.dataclass(frozen=True)
class Job:
    """An arm of a workload: a search for both rates, then runs with fresh seeds.

    Attributes:
      workload: Its name.
      arm: Its name.
      search: Around the first rates.
      search_seeds: The search goes by their mean.
      seeds: Of the runs at the best rates.
      rates_of: The arm at whose best rates the search begins. Nothing: the workload says
        where.
    """

    workload: str
    arm: str
    search: Search = FULL
    search_seeds: tuple[int, ...] = SEARCH_SEEDS
    seeds: tuple[int, ...] = SEEDS
    rates_of: str | None = None


def _jobs() -> Iterator[Job]:
    two = (REFERENCE, "orscale")
    # The first endpoint.
    for name in TEXTS:
        for arm in two:
            yield Job(name, arm)
    # The second one, and the ladder.
    for name in (*TEXTS[4:], *RUNGS):
        for arm in (*two, "pooled"):
            yield Job(name, arm)
    # The paper's setting, and images.
    for arm in (*two, "adamw_apart"):
        yield Job("like-16b", arm, QUICK)
    for name in IMAGES:
        for arm in two:
            yield Job(name, arm)
    # Longer runs.
    for name in LONG:
        for arm in two:
            yield Job(f"{name}-1200-steps", arm, QUICK)
    for name in LONG:
        for arm in two:
            yield Job(f"{name}-4800-steps", arm, QUICK, SEARCH_SEEDS[:1], SEEDS[:6])
        yield Job(
            f"{name}-4800-steps", "decoupled_weight_decay", NONE, (), SEEDS[:6], "orscale"
        )
    # The other arms.
    for arm in ("muon", "normuon", "adamw_apart"):
        for name in TEXTS:
            yield Job(name, arm)
    yield Job("dense-small", "pooled")
    for arm in (
        "one_scale", "orscale_on_normuon", "full_rank_anchor", "replayed", "hyperball",
    ):  # fmt: skip
        for name in SMALLER:
            yield Job(name, arm)
    for name in LARGE:
        for arm in two:
            yield Job(name, arm, QUICK)


JOBS = tuple(dict.fromkeys(_jobs()))
# Asked for once the results were known, at the rates that the searches had found.
POST_HOC = tuple(
    Job(name, arm, NONE, ()) for name in FIRST_BATCH for arm in (REFERENCE, "orscale")
)


def job_of(workload: str, arm: str) -> Job:
    """The job of an arm and a workload, which there must be."""
    return next(job for job in JOBS if (job.workload, job.arm) == (workload, arm))


def best_rates(job: Job, folder: pathlib.Path, train: bool = True) -> Rates:
    """What the search of a job finds; runs that it asks for and lacks are done.

    Raises:
      NotRun: If one is lacking, and ``train`` is false.
    """
    return _searched(job, runs_of(job, folder, train), folder)


def do(job: Job, folder: pathlib.Path) -> int:
    """Does the runs of a job that are not written down, and counts them."""
    runs = runs_of(job, folder)
    rates = _searched(job, runs, folder)
    for seed in job.seeds:
        runs.result(rates, seed)
    return runs.new


def runs_of(job: Job, folder: pathlib.Path, train: bool = True) -> Runs:
    """The runs of a job's arm and workload."""
    return Runs(find_workload(job.workload), job.arm, folder, train)


def _searched(job: Job, runs: Runs, folder: pathlib.Path) -> Rates:
    first = first_rates(job, folder, runs.train)
    if not job.search_seeds:
        return first
    return runs.best(job.search, first, job.search_seeds)


def first_rates(job: Job, folder: pathlib.Path, train: bool = True) -> Rates:
    """The rates at which the search of a job begins.

    Raises:
      NotRun: If they are those that another finds, it lacks runs, and ``train`` is false.
    """
    workload: Workload = find_workload(job.workload)
    if job.rates_of is not None:
        return best_rates(job_of(job.workload, job.rates_of), folder, train)
    if workload.rates_of is not None:
        return best_rates(job_of(workload.rates_of, job.arm), folder, train)
    matrix, adam = FIRST_RATES[kind_of(job.workload)]
    return Rates(KNOWN[job.arm].rate * matrix, adam).at((0, 0))
