"""The third protocol's runs: docs/study/study_protocol_3.md says why.

    python -m examples.study.third

does what is missing in ``docs/data/ladder``. Runs that the tables hold are not done
again: the same command resumes. One process on one core.
"""

import csv
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import tyro

from examples.pretrain.errors import UsageError
from examples.study.results import Runs, prepare
from examples.study.runs import Trainer
from examples.study.search import Point, Settings, best_shared, optimum
from examples.study.workloads import EXPERTS, FEW, INITS, SMALL_INIT, THIRD, find_workload
from orscale_jax import diagnostics

FOLDER = pathlib.Path("docs/data/ladder")
PAIR = ("orscale", "muon_moonlight")
CELLS = tuple(f"ladder-{n}{init}" for init in reversed(INITS) for n in EXPERTS)

# The paper's regime: one rate for all parameters, AdamW's best.
SHARED_FIRST = Settings(0.008, 0.008)
SEARCH_SEEDS, SHARED_SEEDS = (20, 21, 22), tuple(range(400, 416))
# Both were AdamW's best in some cell with small initial weights.
EQUAL_RATES = (0.004, 0.008)
SMALL_CELLS = tuple(cell for cell in CELLS if cell.endswith(SMALL_INIT))
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
# The full-rank anchor, which the package no longer has, is recorded only.
ANCHORS = ("orscale", "full_rank_anchor", "largest_anchor")
WAITED = "waited"  # OrScale after a first batch of 128 sequences.
PILOT_SEEDS, ANCHOR_SEEDS = (20, 21, 22), tuple(range(700, 712))
FEW_CELLS = tuple(cell for cell in CELLS if f"{cell}{FEW}" in THIRD)
# OrScale's best in the second protocol, by the scale of the initial weights.
ANCHOR_RATES = {"": Settings(0.016, 0.0905097), SMALL_INIT: Settings(0.008, 0.032)}


def init_of(cell: str) -> str:
    """How the name of a cell ends."""
    return SMALL_INIT if cell.endswith(SMALL_INIT) else ""


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The protocol's runs: losses by seed, and the parts in which they are done.

    Attributes:
      folder: Of the tables.
      train: Whether what they lack is done; otherwise it raises `NotRun`.
    """

    folder: pathlib.Path = FOLDER
    train: bool = True

    def runs(self, workload: str, arm: str) -> Runs:
        """The runs of an arm on a workload."""
        return Runs(workload, arm, self.folder, self.train)

    def shared(self, cell: str, arm: str) -> dict[int, float]:
        """At one rate for all parameters, AdamW's best."""
        adamw = self.runs(cell, "adamw")

        def loss_of(octaves: int) -> float:
            return adamw.mean_loss(SHARED_FIRST.at([4 * octaves] * 2), SEARCH_SEEDS)

        best = SHARED_FIRST.at([4 * best_shared(loss_of)] * 2)
        return self.runs(cell, arm).losses(best, SHARED_SEEDS)

    def equal(self, cell: str, arm: str, rate: float) -> dict[int, float]:
        """At one rate for all parameters, whether or not it is AdamW's best."""
        return self.runs(cell, arm).losses(Settings(rate, rate), SHARED_SEEDS)

    def tuned(
        self, cell: str, arm: str, which: int, *, tried: bool = False
    ) -> dict[int, float]:
        """At the rates and the decay that one of the searches finds.

        Or at the lowest point that it `tried`, which the fit may have missed.
        """
        runs, first = self.runs(cell, arm), FIRST[arm, init_of(cell)]
        searched, fresh = ROUNDS[which]
        losses: dict[Point, float] = {}

        def loss_of(point: Point) -> float:
            losses[point] = runs.mean_loss(first.at(point), searched)
            return losses[point]

        best = optimum(loss_of)
        if tried:
            best = min(losses, key=losses.__getitem__)
        return runs.losses(first.at(best), fresh)

    def recorded(self, cell: str, which: int) -> list[dict[int, float]]:
        """Of a line of `RECORD` at each of its four settings.

        The rates are shared, but for those of `muon`, whose s is 1.
        """
        arm, beta, decay = RECORD[which]
        muon = arm == "muon"
        runs = self.runs(f"{cell}-800-windows{beta}", arm)
        settings = [
            Settings(f * RECORD_RATE, (1 if muon else f) * RECORD_RATE, decay)
            for f in (MUON_FACTORS if muon else RECORD_FACTORS)
        ]
        return [runs.losses(x.at((0, 0, 0)), RECORD_SEEDS) for x in settings]

    def anchored(
        self, cell: str, arm: str, seeds: tuple[int, ...] = ANCHOR_SEEDS
    ) -> dict[int, float]:
        """After a first batch of 8 sequences, unless it is to be `WAITED` for."""
        name, arm = (cell, "orscale") if arm == WAITED else (f"{cell}{FEW}", arm)
        return self.runs(name, arm).losses(ANCHOR_RATES[init_of(cell)], seeds)

    def candidate(self) -> str:
        """The anchor with the lowest mean loss in the pilots; the paper's is none."""

        def mean_loss(arm: str) -> float:
            found = (self.anchored(cell, arm, PILOT_SEEDS) for cell in FEW_CELLS)
            return float(np.mean([list(losses.values()) for losses in found]))

        return min(ANCHORS[1:], key=mean_loss)

    def part_a(self) -> Iterator[str]:
        """The paper's regime."""
        for cell in CELLS:
            for arm in PAIR:
                self.shared(cell, arm)
                yield f"A {cell} {arm}"

    def part_a_again(self) -> Iterator[str]:
        """The cells with small initial weights at equal rates."""
        for cell in SMALL_CELLS:
            for rate in EQUAL_RATES:
                for arm in PAIR:
                    self.equal(cell, arm, rate)
                    yield f"A again {cell} {rate} {arm}"

    def part_b(self) -> Iterator[str]:
        """Rates and decay, searched twice."""
        for which in range(len(ROUNDS)):
            for cell in CELLS:
                for arm in PAIR:
                    for tried in (False, True):
                        self.tuned(cell, arm, which, tried=tried)
                    yield f"B{which + 1} {cell} {arm}"

    def part_c(self) -> Iterator[str]:
        """What the paper's repository records."""
        for cell in RECORD_CELLS:
            for which, (arm, beta, decay) in enumerate(RECORD):
                self.recorded(cell, which)
                yield f"C {cell}{beta} {arm} {decay}"

    def pilots(self) -> Iterator[str]:
        """Part D, on search seeds: anchors after a small first batch, and its ranks."""
        for cell in FEW_CELLS:
            for arm in (*ANCHORS, WAITED):
                self.anchored(cell, arm, PILOT_SEEDS)
                yield f"D pilot {cell} {arm}"
        path, rows = self.folder / "first_ranks.csv", [["cell", "seed", "rank"]]
        if path.exists():
            rows = list(csv.reader(path.read_text().splitlines()))
        for cell in FEW_CELLS:
            for seed in map(str, PILOT_SEEDS):
                if [cell, seed] not in [row[:2] for row in rows]:
                    rows.append(
                        [cell, seed, f"{np.median(first_ranks(cell, int(seed))):.5g}"]
                    )
                    path.write_text("".join(f"{','.join(row)}\n" for row in rows))
        yield "D pilot ranks"

    def part_d(self) -> Iterator[str]:
        """Part D, on fresh seeds: the anchor that the pilots found."""
        found = self.candidate()
        for cell in FEW_CELLS:
            for arm in ("orscale", found, WAITED):
                self.anchored(cell, arm)
                yield f"D {cell} {arm}"


def first_ranks(cell: str, seed: int) -> np.ndarray:
    """The stable rank of the first momentum over the shorter side, of routed experts.

    After a first batch of 8 sequences.
    """
    trainer = Trainer(find_workload(f"{cell}{FEW}"), "orscale")
    states = trainer.states(ANCHOR_RATES[init_of(cell)], seed)
    _, (_, state, _) = next(states), next(states)
    where = state["opt_state"], state["params"]
    numbers = {"weight_dimension_numbers": trainer.setup.weight_dimension_numbers}
    table = diagnostics.tabulate(
        diagnostics.read(*where, **numbers),
        diagnostics.layer_classes(state["params"]),
        diagnostics.measure(*where, names=("momentum_stable_rank",), **numbers),
    )
    routed = np.char.startswith(table["class"].astype(str), "routed")
    sizes = trainer.workload.config.model
    return table["momentum_stable_rank"][routed] / min(sizes.width, sizes.expert_hidden)


PARTS: dict[str, Callable[[Ladder], Iterator[str]]] = {
    "regime": Ladder.part_a,
    "equal": Ladder.part_a_again,
    "pilots": Ladder.pilots,
    "anchors": Ladder.part_d,
    "searches": Ladder.part_b,
    "record": Ladder.part_c,
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
        for done in PARTS[name](Ladder(options.out)):
            hours = time.process_time() / 3600
            print(f"{time.strftime('%F %X')} {done}: {hours:.2f} core hours", flush=True)
            jax.clear_caches()  # A process may only map so many pieces of code.
    prepare(THIRD, options.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
