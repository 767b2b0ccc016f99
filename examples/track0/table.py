"""Intervals, verdicts, and the table of all rows."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from examples.track0.entries import ENTRIES
from examples.track0.factories import find_factory
from examples.track0.losses import Losses
from examples.track0.row import Cell, stored_row
from examples.track0.runs import Program
from examples.track0.search import REGRET
from examples.track0.workloads import TEXTS, WORKLOADS

STORED = pathlib.Path(__file__).parents[2] / "docs" / "data" / "track0"

SMALLEST = 0.005  # Nats: a smaller difference is called level.


class Entry(NamedTuple):
    """A row: its MODULE:FACTORY, and what it did on each workload."""

    factory: str
    cells: Mapping[str, Cell]

    @property
    def bytes_of_state(self) -> int:
        """The bytes of the optimizer's state on the first workload."""
        return Program(WORKLOADS["code"], find_factory(self.factory)).bytes_of_state


class Difference(NamedTuple):
    """A mean over seeds, in nats, with its standard error and degrees of freedom."""

    mean: float
    error: float
    degrees: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        half = float(stats.t.ppf((1 + level) / 2, self.degrees)) * self.error
        return self.mean - half, self.mean + half

    @property
    def p_value(self) -> float:
        """The two-sided p-value of the hypothesis that there is no difference."""
        return 2 * float(stats.t.sf(abs(self.mean) / self.error, self.degrees))

    def __str__(self) -> str:
        return "{:+.4f} [{:+.4f}, {:+.4f}]".format(self.mean, *self.interval())


def difference(ours: np.ndarray, theirs: np.ndarray) -> Difference:
    """Of final losses of shape (workloads, seeds), paired by seed.

    The error counts the seeds, and that a search by few seeds does not find the best
    rates, neither ours nor theirs.
    """
    by_seed = np.mean(ours - theirs, axis=0)
    of_seeds = np.var(by_seed, ddof=1) / by_seed.size
    of_searches = 2 * REGRET**2 / len(ours)
    error = math.sqrt(of_seeds + of_searches)
    return Difference(float(by_seed.mean()), error, by_seed.size - 1)


def verdicts(
    means: Mapping[str, Difference], columns: Mapping[str, Sequence[float]]
) -> dict[str, str]:
    """ "better", "worse" or "level" for each entry, corrected by Holm over all of them.

    A verdict needs a corrected interval that excludes 0, a sign that three of four texts
    share, and a mean difference of more than 0.005 nats.

    Args:
      means: The mean differences from `muon` by entry.
      columns: The same on each text.
    """
    found, rejecting = {}, True
    ordered = sorted(means, key=lambda name: means[name].p_value)
    for rank, name in enumerate(ordered):
        mean = means[name].mean
        rejecting &= means[name].p_value * (len(ordered) - rank) < 0.05
        agree = sum(np.sign(x) == np.sign(mean) for x in columns[name])
        resolved = rejecting and agree >= 3 and abs(mean) > SMALLEST
        found[name] = ("better" if mean < 0 else "worse") if resolved else "level"
    return {name: found[name] for name in means}


def share_of_steps(curve: np.ndarray, loss: float) -> float:
    """Where a curve first reaches a loss, in parts of the steps; NaN if it does not.

    The curve has the losses after equal parts of the steps, between which it is linear.
    """
    reached = np.flatnonzero(curve <= loss)
    if reached.size == 0:
        return math.nan
    index = int(reached[0])
    if index == 0:
        return 1 / curve.size
    before, after = curve[index - 1], curve[index]
    return float(index + (before - loss) / (before - after)) / curve.size


def stored_entries() -> dict[str, Entry]:
    """The rows of the repository, by name."""
    entries = {}
    for path in sorted(STORED.glob("*.csv")):
        losses = Losses(path)
        entries[path.stem] = Entry(losses.entry, stored_row(losses))
    return entries


class Compared(NamedTuple):
    """An entry minus `muon`: over the texts, on each workload, and the verdict."""

    mean: Difference
    columns: Mapping[str, Difference]
    verdict: str


def compare(entries: Mapping[str, Entry]) -> dict[str, Compared]:
    """All entries but `muon`, the lowest mean first."""
    reference = entries["muon"].cells
    texts = [name for name in reference if name in TEXTS]

    def minus_muon(name: str, *workloads: str) -> Difference:
        both = (entries[name].cells, reference)
        return difference(*(np.array([c[w].finals for w in workloads]) for c in both))

    others = [name for name in entries if name != "muon"]
    means = {name: minus_muon(name, *texts) for name in others}
    columns = {name: {w: minus_muon(name, w) for w in reference} for name in others}
    on_texts = {name: [columns[name][t].mean for t in texts] for name in others}
    decided = verdicts(means, on_texts) if len(texts) == len(TEXTS) else {}
    return {
        name: Compared(means[name], columns[name], decided.get(name, "none"))
        for name in sorted(others, key=lambda name: means[name].mean)
    }


def markdown(entries: Mapping[str, Entry]) -> str:
    """The table of differences from `muon`, and the entries that have not been run."""
    reference, goal = entries["muon"].cells, entries.get("adamw")
    texts = [name for name in reference if name in TEXTS]
    of = "four texts" if len(texts) == len(TEXTS) else "text"
    heading = ["entry", of, "verdict", *reference, "rates over `muon`'s"]
    heading += ["steps to AdamW's loss, %", "state, bytes"]

    def line(name: str, found: list[str]) -> list[str]:
        cells = entries[name].cells
        times = [np.divide(cells[w].rates, reference[w].rates) for w in texts]
        shares = [
            share_of_steps(cells[w].curve, goal.cells[w].curve[-1]) if goal else math.nan
            for w in texts
        ]
        return [
            f"`{name}`",
            *found,
            ", ".join(f"{x:.2g}/{y:.2g}" for x, y in times),
            f"{100 * np.mean(shares):.0f}" if np.isfinite(shares).all() else "–",
            f"{entries[name].bytes_of_state:,}",
        ]

    rows = [(0.0, line("muon", ["0", "reference", *("0" for _ in reference)]))]
    for name, (mean, columns, verdict) in compare(entries).items():
        on_each = [
            f"{found.mean:+.4f}" if w in texts else str(found)
            for w, found in columns.items()
        ]
        rows.append((mean.mean, line(name, [str(mean), verdict, *on_each])))
    rule = ["---"] + ["--:"] * (len(heading) - 1)
    table = [heading, rule, *(row for _, row in sorted(rows))]
    waiting = [name for name in ENTRIES if name not in entries]
    table += [[f"`{name}`", "not yet run"] for name in waiting]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)
