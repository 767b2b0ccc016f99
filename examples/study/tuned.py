"""What tuning found, from the runs in docs/data/tuning.csv.

    python -m examples.study.tuned

prints the tables of docs/fine_tuning.md. docs/study/tuning_protocol.md says what the
endpoints are.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats

from examples.study.statistics import holm, interval, markdown
from examples.study.tuning import (
    FRESH,
    GUESSES,
    LOWER,
    PRETRAINING,
    RUNGS,
    SEARCH,
    Row,
    read,
)

CELLS = [(base, how) for base in PRETRAINING for how in GUESSES]
PRIMARY = ("muon", "orscale")
WAYS = {"full": "all parameters", "lora": "LoRA"}
MEASURES = {"rms": "RMS", "relative": "relative norm", "spectral": "spectral norm"}


@functools.cache
def runs(base: str, how: str, arm: str) -> dict[tuple[float, float], dict[int, Row]]:
    """By the two rates and the seed."""
    found: dict[tuple[float, float], dict[int, Row]] = {}
    for row in read():
        if (row.base, row.how, row.arm) == (base, how, arm):
            found.setdefault((float(row.rate), float(row.beside)), {})[row.seed] = row
    return found


def best_rates(base: str, how: str, arm: str) -> tuple[float, float]:
    """Those with the lowest mean loss of the search."""

    def mean(rows: dict[int, Row]) -> float:
        return float(np.nan_to_num(np.mean([rows[x].new for x in SEARCH]), nan=np.inf))

    searched = {
        rates: mean(rows)
        for rates, rows in runs(base, how, arm).items()
        if {*SEARCH} <= {*rows}
    }
    return min(searched, key=searched.__getitem__)


def before(base: str, column: str) -> np.ndarray:
    """A column of the rows of the pre-trained weights, by fresh seed."""
    rows = runs(base, "pretraining", base)[PRETRAINING[base], PRETRAINING[base]]
    return np.array([getattr(rows[seed], column) for seed in FRESH])


def points(
    base: str, how: str, arm: str, column: str, rungs: Sequence[int] = RUNGS
) -> np.ndarray:
    """A column by fresh seed and rung, in the order of the rates.

    Raises:
      LookupError: If a rung lacks a seed.
    """
    rates = best_rates(base, how, arm)
    found, values = runs(base, how, arm), []
    for factor in (2.0**rung for rung in sorted(rungs)):
        rate, beside = (float(f"{factor * x:.6g}") for x in rates)
        rows = found[rate, beside]
        values.append([getattr(rows[seed], column) for seed in FRESH])
    return np.array(values).T


def at_best(base: str, how: str, arm: str, column: str) -> np.ndarray:
    return points(base, how, arm, column)[:, sorted(RUNGS).index(0)]


def lowest(old: Sequence[float], new: Sequence[float], limit: float) -> float:
    """The lowest `new` on the line through the points where `old` is at most a limit."""
    found = [y for x, y in zip(old, new, strict=True) if x <= limit]
    for (x, y), (u, v) in itertools.pairwise(zip(old, new, strict=True)):
        if min(x, u) < limit < max(x, u):
            found.append(y + (limit - x) / (u - x) * (v - y))
    return float(min(found))


def at_equal_old(
    base: str, how: str, arm: str, share: float = 1.0, rungs: Sequence[int] = RUNGS
) -> np.ndarray:
    """By seed, the loss on the new text at a share of what AdamW forgets."""
    start_old, start_new = before(base, "old"), before(base, "new")
    limits = start_old + share * (at_best(base, how, "adamw", "old") - start_old)
    old, new = (
        np.column_stack([start, points(base, how, arm, column, rungs)])
        for start, column in ((start_old, "old"), (start_new, "new"))
    )
    return np.array(list(map(lowest, old, new, limits)))


def at_equal_updates(
    base: str, how: str, arm: str, measure: str, column: str
) -> np.ndarray:
    """By seed, a loss where the update is AdamW's at its best rate; nan outside."""
    wanted = np.log(at_best(base, how, "adamw", measure))
    sizes = np.log(points(base, how, arm, measure))
    losses = points(base, how, arm, column)
    return np.array([
        np.interp(x, size, loss, left=np.nan, right=np.nan)
        for x, size, loss in zip(wanted, sizes, losses, strict=True)
    ])  # fmt: skip


def complete() -> Iterator[tuple[str, str, str]]:
    """The optimizers with all runs, by base and way."""
    for base, how in CELLS:
        for arm in GUESSES[how]:
            try:
                points(base, how, arm, "new")
            except (LookupError, ValueError):
                continue
            yield base, how, arm


def starts() -> str:
    """Means of the losses before tuning, and after it by AdamW."""
    rows = []
    for base, how, arm in complete():
        if arm == "adamw":
            losses = [before(base, column) for column in ("old", "new")]
            losses += [at_best(base, how, arm, column) for column in ("old", "new")]
            means = [f"{np.mean(x):.3f}" for x in losses]
            rows.append([f"`{base}`", WAYS[how], *means])
    heading = ["Base", "Tuned", "Code before", "Prose before", "Code after",
               "Prose after"]  # fmt: skip
    return markdown(heading, rows, left=2)


def rates() -> str:
    rows = []
    for base, how, arm in complete():
        rate, _ = best_rates(base, how, arm)
        times = rate / best_rates(base, how, "adamw")[0]
        rows.append([f"`{base}`", WAYS[how], f"`{arm}`", f"{rate:g}", f"{times:g}"])
    heading = ["Base", "Tuned", "Optimizer", "Best rate", "Multiple of AdamW's"]
    return markdown(heading, rows, left=3)


def differences() -> str:
    """Each optimizer minus AdamW."""
    others = [x for x in complete() if x[2] != "adamw"]
    found = {x: at_equal_old(*x) - at_equal_old(*x[:2], "adamw") for x in others}
    primary = [x for x in others if x[2] in PRIMARY]
    p_values = holm([float(stats.ttest_1samp(found[x], 0).pvalue) for x in primary])
    corrected = dict(zip(primary, p_values, strict=True))
    rows = []
    for (base, how, arm), full in found.items():
        alone = [at_best(base, how, x, "new") for x in (arm, "adamw")]
        p = corrected.get((base, how, arm))
        rows.append([
            f"`{base}`", WAYS[how], f"`{arm}`",
            *(str(interval(x)) for x in (full, alone[0] - alone[1])),
            "" if p is None else f"{p:.2g}",
        ])  # fmt: skip
    heading = ["Base", "Tuned", "Optimizer", "At equal loss on code",
               "At the best rates", "p"]  # fmt: skip
    return markdown(heading, rows, left=3)


def against_muon() -> str:
    """The endpoint of the others minus that of `muon`."""
    rows = []
    for base, how, arm in complete():
        if arm not in ("adamw", "muon"):
            ours, theirs = (at_equal_old(base, how, x) for x in (arm, "muon"))
            told = str(interval(ours - theirs))
            rows.append([f"`{base}`", WAYS[how], f"`{arm}`", told])
    return markdown(["Base", "Tuned", "Optimizer", "Minus `muon`"], rows, left=3)


def at_half() -> str:
    """Each optimizer minus AdamW, where AdamW forgets half as much."""
    rows = []
    for base, how, arm in complete():
        if arm in PRIMARY:
            pairs = [
                [at_equal_old(base, how, x, 0.5, rungs) for x in (arm, "adamw")]
                for rungs in (RUNGS, (*RUNGS, *LOWER))
            ]
            told = [str(interval(ours - theirs)) for ours, theirs in pairs]
            rows.append([f"`{base}`", WAYS[how], f"`{arm}`", *told])
    heading = ["Base", "Tuned", "Optimizer", "Four rates", "Six rates"]
    return markdown(heading, rows, left=3)


def equal_updates() -> str:
    """`muon` minus AdamW at its best rate, where their updates are equal."""
    rows = []
    for (base, how, arm), measure in itertools.product(complete(), MEASURES):
        if arm != "muon":
            continue
        cells = []
        for column in ("new", "old"):
            ours = at_equal_updates(base, how, arm, measure, column)
            both = ours - at_best(base, how, "adamw", column)
            inside = both[np.isfinite(both)]
            cells.append(str(interval(inside)) if len(inside) > 2 else "")
        cells.append(str(len(both) - len(inside)))
        rows.append([f"`{base}`", WAYS[how], MEASURES[measure], *cells])
    heading = ["Base", "Tuned", "Equal", "Prose", "Code", "Seeds outside"]
    return markdown(heading, rows, left=3)


def between_bases() -> str:
    """The endpoint with weights of `muon` minus that with weights of AdamW."""
    rows, others = [], [x for x in complete() if x[2] in PRIMARY]
    for base, how, arm in others:
        if base == "muon" and ("adamw", how, arm) in others:
            theirs, ours = (
                at_equal_old(x, how, arm) - at_equal_old(x, how, "adamw")
                for x in ("adamw", "muon")
            )
            rows.append([WAYS[how], f"`{arm}`", str(interval(ours - theirs))])
    heading = ["Tuned", "Optimizer", "Base `muon` minus base `adamw`"]
    return markdown(heading, rows, left=2)


TABLES = (starts, rates, differences, between_bases, against_muon, at_half,
          equal_updates)  # fmt: skip

if __name__ == "__main__":
    for table in TABLES:
        print(f"{table()}\n")
