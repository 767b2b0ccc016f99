"""What the third protocol's runs say, once they are complete.

python -m examples.study.third_tables
"""

import csv
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import stats

from examples.pretrain.optimizers import OPTIMIZERS
from examples.study.results import NotRun
from examples.study.statistics import (
    Interval,
    holm,
    interval,
    interval_of,
    markdown,
    paired,
)
from examples.study.third import (
    ANCHOR_SEEDS,
    ANCHORS,
    CELLS,
    EQUAL_RATES,
    FEW_CELLS,
    PAIR,
    PILOT_SEEDS,
    RECORD,
    RECORD_CELLS,
    ROUNDS,
    SHARED_FIRST,
    SMALL_CELLS,
    WAITED,
    Ladder,
    init_of,
)
from examples.study.workloads import EXPERTS, INITS, SMALL_INIT

# Mean, variance and degrees of freedom of a contrast of OrScale − Muon+Moonlight.
Estimate = tuple[float, float, int]
MISSING = "not complete"
MARGIN = 0.005  # Nats, of the level with one expert.
SMALL_COST = 0.005  # Nats, of a small first batch, at which nobody needs a warning.
DEGREES = len(CELLS)  # Of freedom of what two searches of each cell differ by.
Weights = Mapping[str, float]  # For each cell.
_OCTAVES = np.log2(EXPERTS) - np.mean(np.log2(EXPERTS))
SLOPE, STEP, LEVEL = (
    "slope for a doubling of the experts",
    "4 experts minus 1",
    "1 expert",
)
# Both scales of initial weights count alike.
CONTRASTS: dict[str, Weights] = {
    name: {
        f"ladder-{n}{init}": weight / len(INITS)
        for n, weight in zip(EXPERTS, of_rungs, strict=True)
        for init in INITS
    }
    for name, of_rungs in (
        (SLOPE, (_OCTAVES / np.sum(_OCTAVES**2)).tolist()),
        (STEP, [-1, 1, 0, 0]),
        (LEVEL, [1, 0, 0, 0]),
    )
}


MEANS: dict[str, Weights] = {"all": dict.fromkeys(CELLS, 1 / 8)}
for _name, _init in (("small initial weights", SMALL_INIT), ("usual ones", "")):
    _cells = [cell for cell in CELLS if init_of(cell) == _init]
    MEANS |= {
        _name: dict.fromkeys(_cells, 1 / 4),
        f"{_name}, without 1 expert": dict.fromkeys(_cells[1:], 1 / 3),
        f"{_name}, slope": {cell: 2 * CONTRASTS[SLOPE][cell] for cell in _cells},
    }
    if _init:
        MEANS[f"{_name}, step"] = {_cells[0]: -1.0, _cells[1]: 1.0}
        _later = np.log2(EXPERTS[1:]) - np.mean(np.log2(EXPERTS[1:]))
        _slope = (_later / np.sum(_later**2)).tolist()
        MEANS[f"{_name}, slope from 4 on"] = dict(zip(_cells[1:], _slope, strict=True))
MEANS["small minus usual"] = {
    cell: 1 / 4 if cell in SMALL_CELLS else -1 / 4 for cell in CELLS
}


def shared(ladder: Ladder, weights: Weights) -> Estimate:
    """At AdamW's best rate."""
    values = _sum(weights, ladder.shared)
    return values.mean(), values.var(ddof=1) / len(values), len(values) - 1


def tuned(ladder: Ladder, weights: Weights, *, tried: bool = False) -> Estimate:
    """With rates and decay searched, twice; or at the lowest points that were `tried`.

    Its variance is that of the seeds, and what the two searches of a cell differ by
    beyond that, of all eight cells together.
    """

    def of(cells: Weights) -> list[np.ndarray]:
        return [
            _sum(cells, functools.partial(ladder.tuned, which=i, tried=tried))
            for i in range(len(ROUNDS))
        ]

    def of_seeds(rounds: list[np.ndarray]) -> float:
        return float(sum(x.var(ddof=1) / len(x) for x in rounds))

    by_cell = [of({cell: 1.0}) for cell in CELLS]
    beyond = [((x.mean() - y.mean()) ** 2 - of_seeds([x, y])) / 2 for x, y in by_cell]
    of_search = max(0.0, float(np.mean(beyond))) * sum(w * w for w in weights.values())
    rounds = of(weights)
    variance = of_seeds(rounds) / len(rounds) ** 2 + of_search / len(rounds)
    return float(np.mean([x.mean() for x in rounds])), variance, DEGREES


def _sum(
    weights: Weights, losses: Callable[[str, str], Mapping[int, float]]
) -> np.ndarray:
    """By seed, the weighted sum over cells of OrScale's losses minus the other's."""
    ours, theirs = PAIR
    return np.sum(
        [
            weight * paired(losses(cell, ours), losses(cell, theirs))
            for cell, weight in weights.items()
            if weight
        ],
        axis=0,
    )


def ask(
    ladder: Ladder, way: Callable[[Ladder, Weights], Estimate], weights: Weights
) -> tuple[Interval, float] | None:
    """The interval, and p of the test that it is zero; None without the runs."""
    try:
        mean, variance, degrees = way(ladder, weights)
    except (NotRun, RuntimeError):  # A search found no end.
        return None
    p = 2 * stats.t.sf(abs(mean) / variance**0.5, degrees)
    return interval_of(mean, variance, degrees), float(p)


def endpoints(ladder: Ladder) -> str:
    """Slope and step in both regimes, with Holm's correction over the four; the level."""
    asked = [(tuned, SLOPE), (tuned, STEP), (shared, SLOPE), (shared, STEP)]
    answers = [ask(ladder, way, CONTRASTS[name]) for way, name in asked]
    corrected = holm([1.0 if found is None else found[1] for found in answers])
    rows = []
    for (way, name), found, p in zip(asked, answers, corrected, strict=True):
        row = [name, "searched" if way is tuned else "AdamW's rate", MISSING, "", ""]
        if found is not None:
            side = "higher" if found[0].mean > 0 else "lower"
            row[2:] = str(found[0]), f"{p:.2g}", side if p < 0.05 else "inconclusive"
        rows.append(row)
    rows.append([LEVEL, "searched", MISSING, "", ""])
    if (level := ask(ladder, tuned, CONTRASTS[LEVEL])) is not None:
        rows[-1][2:] = str(level[0]), "", of_level(level[0])
    heading = ["OrScale − Muon+Moonlight", "rates", "mean", "p, corrected", "verdict"]
    return markdown(heading, rows, left=2)


def of_level(found: Interval) -> str:
    """What is said of the level with one expert."""
    if found.low > -MARGIN and found.high < MARGIN:
        return "equal within the margin"
    return ("inconclusive", "higher", "lower")[found.sign]


def cells(ladder: Ladder) -> str:
    """Each cell in both regimes, contrasts and means: without corrections."""
    ways: dict[str, Callable[[Ladder, Weights], Estimate]] = {
        "AdamW's rate": shared,
        "searched": tuned,
        "lowest tried": functools.partial(tuned, tried=True),
    }
    rows = []
    each = {f"`{cell}`": {cell: 1.0} for cell in CELLS}
    for name, weights in (each | CONTRASTS | MEANS).items():
        found = [ask(ladder, way, weights) for way in ways.values()]
        rows.append([name, *(MISSING if x is None else str(x[0]) for x in found)])
    return markdown(["", *ways], rows)


def equal_rates(ladder: Ladder) -> str:
    """Part A with cells of small initial weights at one rate for all (exploratory)."""

    def at(rate: float, cell: str, arm: str) -> Mapping[int, float]:
        if cell in SMALL_CELLS:
            return ladder.equal(cell, arm, rate)
        return ladder.shared(cell, arm)

    small = {
        name: weights
        for name, weights in MEANS.items()
        if name.startswith("small initial")
    }
    each = {f"`{cell}`": {cell: 1.0} for cell in SMALL_CELLS}
    rows = []
    for name, weights in (each | small | CONTRASTS).items():
        row = [name]
        for rate in EQUAL_RATES:
            if name in CONTRASTS and rate != SHARED_FIRST.matrix:
                row.append("")  # The usual cells have no other rate.
                continue
            try:
                row.append(str(interval(_sum(weights, functools.partial(at, rate)))))
            except NotRun:
                row.append(MISSING)
        rows.append(row)
    return markdown(["", *map(str, EQUAL_RATES)], rows)


def record(ladder: Ladder) -> str:
    """Losses at the best of the four rates, and differences from OrScale's."""

    def best(cell: str, which: int) -> Mapping[int, float]:
        found = ladder.recorded(cell, which)
        return min(found, key=lambda losses: np.mean(list(losses.values())))

    rows = []
    for cell in RECORD_CELLS:
        try:
            found = [best(cell, which) for which in range(len(RECORD))]
        except NotRun:
            rows.append([f"`{cell}`", MISSING, "", ""])
            continue
        [ours] = (x for x, line in zip(found, RECORD, strict=True) if "orscale" in line)
        for (arm, beta, decay), losses in zip(RECORD, found, strict=True):
            label = f"{OPTIMIZERS[arm].label}, {decay:g}, {beta.strip('-') or 0.95}"
            mean = f"{np.mean(list(losses.values())):.4f}"
            told = "" if losses is ours else str(interval(paired(losses, ours)))
            rows.append([f"`{cell}`", label, mean, told])
    return markdown(["", "optimizer, λ, β₂", "loss", "− OrScale"], rows, left=2)


def anchors(ladder: Ladder, arms: Sequence[str], seeds: tuple[int, ...]) -> str:
    """After a first batch of 8 sequences: other anchors, or one of 128."""

    def told(cell: str, arm: str) -> str:
        try:
            both = (ladder.anchored(cell, x, seeds) for x in (arm, "orscale"))
            return str(interval(paired(*both)))
        except NotRun:
            return MISSING

    rows = [[f"`{cell}`", *(told(cell, arm) for arm in arms)] for cell in FEW_CELLS]
    return markdown(["", *arms], rows)


def threshold(ladder: Ladder) -> tuple[float, dict[str, float]] | None:
    """Of the stable rank of a first momentum, and each cell's; None without a cost.

    Between the two neighbours, in the order of their ranks, from which to which the
    cost of a small first batch falls most in the pilots.
    """
    text = (ladder.folder / "first_ranks.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    ranks = {
        cell: float(np.median([float(x["rank"]) for x in rows if x["cell"] == cell]))
        for cell in FEW_CELLS
    }
    rungs = []
    for n in EXPERTS[1:]:
        both = [f"ladder-{n}{init}" for init in INITS]
        rank = stats.gmean([ranks[cell] for cell in both])
        cost = np.mean([_waited(ladder, cell, PILOT_SEEDS).mean() for cell in both])
        rungs.append((float(rank), float(cost)))
    if max(cost for _, cost in rungs) <= SMALL_COST:
        return None
    pairs = itertools.pairwise(sorted(rungs))
    (low, _), (high, _) = max(pairs, key=lambda pair: pair[0][1] - pair[1][1])
    return float(stats.gmean([low, high])), ranks


def _waited(ladder: Ladder, cell: str, seeds: tuple[int, ...]) -> np.ndarray:
    """By seed, what a first batch of 8 sequences costs against one of 128."""
    both = (ladder.anchored(cell, arm, seeds) for arm in ("orscale", WAITED))
    return paired(*both)


def advice(ladder: Ladder) -> str:
    """Means over cells by which part D decides: the candidate's, and the costs."""
    arm = ladder.candidate()
    gains = [
        paired(ladder.anchored(cell, arm), ladder.anchored(cell, "orscale"))
        for cell in FEW_CELLS
    ]
    waited = [_waited(ladder, cell, ANCHOR_SEEDS) for cell in FEW_CELLS]
    rows = [
        [f"{label}", "all", str(interval(np.mean(by_cell, axis=0)))]
        for label, by_cell in (
            (f"{arm} − the paper's anchor", gains),
            (f"{arm} − a first batch of 128 (exploratory)", np.add(gains, waited)),
        )
    ]
    if (found := threshold(ladder)) is None:
        return markdown(["mean over cells", "cells", "difference"], rows, left=2)
    limit, ranks = found
    for side, below in (("below", True), ("above", False)):
        chosen = [cell for cell in FEW_CELLS if (ranks[cell] < limit) == below]
        costs = [_waited(ladder, cell, ANCHOR_SEEDS) for cell in chosen]
        label = f"8 − 128 sequences, rank {side} {limit:.3g}"
        mean = str(interval(np.mean(costs, axis=0))) if costs else "none"
        rows.append([label, ", ".join(f"`{cell}`" for cell in chosen), mean])
    return markdown(["mean over cells", "cells", "difference"], rows, left=2)


def main() -> None:
    ladder = Ladder(train=False)
    print(
        *(table(ladder) for table in (endpoints, cells, equal_rates, record)),
        sep="\n\n",
        end="\n\n",
    )
    print(anchors(ladder, (*ANCHORS[1:], WAITED), PILOT_SEEDS), end="\n\n")
    print(anchors(ladder, (ladder.candidate(), WAITED), ANCHOR_SEEDS), end="\n\n")
    print(advice(ladder))


if __name__ == "__main__":
    main()
