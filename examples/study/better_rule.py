"""Candidates for a better rule than OrScale's: docs/study/better_rule_protocol.md.

    python -m examples.study.better_rule

does the runs that are missing in ``docs/data/better_rule``, and prints their tables.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

import jax
import tyro

from examples.study.arms import KNOWN
from examples.study.plan import Runs, find_workload, prepare
from examples.study.search import Rates
from examples.study.second import (
    FOLDER as SECOND,
    QUICK,
    REFERENCE,
    SEARCH_SEEDS,
    TEXTS,
    best_rates,
    job_of,
)
from examples.study.statistics import Comparison, compare, paired

FOLDER = pathlib.Path("docs/data/better_rule")
LATER = "orscale_twice_the_decay"  # A result on the first seeds led to it.
SEEDS, LATER_SEEDS = tuple(range(200, 212)), tuple(range(300, 312))
ARMS = (
    "twice_the_decay", "orscale_on_normuon", "normuon", "scale_between",
    "ratio_within_class", "model_optimum", LATER,
)  # fmt: skip
# Candidates with OrScale's ratio, and the same without it.
RATIOS = {"orscale_on_normuon": "normuon", LATER: "twice_the_decay"}
ENOUGH = 3  # Workloads in which a better rule is significantly better.


@dataclasses.dataclass(frozen=True)
class Options:
    """Try candidates for a better rule."""

    arms: tuple[str, ...] = ARMS
    workloads: tuple[str, ...] = TEXTS
    out: pathlib.Path = FOLDER
    """Folder of the tables."""


def fresh_seeds(arm: str) -> tuple[int, ...]:
    """Seeds that no search has seen, and no result on which led to the candidate."""
    return LATER_SEEDS if arm == LATER else SEEDS


def reference_losses(
    workload: str, folder: pathlib.Path, seeds: tuple[int, ...]
) -> dict[int, float]:
    """Muon+Moonlight's at its best rates of the second protocol, by seed."""
    return _runs(workload, REFERENCE, folder).losses(_first(workload), seeds)


def candidate(
    workload: str, arm: str, folder: pathlib.Path, seeds: tuple[int, ...]
) -> tuple[Rates, dict[int, float]]:
    """The best rates that a search for a candidate finds, and its losses at these."""
    runs = _runs(workload, arm, folder)
    rates = runs.best(QUICK, _first(workload), SEARCH_SEEDS)
    return rates, runs.losses(rates, seeds)


def is_better(found: Comparison) -> bool:
    """The rule: significantly worse nowhere, significantly better in enough workloads."""
    return found.higher == 0 and found.lower >= ENOUGH


def lines(options: Options) -> Iterator[str]:
    """The table: a row for each workload and candidate, and one for all workloads."""
    yield "| candidate | workload | rates | candidate − Muon+Moonlight |"
    yield "| --- | --- | --- | --: |"
    for arm in options.arms:
        differences: list[Mapping[int, float]] = []
        seeds = fresh_seeds(arm)
        for workload in options.workloads:
            rates, losses = candidate(workload, arm, options.out, seeds)
            reference = reference_losses(workload, options.out, seeds)
            differences.append(paired(losses, reference))
            at = "{:.3g}, {:.3g}".format(*rates)
            told = _told(compare(differences[-1:]))
            yield f"| {KNOWN[arm].label} | `{workload}` | {at} | {told} |"
        found = compare(differences)
        verdict = "a better rule" if is_better(found) else "no better rule"
        told = f"{_counts(found)} | {verdict} | {_told(found)}"
        yield f"| **{KNOWN[arm].label}** | {told} |"


def ratio_lines(options: Options) -> Iterator[str]:
    """The table of what OrScale's ratio is worth: candidates with it and without."""
    yield "| difference | workload | with the ratio − without it |"
    yield "| --- | --- | --: |"
    for arm in options.arms:
        if arm not in RATIOS:
            continue
        compared = (arm, RATIOS[arm])
        label = " − ".join(KNOWN[each].label for each in compared)
        differences: list[Mapping[int, float]] = []
        for workload in options.workloads:
            losses = (
                candidate(workload, each, options.out, fresh_seeds(arm))[1]
                for each in compared
            )
            differences.append(paired(*losses))
            told = _told(compare(differences[-1:]))
            yield f"| {label} | `{workload}` | {told} |"
        found = compare(differences)
        yield f"| **{label}** | {_counts(found)} | {_told(found)} |"


def _counts(found: Comparison) -> str:
    return f"all: lower in {found.lower}, higher in {found.higher}"


def _told(found: Comparison) -> str:
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*found.average)


def _first(workload: str) -> Rates:
    return best_rates(job_of(workload, REFERENCE), SECOND, train=False)


def _runs(workload: str, arm: str, folder: pathlib.Path) -> Runs:
    return Runs(find_workload(workload), arm, folder)


def main(options: Options) -> None:
    """Does the runs that are missing, and prints the tables."""
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")
    prepare(options.workloads, options.out)
    for line in lines(options):
        print(line, flush=True)
    print("", *ratio_lines(options), sep="\n", flush=True)
    prepare(options.workloads, options.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
