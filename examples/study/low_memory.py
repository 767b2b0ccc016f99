"""Momenta and weights in fewer bits: the runs of docs/study/low_memory_protocol.md.

    python -m examples.study.low_memory

does the runs that are missing in ``docs/data/low_memory``, and prints the tables of
docs/bfloat16_weights.md from it.
"""

import dataclasses
import pathlib

import jax

from examples.study.plan import Runs, find_workload, prepare
from examples.study.search import Rates, Search
from examples.study.second import FOLDER as SECOND, best_rates, job_of
from examples.study.statistics import interval, paired
from examples.study.workloads import BFLOAT16

FOLDER = pathlib.Path("docs/data/low_memory")
WORKLOADS = ("dense-small", "prose", "mixture-small")
SEEDS = (200, 201, 202, 203, 204)
SEARCH_SEEDS = (20,)
# Both rates together, by factors of 2.
SEARCH = Search(coarse=frozenset({(-2, -2), (2, 2)}), fine=frozenset())
# Rates at which most updates are below half a unit: a sixteenth of the best ones.
LOW, LOW_WORKLOAD = (-8, -8), "dense-small"


@dataclasses.dataclass(frozen=True)
class Variant:
    """OrScale with a momentum and weights of some dtypes.

    Attributes:
      label: In tables.
      arm: Its name in the study.
      of_workload: What follows the name of a workload: whether weights are bfloat16.
      workloads: Those that it is run on.
    """

    label: str
    arm: str = "orscale"
    of_workload: str = ""
    workloads: tuple[str, ...] = WORKLOADS


FLOAT32 = Variant("float32")
VARIANTS = (
    FLOAT32,
    Variant("bfloat16 momentum", "bfloat16_momentum"),
    Variant("8-bit momentum", "int8_momentum"),
    Variant("bfloat16 weights, rounded to nearest", "rounding_to_nearest", BFLOAT16),
    Variant("bfloat16 weights, `keep_master_weights`", "master_weights", BFLOAT16),
    Variant(
        "bfloat16 weights, stochastic rounding",
        "stochastic_rounding",
        BFLOAT16,
        ("dense-small",),
    ),
)
_HEAD = (
    "| workload | variant | rates | loss | difference from float32 |",
    "|---|---|---|--:|--:|",
)
OF_WEIGHTS = tuple(v for v in VARIANTS if v.of_workload or v is FLOAT32)


def variants_of(workload: str) -> tuple[Variant, ...]:
    """The variants that are run on a workload."""
    return tuple(variant for variant in VARIANTS if workload in variant.workloads)


def losses(
    variant: Variant, workload: str, rates: Rates, folder: pathlib.Path = FOLDER
) -> dict[int, float]:
    """The final validation loss of each seed, in nats."""
    return _runs(variant, workload, folder).losses(rates, SEEDS)


def rates_of(variant: Variant, workload: str, folder: pathlib.Path = FOLDER) -> Rates:
    """The best rates of a variant; of float32, those of the second study."""
    first = best_rates(job_of(workload, "orscale"), SECOND)
    if variant is FLOAT32:
        return first
    return _runs(variant, workload, folder).best(SEARCH, first, SEARCH_SEEDS)


def low_rates() -> Rates:
    """A sixteenth of float32's best rates."""
    return rates_of(FLOAT32, LOW_WORKLOAD).at(LOW)


def quality_table(folder: pathlib.Path = FOLDER) -> str:
    """Each variant at its best rates, and its difference from float32."""
    rows = [
        _row(workload, variant, rates_of(variant, workload, folder), folder)
        for workload in WORKLOADS
        for variant in variants_of(workload)
    ]
    return "\n".join([*_HEAD, *rows])


def low_rates_table(folder: pathlib.Path = FOLDER) -> str:
    """Each kind of weights at a sixteenth of the best rates."""
    rates = low_rates()
    rows = [_row(LOW_WORKLOAD, variant, rates, folder) for variant in OF_WEIGHTS]
    return "\n".join([*_HEAD, *rows])


def _row(workload: str, variant: Variant, rates: Rates, folder: pathlib.Path) -> str:
    found = losses(variant, workload, rates, folder)
    cells = [
        f"`{workload}`",
        variant.label,
        f"{rates.matrix:.3g}, {rates.adam:.3g}",
        f"{sum(found.values()) / len(found):.4f}",
        "",
    ]
    if variant is not FLOAT32:
        low = rates == low_rates()
        theirs = rates if low else rates_of(FLOAT32, workload, folder)
        differences = paired(found, losses(FLOAT32, workload, theirs, folder))
        numbers = interval(list(differences.values()))
        cells[-1] = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*numbers)
    return f"| {' | '.join(cells)} |"


def _runs(variant: Variant, workload: str, folder: pathlib.Path) -> Runs:
    name = f"{workload}{variant.of_workload}"
    return Runs(find_workload(name), variant.arm, folder)


def main() -> None:
    """Does the runs that are missing, and prints the tables."""
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")
    names = [name + kind for name in WORKLOADS for kind in ("", BFLOAT16)]
    prepare(names, FOLDER)
    print(low_rates_table(), flush=True)
    print(quality_table())
    prepare(names, FOLDER)


if __name__ == "__main__":
    main()
