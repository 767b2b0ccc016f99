"""Figures of the last recorded step: one point for each matrix."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from orscale_jax.diagnostics.report import style
from orscale_jax.diagnostics.report.run import Run

MAX_VECTOR_POINTS = 500  # More points are an image inside the SVG.


def calibration(run: Run) -> Figure:
    """Points at the c of each matrix, by class; median, and bar from p05 to p95."""
    figure = style.new_figure(0.7 + 0.3 * len(run.groups))
    axes = figure.subplots()
    positive = run.last[run.last["calibration"] > 0]
    looks = style.looks(run.groups)
    for row, group in enumerate(run.groups):
        values = positive.loc[positive["group"] == group, "calibration"]
        _strip(axes, row, values, looks[group].color)
    style.log_axis(axes, "x", positive["calibration"])
    axes.set_yticks(range(len(run.groups)), [style.short(name) for name in run.groups])
    axes.set_ylim(len(run.groups) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("calibration c")
    axes.grid(axis="x")
    return figure


def growth_against_ratio(run: Run) -> Figure:
    """The raw ratio r over ‖W‖/‖W_0‖; a matrix held at a bound is an empty marker."""
    figure = style.new_figure(4.2 + style.legend_height(run.groups))
    axes = figure.subplots()
    rows = run.last[(run.last["growth"] > 0) & (run.last["raw_trust_ratio"] > 0)]
    clipped = (rows["at_r_min"] == 1) | (rows["at_r_max"] == 1)
    for group, look in style.looks(run.groups).items():
        for chosen, face in ((~clipped, look.color), (clipped, "none")):
            points = rows[chosen & (rows["group"] == group)]
            axes.scatter(
                points["growth"], points["raw_trust_ratio"], s=22, marker=look.marker,
                facecolors=face, edgecolors=look.color, linewidths=1, alpha=0.75,
                rasterized=run.matrices > MAX_VECTOR_POINTS,
            )  # fmt: skip
        axes.scatter(
            [], [], s=22, marker=look.marker, color=look.color, label=style.short(group)
        )
    values = pd.concat([rows["growth"], rows["raw_trust_ratio"]])
    ends = [values.min() / 2, values.max() * 2]
    axes.plot(ends, ends, color=style.MUTED, lw=0.9, label="r = growth")
    style.log_axis(axes, "x", values)
    style.log_axis(axes, "y", values)
    axes.set_xlabel("growth ‖W‖/‖W₀‖")
    axes.set_ylabel("r before the clip")
    axes.grid(axis="both")
    style.add_legend(figure, run.groups)
    return figure


def _strip(axes: Axes, row: int, values: pd.Series, color: str) -> None:
    if values.empty:
        return
    shift = np.random.default_rng(row).uniform(-0.22, 0.22, len(values))
    axes.scatter(
        values, row + shift, s=12, color=color, alpha=0.5, linewidths=0,
        rasterized=len(values) > MAX_VECTOR_POINTS,
    )  # fmt: skip
    p05, median, p95 = values.quantile([0.05, 0.5, 0.95])
    axes.plot([p05, p95], [row, row], color=style.INK, lw=1.2)
    axes.plot([median], [row], color=style.INK, marker="|", ms=10, mew=2)
