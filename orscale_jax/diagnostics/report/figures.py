"""The figures of the report, in their order."""

from collections.abc import Callable
from typing import NamedTuple

from matplotlib.figure import Figure

from orscale_jax.diagnostics.report import gains, heatmap, snapshots, theory, trajectories
from orscale_jax.diagnostics.report.run import Run


class Entry(NamedTuple):
    """A figure of the report.

    Attributes:
      name: Its id in the page and the name of its PNG.
      title: Its heading.
      caption: Its use, and how to read it.
      left_out: Says why a run has no such figure; empty if it has one.
      draw: The function that draws it.
      numbers: Its last values in words, for those who cannot see it.
    """

    name: str
    title: str
    caption: str
    left_out: Callable[[Run], str]
    draw: Callable[[Run], Figure]
    numbers: Callable[[Run], str]


def without(*columns: str) -> Callable[[Run], str]:
    """Make a function that says which columns of a figure the history does not have."""

    def left_out(run: Run) -> str:
        missing = [column for column in columns if not run.has(column)]
        return f"The history has no {' and no '.join(missing)}." if missing else ""

    return left_out


def without_gain(run: Run) -> str:
    """Say why the gain is not known; nothing if it is."""
    if gains.verdicts(run):
        return ""
    if missing := without("trust_ratio", "signal", "smoothness")(run):
        return (
            f"{missing[:-1]}, and no kappa_step." if run.has("trust_ratio") else missing
        )
    return "The run folder has no audit.csv with the shapes of the matrices."


def means_of(column: str) -> Callable[[Run], str]:
    """Make a function that says the mean of a column by class, at the last step."""

    def numbers(run: Run) -> str:
        means = run.last.groupby("group", sort=False)[column].mean()
        told = ", ".join(f"{group} {mean:.3g}" for group, mean in means.items())
        return f"Means at step {run.steps[-1]}: {told}."

    return numbers


def gains_of(run: Run) -> str:
    """Say the gain at the last estimate."""
    return gains.verdict_of(run)[0].text


FIGURES = (
    Entry(
        "trust_ratio_by_class",
        "Trust ratio by class",
        "The ratio r̂ that scaled each step: mean of a class, with the band from its "
        "5th to its 95th percentile; at the dashed line 1 the step is Muon's. Classes "
        "that part and stay apart are what a gain over Muon can come from; if all "
        "move together, only the learning rate has changed.",
        without("trust_ratio"),
        trajectories.trust_ratio_by_class,
        means_of("trust_ratio"),
    ),
    Entry(
        "trust_ratio_of_all",
        "Trust ratio of all matrices",
        "Mean and 5th to 95th percentile over all matrices, and below the share of "
        "them that the clip holds at a bound. A narrow band or a share near 100% "
        "means that the ratio no longer tells layers apart.",
        without("trust_ratio"),
        trajectories.trust_ratio_of_all,
        means_of("trust_ratio"),
    ),
    Entry(
        "calibration",
        "Calibration",
        "The constant c of each matrix at the last step, with the median (tick) and "
        "the 5th to 95th percentile (bar) of its class. A matrix far to the right of "
        "its class had a small first direction, often one of low rank, and is held at "
        "short steps.",
        without("calibration"),
        snapshots.calibration,
        means_of("calibration"),
    ),
    Entry(
        "relative_step",
        "Relative step",
        "How far a step moves the weights of a class, relative to their norm: the "
        "mean of η r̂ ‖D‖/‖W‖, in percent. It follows the learning rate's schedule; a "
        "class far above the others is the first suspect when a run turns unstable.",
        without("relative_step"),
        trajectories.relative_step,
        means_of("relative_step"),
    ),
    Entry(
        "trust_ratio_map",
        "Trust ratio by layer and step",
        "Each row is a matrix, from the first layer of its class to the last, or a "
        "layer where there are more than 60 matrices; vermilion steps are longer "
        "than Muon's, blue ones shorter. It shows whether a trend belongs to a class, "
        "to a depth or to a single matrix.",
        without("trust_ratio"),
        heatmap.trust_ratio_map,
        means_of("trust_ratio"),
    ),
    Entry(
        "growth_against_ratio",
        "Growth against ratio",
        "Each point is a matrix at the last step; empty ones are held at a bound. On "
        "the line, r is the growth of the matrix; the distance from the line is the "
        "factor ‖D₀‖/‖D‖, and points far below it had a small first direction, on which "
        "c is anchored.",
        without("growth", "raw_trust_ratio"),
        snapshots.growth_against_ratio,
        means_of("raw_trust_ratio"),
    ),
    Entry(
        "uniform_part",
        "How much of the ratio is uniform",
        "Above, the geometric mean of r̂ over all matrices, weighted by their relative "
        "steps, which acts like a factor of the learning rate; below, what is left of "
        "each class after division by it. Only the lower part is layer-wise: lines "
        "that stay at 1 mean that Muon with another learning rate does the same.",
        without("trust_ratio"),
        theory.uniform_part,
        means_of("trust_ratio"),
    ),
    Entry(
        "gain",
        "Gain over Muon",
        "How much more a step with these ratios can lower the loss than Muon's, each at "
        "its best learning rate: along the step itself (κ), and in the paper's model "
        "(κ_eff), which leaves out the curvature between matrices; bars and bands are "
        "one standard error. κ_layer is what the model's best ratios would reach. Above "
        "1 the ratios pay; below 1 they point the wrong way.",
        without_gain,
        theory.gain,
        gains_of,
    ),
    Entry(
        "loss",
        "Loss",
        "The loss that the run recorded. Compare its bends with the figures above: a "
        "jump that follows a jump of a relative step names its likely cause.",
        without("loss"),
        trajectories.loss,
        means_of("loss"),
    ),
)
