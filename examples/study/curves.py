"""How early `muon` passes AdamW's final loss, from the validation curves in docs/data.

    python -m examples.study.curves

prints a row for each workload of the first study, and draws the largest dense one into
docs, where `muon` has twice AdamW's best rate. All have the same five seeds. It is
exploratory: the question was asked after the runs.
"""

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from examples import figure_style as style
from examples.study.contrasts import DATA, IMAGES, REFERENCE, TEXT, losses_of
from examples.study.statistics import Interval, interval, markdown
from examples.study.workloads import find_workload

SEEDS = range(5)
SHOWN = "dense-large"
FIGURE = pathlib.Path("docs/muon_curves.png")
DARK = {"ink": "#D0D0D0", "paper": "#0D1117", "faint": "#30363D"}

Curves = Mapping[int, np.ndarray]  # By seed, losses after equal parts of the steps.


def best_rate(workload: str, arm: str) -> float:
    """The rate with the lowest mean of the final losses of five seeds."""
    whole = {
        rate: np.mean([losses[seed] for seed in SEEDS])
        for (rate,), losses in losses_of(workload, arm).items()
        if {*SEEDS} <= {*losses}
    }
    return min(whole, key=whole.__getitem__)


def curves_at(workload: str, arm: str, rate: float) -> Curves:
    """The curves of the runs at a rate."""
    with (DATA / f"{workload}.csv").open(newline="") as file:
        return {
            int(row["seed"]): np.array(row["losses"].split(), float)
            for row in csv.DictReader(file)
            if row["arm"] == arm and float(row["rate"]) == rate
        }


def share_of_steps(curve: np.ndarray, target: float) -> float:
    """After which share of its steps a curve passes a loss, by linear interpolation."""
    shares = np.arange(1, len(curve) + 1) / len(curve)
    after = int(np.argmax(curve <= target))
    if curve[after] > target:
        raise ValueError(f"The curve ends at {curve[-1]}, above {target}.")
    if after == 0:
        return float(shares[0])
    return float(
        np.interp(-target, -curve[after - 1 : after + 1], shares[after - 1 : after + 1])
    )


def shares(workload: str, twice: bool = False) -> np.ndarray:
    """By seed, when Muon+Moonlight passes the final loss of AdamW's run at its best rate.

    Its own rate is its best one, or twice AdamW's best.
    """
    rate = best_rate(workload, "adamw")
    theirs = curves_at(workload, "adamw", rate)
    own = float(f"{2 * rate:.6g}") if twice else best_rate(workload, REFERENCE)
    ours = curves_at(workload, REFERENCE, own)
    return np.array([share_of_steps(ours[seed], theirs[seed][-1]) for seed in SEEDS])


def mean_shares(workloads: Sequence[str], twice: bool = False) -> Interval:
    """The mean over workloads, with its interval over the seeds."""
    return interval(np.mean([shares(name, twice) for name in workloads], axis=0))


def draw(path: pathlib.Path, ink: str, paper: str, faint: str) -> None:
    """The mean curves of the shown workload, with the range of the seeds."""
    parts = ("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colors: dict[Any, str] = dict.fromkeys((*parts, "text.color"), ink)
    colors["axes.facecolor"] = paper
    steps, means = find_workload(SHOWN).config.recipe.steps, {}
    best = best_rate(SHOWN, "adamw")
    with matplotlib.rc_context({**style.RC, **colors, "grid.color": faint}):
        figure = Figure(figsize=(5.4, 3.2))
        axes = figure.subplots()
        for arm, rate, label, color in (
            ("adamw", best, "AdamW", "#8C8C8C"),
            (REFERENCE, 2 * best, "muon", "#3B8FD0"),
        ):
            curves = np.array([x for _, x in sorted(curves_at(SHOWN, arm, rate).items())])
            at = np.arange(1, curves.shape[1] + 1) / curves.shape[1] * steps
            low, high, mean = curves.min(0), curves.max(0), curves.mean(0)
            axes.fill_between(at, low, high, color=color, alpha=0.25, lw=0)
            axes.plot(at, mean, color=color, marker="o", ms=4, lw=2)
            axes.text(1.02 * steps, mean[-1], label, color=color, va="center")
            means[arm] = mean
        end = float(means["adamw"][-1])
        share = share_of_steps(means[REFERENCE], end)
        axes.hlines(end, share * steps, steps, color=ink, lw=1, ls=":")
        axes.annotate(
            f"muon passes AdamW's final loss\nafter {round(100 * share)} % of the steps",
            (share * steps, end),
            (0.42, 0.75),
            textcoords="axes fraction",
            arrowprops={"arrowstyle": "->", "color": ink},
        )
        axes.set(xlabel="step", ylabel="validation loss, nats per byte")
        axes.set(xlim=(0, 1.2 * steps), xticks=range(0, steps + 1, 100))
        axes.grid()
        figure.savefig(path, dpi=style.DPI, facecolor=paper)


def main() -> None:
    """Prints the table and draws the figure, light and dark."""
    ways = (False, True)
    rows = [
        [f"`{name}`", *(str(round(100 * shares(name, x).mean())) for x in ways)]
        for name in (*TEXT, *IMAGES)
    ]
    every = [*TEXT, *IMAGES]
    for label, names in (("text", TEXT), ("drawn shapes", IMAGES), ("all", every)):
        found = [[100 * x for x in mean_shares(names, way)] for way in ways]
        told = ["{:.0f} [{:.0f}, {:.0f}]".format(*x) for x in found]
        rows.append([f"{len(names)} workloads: {label}", *told])
    print(markdown(["% of the steps", "own best rate", "twice AdamW's"], rows))
    draw(FIGURE, style.INK, style.PAPER, style.FAINT)
    draw(FIGURE.with_stem(f"{FIGURE.stem}_dark"), **DARK)


if __name__ == "__main__":
    main()
