"""The third protocol's runs: docs/study/study_protocol_3.md says why.

    python -m examples.study.third

does what is missing in ``docs/data/ladder``. Runs that the tables hold are not done
again: the same command resumes. One process on one core.
"""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
import tyro

from examples.pretrain.errors import UsageError
from examples.pretrain.operation.records import write_csv
from examples.study.arms import KNOWN
from examples.study.plan import Runs, find_workload, prepare
from examples.study.results import read_rows
from examples.study.runs import Trainer
from examples.study.search import Rates, Search, Settings
from examples.study.second import FOLDER as SECOND_FOLDER, best_rates, job_of
from examples.study.surface import optimum
from examples.study.workloads import EXPERTS, INITS, SMALL_INIT, THIRD
from orscale_jax import diagnostics

FOLDER = pathlib.Path("docs/data/ladder")
PAIR = ("orscale", "muon_moonlight")
CELLS = tuple(f"ladder-{n}{init}" for init in reversed(INITS) for n in EXPERTS)
DECAY = 0.1  # Where it is not searched.

# The paper's regime: one rate for all parameters, AdamW's best.
SHARED = Search(coarse=frozenset({(-2, -2), (2, 2)}), fine=frozenset())
SHARED_FIRST = Rates(0.008, 0.008)
SEARCH_SEEDS, SHARED_SEEDS = (20, 21, 22), tuple(range(400, 416))
# Both rates and the decay, searched twice: seeds of each search and of its confirmation.
ROUNDS = (
    ((30, 31), tuple(range(500, 512))),
    ((40, 41), tuple(range(512, 524))),
)
FIRST = {
    ("muon_moonlight", ""): Settings(0.016, 0.064, 0.14),
    ("muon_moonlight", SMALL_INIT): Settings(0.016, 0.04, 0.14),
    ("orscale", ""): Settings(0.0113, 0.064, 0.14),
    ("orscale", SMALL_INIT): Settings(0.008, 0.032, 0.14),
}
# What the paper's repository records: arm, β₂ in the workload's name, decay.
RECORD = (
    ("muon_moonlight", "", 0.1),
    ("muon_moonlight", "-0.999", 0.01),
    ("muon_moonlight", "-0.999", 0.1),
    ("muon_moonlight", "", 0.01),
    ("orscale", "", 0.1),
    ("muon", "-0.999", 0.01),
)
# AdamW's best rate in the first study, around which the rates are like the paper's.
RECORD_RATE = 0.008
RECORD_CELLS = tuple(f"dense-small{init}" for init in INITS)
RECORD_FACTORS, MUON_FACTORS = (0.3, 1.0, 3.0, 10.0), (2.0, 4.0, 8.0, 16.0)
RECORD_SEEDS = tuple(range(600, 608))
# Few tokens for an expert in the first batch: where c may be set, or the anchor another.
ANCHORS = ("orscale", "full_rank_anchor", "largest_anchor")
WAITED = "waited"  # OrScale after a first batch of 128 sequences.
PILOT_SEEDS, ANCHOR_SEEDS = (20, 21, 22), tuple(range(700, 712))
FEW = "-first-batch-8"
FEW_CELLS = tuple(
    f"ladder-{n}{init}" for init in reversed(INITS) for n in EXPERTS if n > 1
)


def shared_rates(workload: str, folder: pathlib.Path, train: bool = True) -> Rates:
    """AdamW's best rate, of all parameters."""
    runs = Runs(find_workload(workload), "adamw", folder, train)
    return runs.best(SHARED, SHARED_FIRST, SEARCH_SEEDS)


def shared_losses(
    workload: str, arm: str, folder: pathlib.Path, train: bool = True
) -> dict[int, float]:
    """Of the fresh seeds at AdamW's best rate."""
    runs = Runs(find_workload(workload), arm, folder, train)
    return runs.losses(shared_rates(workload, folder, train), SHARED_SEEDS)


def tuned(
    workload: str, arm: str, seeds: tuple[int, ...], folder: pathlib.Path,
    train: bool = True,
) -> Settings:  # fmt: skip
    """The best rates and decay that a search on some seeds finds."""
    runs = Runs(find_workload(workload), arm, folder, train)
    first = FIRST[arm, SMALL_INIT if workload.endswith(SMALL_INIT) else ""]
    return first.at(optimum(lambda point: runs.mean_loss(first.at(point), seeds)))


def tuned_losses(
    workload: str, arm: str, which: int, folder: pathlib.Path, train: bool = True
) -> dict[int, float]:
    """Of a search's own fresh seeds at its best settings."""
    searched, fresh = ROUNDS[which]
    settings = tuned(workload, arm, searched, folder, train)
    return Runs(find_workload(workload), arm, folder, train).losses(settings, fresh)


def record_settings(arm: str, decay: float) -> list[Settings]:
    """The four settings of an arm: for `muon`, whose s is 1, other rates of matrices."""
    rate, muon = RECORD_RATE, arm == "muon"
    return [
        Settings(factor * rate, rate if muon else factor * rate, decay).at((0, 0, 0))
        for factor in (MUON_FACTORS if muon else RECORD_FACTORS)
    ]


def record_losses(
    workload: str, which: int, folder: pathlib.Path, train: bool = True
) -> dict[Settings, dict[int, float]]:
    """Of one line of `RECORD` by settings and seed."""
    arm, beta, decay = RECORD[which]
    runs = Runs(find_workload(f"{workload}-800-windows{beta}"), arm, folder, train)
    return {s: runs.losses(s, RECORD_SEEDS) for s in record_settings(arm, decay)}


def anchor_losses(
    cell: str, arm: str, seeds: tuple[int, ...], folder: pathlib.Path, train: bool = True
) -> dict[int, float]:
    """After a first batch of 8 sequences, unless it is to be `WAITED` for."""
    name, arm = (cell, "orscale") if arm == WAITED else (f"{cell}{FEW}", arm)
    runs = Runs(find_workload(name), arm, folder, train)
    return runs.losses(anchor_rates(cell), seeds)


@functools.cache
def anchor_rates(cell: str) -> Rates:
    """OrScale's best rates in the second protocol, of the mixture that is most alike."""
    experts = cell.removesuffix(SMALL_INIT).removeprefix("ladder-")
    like = f"experts-{experts}" if cell.endswith(SMALL_INIT) else "mixture-small"
    return best_rates(job_of(like, "orscale"), SECOND_FOLDER, train=False)


def candidate(folder: pathlib.Path, train: bool = True) -> str:
    """The anchor with the lowest mean loss in the pilots; the paper's is none."""
    means = {
        arm: np.mean(
            [
                list(anchor_losses(cell, arm, PILOT_SEEDS, folder, train).values())
                for cell in FEW_CELLS
            ]
        )
        for arm in ANCHORS[1:]
    }
    return min(means, key=means.__getitem__)


def first_ranks(cell: str, seed: int) -> list[float]:
    """The stable rank of the first momentum over the shorter side, of routed experts.

    After a first batch of 8 sequences.
    """
    trainer = Trainer(find_workload(f"{cell}{FEW}"), KNOWN["orscale"])
    states = trainer.states(anchor_rates(cell), seed)
    _, (_, state, _) = next(states), next(states)
    measured = diagnostics.measure(
        state["opt_state"],
        state["params"],
        names=("momentum_stable_rank",),
        weight_dimension_numbers=trainer.setup.weight_dimension_numbers(state["params"]),
    )["momentum_stable_rank"]
    of = {
        jax.tree_util.keystr(path): (name, param)
        for (path, name), param in zip(
            jax.tree_util.tree_leaves_with_path(
                diagnostics.layer_classes(state["params"])
            ),
            jax.tree.leaves(state["params"]),
            strict=True,
        )
    }
    shares: list[float] = []
    for path, rank in jax.tree_util.tree_leaves_with_path(measured):
        name, param = of[jax.tree_util.keystr(path)]
        if name.startswith("routed"):
            shares += (np.ravel(rank) / min(param.shape[-2:])).tolist()
    return shares


def measure_ranks(folder: pathlib.Path) -> None:
    """Writes the median of each cell and pilot seed into ``first_ranks.csv``."""
    path = folder / "first_ranks.csv"
    rows: list[Mapping[str, object]] = [*read_rows(path)]
    done = {(row["cell"], row["seed"]) for row in rows}
    for cell in FEW_CELLS:
        for seed in PILOT_SEEDS:
            if (cell, str(seed)) not in done:
                median = np.median(first_ranks(cell, seed))
                rows.append({"cell": cell, "seed": seed, "rank": f"{median:.5g}"})
                write_csv(path, ("cell", "seed", "rank"), rows)


def regime(folder: pathlib.Path) -> Iterator[str]:
    """Part A: the paper's regime."""
    for cell in CELLS:
        for arm in PAIR:
            shared_losses(cell, arm, folder)
            yield f"A {cell} {arm}"


def pilots(folder: pathlib.Path) -> Iterator[str]:
    """Part D, on search seeds: anchors after a small first batch."""
    for cell in FEW_CELLS:
        for arm in (*ANCHORS, WAITED):
            anchor_losses(cell, arm, PILOT_SEEDS, folder)
            yield f"D pilot {cell} {arm}"
    measure_ranks(folder)
    yield "D pilot ranks"


def anchors(folder: pathlib.Path) -> Iterator[str]:
    """Part D, on fresh seeds: the anchor that the pilots found."""
    found = candidate(folder)
    for cell in FEW_CELLS:
        for arm in ("orscale", found, WAITED):
            anchor_losses(cell, arm, ANCHOR_SEEDS, folder)
            yield f"D {cell} {arm}"


def searches(folder: pathlib.Path) -> Iterator[str]:
    """Part B: rates and decay, searched twice."""
    for which in range(len(ROUNDS)):
        for cell in CELLS:
            for arm in PAIR:
                tuned_losses(cell, arm, which, folder)
                yield f"B{which + 1} {cell} {arm}"


def record(folder: pathlib.Path) -> Iterator[str]:
    """Part C: what the paper's repository records."""
    for workload in RECORD_CELLS:
        for which, (arm, beta, decay) in enumerate(RECORD):
            record_losses(workload, which, folder)
            yield f"C {workload}{beta} {arm} {decay}"


PARTS: dict[str, Callable[[pathlib.Path], Iterator[str]]] = {
    "regime": regime,
    "pilots": pilots,
    "anchors": anchors,
    "searches": searches,
    "record": record,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Do the runs of the third protocol that are not written down."""

    parts: tuple[str, ...] = tuple(PARTS)
    """In this order."""
    out: pathlib.Path = FOLDER
    """Folder of the tables."""


def main(options: Options) -> None:
    """Does the parts in their order, and says how far it is."""
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        raise UsageError(
            f"--parts {unknown[0]} is unknown. Choose of: {', '.join(PARTS)}."
        )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")
    prepare(THIRD, options.out)
    for name in options.parts:
        for done in PARTS[name](options.out):
            hours = time.process_time() / 3600
            print(f"{time.strftime('%F %X')} {done}: {hours:.2f} core hours", flush=True)
            jax.clear_caches()  # A process may only map so many pieces of code.
    prepare(THIRD, options.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
