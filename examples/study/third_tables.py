"""What the third protocol's runs say, once they are complete.

python -m examples.study.third_tables
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import stats

from examples.study import third
from examples.study.arms import KNOWN
from examples.study.plan import NotRun
from examples.study.statistics import Interval, holm, in_words, interval, paired
from examples.study.tables import markdown
from examples.study.workloads import EXPERTS, INITS

MISSING = "not complete"
MARGIN = 0.005  # Nats, of the level with one expert.
_DEGREES = len(third.CELLS)  # Of freedom of what two searches of each cell differ by.
_OCTAVES = np.log2(EXPERTS) - np.mean(np.log2(EXPERTS))
Weights = Mapping[str, float]


def _of_rungs(of_rung: Sequence[float]) -> Weights:
    """A weight for each number of experts, over both scales of initial weights."""
    return {
        f"ladder-{n}{init}": weight / len(INITS)
        for n, weight in zip(EXPERTS, of_rung, strict=True)
        for init in INITS
    }


CONTRASTS: dict[str, Weights] = {
    "slope for a doubling of the experts": _of_rungs(_OCTAVES / np.sum(_OCTAVES**2)),
    "4 experts minus 1": _of_rungs([-1, 1, 0, 0]),
    "1 expert": _of_rungs([1, 0, 0, 0]),
}


def estimate(mean: float, variance: float, degrees: int) -> tuple[Interval, float]:
    """By Student's t: the interval, and p of the two-sided test that it is zero."""
    half = float(stats.t.ppf(0.975, degrees) * variance**0.5)
    p = float(2 * stats.t.sf(abs(mean) / variance**0.5, degrees))
    return Interval(mean, mean - half, mean + half), p


def shared(weights: Weights, folder: pathlib.Path) -> tuple[Interval, float]:
    """A contrast of OrScale − Muon+Moonlight at AdamW's best rate."""
    values = _sum(weights, lambda n, arm: third.shared_losses(n, arm, folder, False))
    return estimate(values.mean(), values.var(ddof=1) / len(values), len(values) - 1)


def tuned(weights: Weights, folder: pathlib.Path) -> tuple[Interval, float]:
    """The same with rates and decay searched, twice.

    Its variance is that of the seeds, and what the two searches of a cell differ by
    beyond that, of all eight cells together.
    """

    def of(cells: Weights, which: int) -> np.ndarray:
        return _sum(
            cells, lambda n, arm: third.tuned_losses(n, arm, which, folder, False)
        )

    rounds = range(len(third.ROUNDS))
    beyond = []
    for cell in third.CELLS:
        first, second = (of({cell: 1.0}, which) for which in rounds)
        errors = [x.var(ddof=1) / len(x) for x in (first, second)]
        beyond.append(((first.mean() - second.mean()) ** 2 - sum(errors)) / 2)
    values = [of(weights, which) for which in rounds]
    of_seeds = sum(x.var(ddof=1) / len(x) for x in values) / len(values) ** 2
    of_search = max(0.0, float(np.mean(beyond))) * sum(w * w for w in weights.values())
    mean = float(np.mean([x.mean() for x in values]))
    return estimate(mean, of_seeds + of_search / len(values), _DEGREES)


def _sum(
    weights: Weights, losses: Callable[[str, str], Mapping[int, float]]
) -> np.ndarray:
    """By seed, the weighted sum over cells of OrScale's losses minus the other's."""
    rows = [
        weight * np.array(list(paired(*(losses(cell, a) for a in third.PAIR)).values()))
        for cell, weight in weights.items()
        if weight
    ]
    return np.sum(rows, axis=0)


def endpoints(folder: pathlib.Path) -> str:
    """Slope and step in both regimes, with Holm's correction over the four; the level."""
    slope, step, level = CONTRASTS
    asked = [(tuned, slope), (tuned, step), (shared, slope), (shared, step)]
    answers = [_answer(way, CONTRASTS[name], folder) for way, name in asked]
    corrected = holm([1.0 if found is None else found[1] for found in answers])
    rows = []
    for (way, name), found, p in zip(asked, answers, corrected, strict=True):
        regime = "searched" if way is tuned else "AdamW's rate"
        if found is None:
            rows.append([name, regime, MISSING, "", ""])
        else:
            side = "higher" if found[0].mean > 0 else "lower"
            verdict = side if p < 0.05 else "inconclusive"
            rows.append([name, regime, in_words(found[0]), f"{p:.2g}", verdict])
    found = _answer(tuned, CONTRASTS[level], folder)
    verdict = "" if found is None else of_level(found[0])
    told = MISSING if found is None else in_words(found[0])
    rows.append([level, "searched", told, "", verdict])
    heading = ["OrScale − Muon+Moonlight", "rates", "mean", "p, corrected", "verdict"]
    return markdown(heading, rows, left=2)


def of_level(found: Interval) -> str:
    """What is said of the level with one expert."""
    if found.low > -MARGIN and found.high < MARGIN:
        return "equal within the margin"
    return ("lower", "inconclusive", "higher")[found.sign + 1]


def _answer(way: Callable, *arguments: object) -> tuple[Interval, float] | None:
    try:
        return way(*arguments)
    except (NotRun, RuntimeError):
        return None


def cells(folder: pathlib.Path) -> str:
    """Each cell in both regimes, once it is complete."""
    rows = []
    for cell in third.CELLS:
        found = [_answer(way, {cell: 1.0}, folder) for way in (shared, tuned)]
        told = [MISSING if x is None else in_words(x[0]) for x in found]
        rows.append([f"`{cell}`", *told])
    return markdown(["", "AdamW's rate", "searched"], rows)


def record(folder: pathlib.Path) -> str:
    """Losses at the best of the four rates, and differences from OrScale's."""
    rows = []
    for cell in third.RECORD_CELLS:
        try:
            best = [_best(cell, which, folder) for which in range(len(third.RECORD))]
        except NotRun:
            rows.append([f"`{cell}`", MISSING, "", "", ""])
            continue
        ours = best[[arm for arm, _, _ in third.RECORD].index("orscale")]
        for (arm, beta, decay), losses in zip(third.RECORD, best, strict=True):
            difference = list(paired(losses, ours).values())
            told = "" if losses is ours else in_words(interval(difference))
            label = f"{KNOWN[arm].label}, {decay:g}, {beta.strip('-') or 0.95}"
            mean = f"{np.mean(list(losses.values())):.4f}"
            rows.append([f"`{cell}`", label, mean, told])
    return markdown(["", "optimizer, λ, β₂", "loss", "− OrScale"], rows, left=2)


def _best(cell: str, which: int, folder: pathlib.Path) -> Mapping[int, float]:
    found = third.record_losses(cell, which, folder, train=False).values()
    return min(found, key=lambda losses: np.mean(list(losses.values())))


def anchors(folder: pathlib.Path, seeds: Sequence[int] = third.ANCHOR_SEEDS) -> str:
    """After a first batch of 8 sequences: other anchors, or one of 128."""
    arms = (*third.ANCHORS[1:], third.WAITED)
    rows = []
    for cell in third.FEW_CELLS:
        told = [f"`{cell}`"]
        for arm in arms:
            try:
                both = [
                    third.anchor_losses(cell, a, tuple(seeds), folder, False)
                    for a in (arm, "orscale")
                ]
                told.append(in_words(interval(list(paired(*both).values()))))
            except NotRun:
                told.append(MISSING)
        rows.append(told)
    return markdown(["", *arms], rows)


def main() -> None:
    for table in (endpoints, cells, record, anchors):
        print(table(third.FOLDER), end="\n\n")
    print(anchors(third.FOLDER, third.PILOT_SEEDS))


if __name__ == "__main__":
    main()
