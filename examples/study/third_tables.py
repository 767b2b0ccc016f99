"""What the third study found, from the losses in docs/data/ladder.

    python -m examples.study.third_tables

prints its endpoints and its other tables: docs/study/study_protocol_3.md says how they
are defined. The program that did the runs is that of commit 85af6ba.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from examples.pretrain.optimizers import OPTIMIZERS
from examples.study.contrasts import REFERENCE, Losses, losses_of, rows_of
from examples.study.statistics import (
    Interval,
    holm,
    interval,
    interval_of,
    markdown,
    paired,
)
from examples.study.workloads import SMALL_INIT

EXPERTS, INITS = (1, 4, 16, 32), (SMALL_INIT, "")
CELLS = tuple(f"ladder-{n}{init}" for init in INITS for n in EXPERTS)
SMALL_CELLS = CELLS[:4]
MARGIN = 0.005  # Nats, of the level with one expert.

# One rate for all parameters: seeds of AdamW's search, and of both optimizers.
SEARCH_SEEDS, SHARED_SEEDS = range(20, 23), range(400, 416)
# Both were AdamW's best in some cell with small initial weights.
EQUAL_RATES = (0.004, 0.008)
# Both rates and the decay, searched twice: seeds of each search and of its confirmation.
ROUNDS = ((range(30, 32), range(500, 512)), (range(40, 42), range(512, 524)))
# What the paper's repository records: arm, β₂ in the workload's name, decay.
RECORD = (
    (REFERENCE, "", 0.1),
    (REFERENCE, "-0.999", 0.01),
    (REFERENCE, "-0.999", 0.1),
    (REFERENCE, "", 0.01),
    ("orscale", "", 0.1),
    ("muon", "-0.999", 0.01),
)
RECORD_SEEDS = range(600, 608)
# Anchors after a first batch of 8 sequences, or OrScale after one of 128.
ANCHORS, WAITED = ("full_rank_anchor", "largest_anchor"), "waited"
FEW = "-first-batch-8"
PILOT_SEEDS, ANCHOR_SEEDS = range(20, 23), range(700, 712)
FEW_CELLS = tuple(f"ladder-{n}{init}" for init in INITS for n in EXPERTS[1:])

Weights = Mapping[str, float]  # For each cell.
SLOPE, STEP = "slope for a doubling of the experts", "4 experts minus 1"
LEVEL = "1 expert"
_OCTAVES = np.log2(EXPERTS) - np.mean(np.log2(EXPERTS))
_RUNGS = {
    SLOPE: (_OCTAVES / np.sum(_OCTAVES**2)).tolist(),
    STEP: [-1, 1, 0, 0],
    LEVEL: [1, 0, 0, 0],
}
# Both scales of initial weights count alike.
CONTRASTS: dict[str, Weights] = {
    name: {cell: x / 2 for cell, x in zip(CELLS, [*rungs, *rungs], strict=True)}
    for name, rungs in _RUNGS.items()
}
MEANS: dict[str, Weights] = {"all": dict.fromkeys(CELLS, 1 / 8)}
for _name, _cells in (("small initial weights", CELLS[:4]), ("usual ones", CELLS[4:])):
    MEANS |= {
        _name: dict.fromkeys(_cells, 1 / 4),
        f"{_name}, without 1 expert": dict.fromkeys(_cells[1:], 1 / 3),
        f"{_name}, slope": dict(zip(_cells, _RUNGS[SLOPE], strict=True)),
    }
MEANS["small initial weights, step"] = {CELLS[0]: -1, CELLS[1]: 1}
_LATER = np.log2(EXPERTS[1:]) - np.mean(np.log2(EXPERTS[1:]))
MEANS["small initial weights, slope from 4 on"] = dict(
    zip(CELLS[1:4], (_LATER / np.sum(_LATER**2)).tolist(), strict=True)
)
MEANS["small minus usual"] = {
    cell: 1 / 4 if cell in SMALL_CELLS else -1 / 4 for cell in CELLS
}
EACH: dict[str, Weights] = {f"`{cell}`": {cell: 1.0} for cell in CELLS}


class Estimate(NamedTuple):
    """A contrast of OrScale − Muon+Moonlight, with the degrees of its variance."""

    mean: float
    variance: float
    degrees: int

    @property
    def p(self) -> float:
        """Of the test that it is zero."""
        return float(2 * stats.t.sf(abs(self.mean) / self.variance**0.5, self.degrees))

    def __str__(self) -> str:
        return str(interval_of(*self))


def _picked(losses: Losses, seeds: Sequence[int]) -> Losses:
    return {seed: losses[seed] for seed in seeds}


def _lowest(
    table: str, arm: str, seeds: Sequence[int]
) -> tuple[tuple[float, ...], Losses]:
    """The settings, run with all of these seeds, of the lowest mean loss; its losses."""
    tried = [
        (settings, _picked(losses, seeds))
        for settings, losses in losses_of(table, arm).items()
        if {*seeds} <= {*losses}
    ]
    return min(tried, key=lambda pair: np.mean([*pair[1].values()]))


def at_one_rate(cell: str, rate: float | None = None) -> np.ndarray:
    """By seed, OrScale − Muon+Moonlight at one rate for all parameters: AdamW's best."""
    table = f"ladder/{cell}"
    if rate is None:
        settings, _ = _lowest(table, "adamw", SEARCH_SEEDS)
    else:
        settings = (rate, rate)
    ours, theirs = (losses_of(table, x)[settings] for x in ("orscale", REFERENCE))
    return paired(_picked(ours, SHARED_SEEDS), _picked(theirs, SHARED_SEEDS))


def shared(weights: Weights) -> Estimate:
    """A contrast at AdamW's best rate."""
    values = np.sum([w * at_one_rate(cell) for cell, w in weights.items()], axis=0)
    variance = float(values.var(ddof=1)) / len(values)
    return Estimate(float(values.mean()), variance, len(values) - 1)


@functools.cache
def _searched(cell: str, tried: bool) -> list[np.ndarray]:
    """By fresh seed, OrScale − Muon+Moonlight where each of the two searches ended.

    Or at the lowest points that they `tried`, which the fit may have missed.
    """
    table, found = f"ladder/{cell}", []
    for searched, fresh in ROUNDS:
        both = []
        for arm in ("orscale", REFERENCE):
            lowest, _ = _lowest(table, arm, searched)
            confirmed = {
                settings: _picked(losses, fresh)
                for settings, losses in losses_of(table, arm).items()
                if {*fresh} <= {*losses}
            }
            others = [x for settings, x in confirmed.items() if settings != lowest]
            both.append(confirmed[lowest] if tried or not others else others[0])
        found.append(paired(*both))
    return found


def _of_seeds(rounds: Sequence[np.ndarray]) -> float:
    return float(sum(x.var(ddof=1) / len(x) for x in rounds))


def tuned(weights: Weights, *, tried: bool = False) -> Estimate:
    """A contrast with rates and decay searched, twice; or at the lowest points `tried`.

    Its variance is that of the seeds, and what the two searches of a cell differ by
    beyond that, of all eight cells together.
    """
    pairs = [_searched(cell, tried) for cell in CELLS]
    beyond = [((x.mean() - y.mean()) ** 2 - _of_seeds([x, y])) / 2 for x, y in pairs]
    rounds = [
        np.sum([w * _searched(cell, tried)[i] for cell, w in weights.items()], axis=0)
        for i in range(2)
    ]
    of_search = max(0.0, float(np.mean(beyond))) * sum(w * w for w in weights.values())
    variance = _of_seeds(rounds) / 4 + of_search / 2
    return Estimate(float(np.mean(rounds)), variance, len(CELLS))


def endpoints() -> str:
    """Slope and step in both regimes, with Holm's correction over the four; the level."""
    asked = [(way, name) for way in (tuned, shared) for name in (SLOPE, STEP)]
    answers = [way(CONTRASTS[name]) for way, name in asked]
    rows = []
    for (way, name), found, p in zip(
        asked, answers, holm([found.p for found in answers]), strict=True
    ):
        side = "higher" if found.mean > 0 else "lower"
        regime = "searched" if way is tuned else "AdamW's rate"
        verdict = side if p < 0.05 else "inconclusive"
        rows.append([name, regime, str(found), f"{p:.2g}", verdict])
    level = interval_of(*tuned(CONTRASTS[LEVEL]))
    rows.append([LEVEL, "searched", str(level), "", of_level(level)])
    heading = ["OrScale − Muon+Moonlight", "rates", "mean", "p, corrected", "verdict"]
    return markdown(heading, rows, left=2)


def of_level(found: Interval) -> str:
    """What is said of the level with one expert."""
    if found.low > -MARGIN and found.high < MARGIN:
        return "equal within the margin"
    return ("inconclusive", "higher", "lower")[found.sign]


def cells() -> str:
    """Each cell in both regimes, contrasts and means: without corrections."""
    rows = [
        [name, str(shared(x)), str(tuned(x)), str(tuned(x, tried=True))]
        for name, x in (EACH | CONTRASTS | MEANS).items()
    ]
    return markdown(["", "AdamW's rate", "searched", "lowest tried"], rows)


def equal_rates() -> str:
    """Part A with cells of small initial weights at one rate for all (exploratory)."""

    def at(rate: float, weights: Weights) -> np.ndarray:
        found = [
            w * at_one_rate(cell, rate if cell in SMALL_CELLS else None)
            for cell, w in weights.items()
            if w
        ]
        return np.sum(found, axis=0)

    asked = {name: weights for name, weights in EACH.items() if SMALL_INIT in name}
    asked |= {name: x for name, x in MEANS.items() if name.startswith("small initial")}
    rows = [
        [name, *(str(interval(at(rate, weights))) for rate in EQUAL_RATES)]
        for name, weights in asked.items()
    ]
    # The cells with usual initial weights have no other rate than 0.008.
    rows += [
        [name, "", str(interval(at(0.008, weights)))]
        for name, weights in CONTRASTS.items()
    ]
    return markdown(["", *map(str, EQUAL_RATES)], rows)


def record() -> str:
    """Losses at the best of the four rates, and differences from OrScale's."""

    def best(init: str, arm: str, beta: str, decay: float) -> Losses:
        table = f"ladder/dense-small{init}-800-windows{beta}"
        of_decay = [x for rates, x in losses_of(table, arm).items() if rates[2] == decay]
        return min(of_decay, key=lambda x: np.mean([x[seed] for seed in RECORD_SEEDS]))

    rows = []
    for init in reversed(INITS):
        ours = best(init, "orscale", "", 0.1)
        for arm, beta, decay in RECORD:
            losses = best(init, arm, beta, decay)
            label = f"{OPTIMIZERS[arm].label}, {decay:g}, {beta.strip('-') or 0.95}"
            mean = f"{np.mean([*losses.values()]):.4f}"
            told = "" if arm == "orscale" else str(interval(paired(losses, ours)))
            rows.append([f"`dense-small{init}`", label, mean, told])
    return markdown(["", "optimizer, λ, β₂", "loss", "− OrScale"], rows, left=2)


def anchored(cell: str, arm: str, seeds: Sequence[int] = ANCHOR_SEEDS) -> np.ndarray:
    """By seed, another anchor or a first batch of 128 − OrScale after one of 8."""

    def losses(table: str, arm: str) -> Losses:
        return _lowest(f"ladder/{table}", arm, seeds)[1]

    few = f"{cell}{FEW}"
    other = losses(cell, "orscale") if arm == WAITED else losses(few, arm)
    return paired(other, losses(few, "orscale"))


def anchors(arms: Sequence[str], seeds: Sequence[int]) -> str:
    """After a first batch of 8 sequences: other anchors, or one of 128."""
    rows = [
        [f"`{cell}`", *(str(interval(anchored(cell, arm, seeds))) for arm in arms)]
        for cell in FEW_CELLS
    ]
    return markdown(["", *arms], rows)


def threshold() -> tuple[float, dict[str, float]]:
    """Of the stable rank of a first momentum, and each cell's rank.

    Between the two neighbours, in the order of their ranks, from which to which the
    cost of a small first batch falls most in the pilots.
    """
    rows = rows_of("ladder/first_ranks")
    ranks = {
        cell: float(np.median([float(x["rank"]) for x in rows if x["cell"] == cell]))
        for cell in FEW_CELLS
    }
    rungs = []
    for n in EXPERTS[1:]:
        both = [f"ladder-{n}{init}" for init in INITS]
        costs = [-anchored(cell, WAITED, PILOT_SEEDS).mean() for cell in both]
        rungs.append((float(stats.gmean([ranks[x] for x in both])), np.mean(costs)))
    pairs = itertools.pairwise(sorted(rungs))
    (low, _), (high, _) = max(pairs, key=lambda pair: pair[0][1] - pair[1][1])
    return float(stats.gmean([low, high])), ranks


def advice(arm: str) -> str:
    """Means over cells by which part D decides: the candidate's, and the costs."""
    gains = np.mean([anchored(cell, arm) for cell in FEW_CELLS], axis=0)
    waited = {cell: anchored(cell, WAITED) for cell in FEW_CELLS}
    than_waited = gains - np.mean([*waited.values()], axis=0)
    rows = [
        [f"{arm} − the paper's anchor", "all", str(interval(gains))],
        [
            f"{arm} − a first batch of 128 (exploratory)",
            "all",
            str(interval(than_waited)),
        ],
    ]
    limit, ranks = threshold()
    for side, below in (("below", True), ("above", False)):
        chosen = [cell for cell in FEW_CELLS if (ranks[cell] < limit) == below]
        cost = interval(-np.mean([waited[cell] for cell in chosen], axis=0))
        label = f"8 − 128 sequences, rank {side} {limit:.3g}"
        rows.append([label, ", ".join(f"`{cell}`" for cell in chosen), str(cost)])
    return markdown(["mean over cells", "cells", "difference"], rows, left=2)


def main() -> None:
    """Prints the tables."""

    def in_pilots(arm: str) -> float:
        return float(np.mean([anchored(cell, arm, PILOT_SEEDS) for cell in FEW_CELLS]))

    candidate = min(ANCHORS, key=in_pilots)
    tables = [endpoints(), cells(), equal_rates(), record()]
    tables.append(anchors((*ANCHORS, WAITED), PILOT_SEEDS))
    tables.append(anchors((candidate, WAITED), ANCHOR_SEEDS))
    print(*tables, advice(candidate), sep="\n\n")


if __name__ == "__main__":
    main()
