"""Figures of the theory: what of r̂ is uniform, and the gain."""

import functools

import jax
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from orscale_jax.diagnostics.report import gains, style, trajectories
from orscale_jax.diagnostics.report.readings import reading_of
from orscale_jax.diagnostics.report.run import Run
from orscale_jax.diagnostics.theory.decompose import Decomposition, decompose


def uniform_part(run: Run) -> Figure:
    """The geometric mean of r̂ over all matrices, and what is left of it per class."""
    figure = style.new_figure(4.5 + style.legend_height(run.groups))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))
    found = decomposition(run)
    uniform = pd.Series(np.asarray(found.uniform), run.shown_steps)
    left = pd.DataFrame(dict(found.class_remainder), run.shown_steps)
    above.plot(uniform.index, uniform, color=style.INK, **style.marks(uniform))
    trajectories.draw_classes(below, run, left)
    for axes, values in ((above, uniform), (below, left)):
        style.log_axis(axes, "y", np.append(values.to_numpy().ravel(), 1.0))
        axes.axhline(1, color=style.MUTED, lw=0.8, ls=(0, (4, 3)))
        trajectories.finish(axes, run)
    above.set_ylabel("uniform part")
    below.set_ylabel("class / uniform part")
    below.set_xlabel("step")
    style.add_legend(figure, run.groups)
    return figure


def gain(run: Run) -> Figure:
    """κ along the step and κ_eff with their standard errors, and κ_layer."""
    figure = style.new_figure(3.0)
    axes = figure.subplots()
    steps = gains.verdicts(run)
    numbers = pd.DataFrame(
        [found.numbers for found in steps.values()],
        list(steps),
        columns=["kappa_step", "kappa_step_stderr", "kappa_eff", "kappa_eff_stderr",
                 "kappa_layer"],
        dtype=float,
    )  # fmt: skip
    axes.axhline(1, color=style.MUTED, lw=0.8, ls=(0, (4, 3)))
    possible = numbers["kappa_layer"].dropna()
    if len(possible):
        axes.plot(
            possible.index, possible, color=style.ORANGE, ls=style.DASHES[1],
            label="κ_layer, possible in the model", **style.marks(possible),
        )  # fmt: skip
    _with_errors(axes, numbers, "kappa_eff", (style.SKY, "κ_eff, the paper's model"))
    _with_errors(axes, numbers, "kappa_step", (style.BLUE, "κ along the step"))
    axes.set_ylim(*_limits(numbers))
    axes.set_xlabel("step")
    axes.set_ylabel("gain over Muon")
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _with_errors(
    axes: Axes, numbers: pd.DataFrame, name: str, look: tuple[str, str]
) -> None:
    """Draw one kind of κ, where it is known."""
    known = numbers[[name, f"{name}_stderr"]].dropna()
    if known.empty:
        return
    (kappa, error), (color, label) = (known[column] for column in known), look
    axes.errorbar(
        known.index, kappa, error, color=color, label=label, capsize=2, lw=1.5,
        marker="o", ms=3,
    )  # fmt: skip


def _limits(numbers: pd.DataFrame) -> tuple[float, float]:
    """Limits that show what is known, whatever the errors of the rest."""
    kappas = numbers[["kappa_step", "kappa_eff", "kappa_layer"]].to_numpy()
    shown = np.append(kappas[np.isfinite(kappas)], 1.0)
    low, high = max(shown.min(), 0.0), min(shown.max(), 4.0)
    margin = 0.15 * (high - low) + 0.05
    return max(low - margin, 0.0), high + margin


@functools.lru_cache(maxsize=1)
def decomposition(run: Run) -> Decomposition:
    """The decomposition of r̂, along the steps shown."""
    classes = {group: group for group in run.groups}
    members = {group: (run.final["group"] == group).to_numpy() for group in run.groups}
    readings = reading_of(run, run.shown, members)
    return jax.jit(jax.vmap(lambda reading: decompose(reading, classes)))(readings)
