"""Figures of the theory: what of r̂ is uniform, and the gain."""

import functools

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from orscale_jax.diagnostics.decomposition import Decomposition, decompose
from orscale_jax.diagnostics.report import gains, style, trajectories
from orscale_jax.diagnostics.report.readings import reading_of
from orscale_jax.diagnostics.report.run import Run


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
    """κ_eff with its standard error, and κ_layer, over the steps with an estimate."""
    figure = style.new_figure(3.0)
    axes = figure.subplots()
    steps = gains.verdicts(run)
    numbers = pd.DataFrame(
        [found.numbers for found in steps.values()],
        list(steps),
        columns=["kappa_eff", "kappa_eff_stderr", "kappa_layer"],
        dtype=float,
    )
    kappa, error = numbers["kappa_eff"], numbers["kappa_eff_stderr"]
    axes.axhline(1, color=style.MUTED, lw=0.8, ls=(0, (4, 3)))
    axes.plot(
        numbers.index, numbers["kappa_layer"], color=style.ORANGE, ls=style.DASHES[1],
        label="κ_layer, what is possible", **style.marks(kappa),
    )  # fmt: skip
    axes.plot(
        numbers.index, kappa, color=style.BLUE, label="κ_eff ± standard error",
        **style.marks(kappa),
    )  # fmt: skip
    if len(numbers) == 1:
        axes.vlines(numbers.index, kappa - error, kappa + error, color=style.BLUE, lw=1)
    axes.fill_between(
        numbers.index, kappa - error, kappa + error, color=style.BLUE, alpha=0.2, lw=0
    )
    axes.set_xlabel("step")
    axes.set_ylabel("gain over Muon")
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=2, handlelength=2.8)
    return figure


@functools.lru_cache(maxsize=1)
def decomposition(run: Run) -> Decomposition:
    """The decomposition of r̂, along the steps shown."""
    classes = {group: group for group in run.groups}
    members = {group: (run.final["group"] == group).to_numpy() for group in run.groups}
    readings = reading_of(run, run.shown, members)
    return jax.jit(jax.vmap(lambda reading: decompose(reading, classes)))(readings)
