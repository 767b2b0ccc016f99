"""Figures over the steps of a run, from the readouts of the optimizer."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from orscale_jax.diagnostics.report import style
from orscale_jax.diagnostics.report.run import Run, thinned


class Band(NamedTuple):
    """The mean of a quantity and its 5th and 95th percentile, at each step."""

    mean: pd.Series
    p05: pd.Series
    p95: pd.Series


def trust_ratio_by_class(run: Run) -> Figure:
    """r̂ by class: mean and p05–p95 band, one panel per class."""
    looks = style.looks(run.groups)
    bands = {
        group: band_of(rows, "trust_ratio")
        for group, rows in run.shown.groupby("group", sort=False)
    }
    columns = 3 if len(run.groups) > 6 and max(map(len, run.groups)) <= 20 else 2
    rows = -(-len(run.groups) // columns)
    figure = style.new_figure(0.35 + 1.3 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in panels.flat[len(run.groups) :]:
        axes.set_axis_off()
    drawn = [*(line for band in bands.values() for line in band), pd.Series(_marked(run))]
    for axes, group in zip(panels.flat, run.groups, strict=False):
        axes.set_title(style.short(group), fontsize=9)
        style.log_axis(axes, "y", pd.concat(drawn))
        _draw_bounds(axes, run, named=group == run.groups[0])
        _draw_band(axes, bands[group], looks[group].color)
        finish(axes, run)
    figure.supxlabel("step", fontsize=9.5)
    figure.supylabel("trust ratio r̂", fontsize=9.5)
    return figure


def trust_ratio_of_all(run: Run) -> Figure:
    """r̂ over all matrices, and the share of them at a bound."""
    figure = style.new_figure(4.1)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
    band = band_of(run.shown, "trust_ratio")
    style.log_axis(above, "y", pd.concat([*band, pd.Series(_marked(run))]))
    _draw_bounds(above, run)
    _draw_band(above, band, style.INK)
    above.set_ylabel("trust ratio r̂")
    drawn = (
        ("at_r_max", "at r_max", style.VERMILION),
        ("at_r_min", "at r_min", style.BLUE),
    )
    for column, label, color in drawn:
        if run.has(column):
            share = 100 * run.shown.groupby("step", sort=False)[column].mean()
            below.plot(share.index, share, color=color, label=label, **style.marks(share))
            below.fill_between(share.index, share, color=color, alpha=0.15, lw=0)
    below.set_ylim(0, 100)
    below.set_ylabel("at a bound (%)")
    below.set_xlabel("step")
    below.legend(loc="upper left")
    finish(above, run)
    finish(below, run)
    return figure


def relative_step(run: Run) -> Figure:
    """η·r̂·‖D‖/‖W‖ by class, in percent."""
    figure = style.new_figure(3.1 + style.legend_height(run.groups))
    axes = figure.subplots()
    groups = run.shown.groupby(["step", "group"], sort=False)
    means = 100 * groups["relative_step"].mean().unstack("group")
    draw_classes(axes, run, means)
    style.log_axis(axes, "y", means)
    axes.set_ylabel("relative step (% of ‖W‖)")
    axes.set_xlabel("step")
    finish(axes, run)
    style.add_legend(figure, run.groups)
    return figure


def loss(run: Run) -> Figure:
    """Training and validation loss."""
    figure = style.new_figure(2.9)
    axes = figure.subplots()
    drawn = (
        ("loss", "training", style.BLUE),
        ("val_loss", "validation", style.VERMILION),
    )
    for column, label, color in drawn:
        if run.has(column):
            curve = per_step(run, column)
            axes.plot(curve.index, curve, color=color, label=label, **style.marks(curve))
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    finish(axes, run)
    return figure


def per_step(run: Run, column: str) -> pd.Series:
    """A quantity that all rows of a step share, at the steps that have it."""
    rows = run.rows[np.isfinite(run.rows[column])]
    values = rows.drop_duplicates("step").set_index("step")[column]
    return values.loc[thinned(list(values.index))]


def draw_classes(axes: Axes, run: Run, values: pd.DataFrame) -> None:
    """A line for each class; what is not positive has no place on a logarithmic axis."""
    for group, look in style.looks(run.groups).items():
        if group in values:
            line = values[group].where(values[group] > 0)
            axes.plot(
                line.index, line, color=look.color, ls=look.dashes,
                label=style.short(group), **style.marks(line, look.marker),
            )  # fmt: skip


def band_of(rows: pd.DataFrame, column: str) -> Band:
    """Mean and percentiles at each step, over what is positive."""
    steps = rows.assign(**{column: rows[column].where(rows[column] > 0)})
    groups = steps.groupby("step", sort=False)[column]
    return Band(groups.mean(), groups.quantile(0.05), groups.quantile(0.95))


def _draw_band(axes: Axes, band: Band, color: str) -> None:
    steps = band.mean.index
    if len(steps) == 1:
        axes.vlines(steps, band.p05, band.p95, color=color, alpha=0.3, lw=5)
    axes.fill_between(steps, band.p05, band.p95, color=color, alpha=0.22, lw=0)
    axes.plot(steps, band.mean, color=color, **style.marks(band.mean))


def _marked(run: Run) -> dict[str, float]:
    """The values of r̂ that have a line: Muon's 1, and the bounds that hold a matrix."""
    found = {"": 1.0}
    for column, name in (("at_r_min", "r_min"), ("at_r_max", "r_max")):
        if run.has(column):
            held = run.shown.loc[run.shown[column] == 1, "trust_ratio"].dropna()
            if len(held):
                found[name] = float(held.median())
    return found


def _draw_bounds(axes: Axes, run: Run, named: bool = True) -> None:
    for name, value in _marked(run).items():
        axes.axhline(value, color=style.MUTED, lw=0.8, ls=(0, (4, 3)))
        axes.annotate(
            name if named else "",
            xy=(0, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(4, 2 if name == "r_min" else -2),
            textcoords="offset points",
            va="bottom" if name == "r_min" else "top",
            color=style.MUTED,
            fontsize=8,
        )


def finish(axes: Axes, run: Run) -> None:
    """Grid lines, and ticks at the steps themselves where they are few."""
    axes.grid(axis="y")
    if len(run.shown_steps) < 6:
        axes.set_xticks(run.shown_steps)
