"""The heat map of r̂: matrices, layers or classes over steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from orscale_jax.diagnostics.report import style
from orscale_jax.diagnostics.report.run import Run, natural

MAX_MATRICES = 60  # More have no row of their own.
MAX_LABELS = 48


class Heat(NamedTuple):
    """Rows of a heat map.

    Attributes:
      values: Geometric means of r̂, one row for each row of the map and a column for each
        step.
      labels: The text at a row, by its place; rows of one class share one label.
      edges: The places between classes.
    """

    values: pd.DataFrame
    labels: dict[float, str]
    edges: list[int]


def trust_ratio_map(run: Run) -> Figure:
    """r̂ over layer and step; gray is 1."""
    heat = rows_of(run)
    count = len(heat.values)
    figure = style.new_figure(1.2 + max(0.14, 2 / count) * count)
    axes = figure.subplots()
    steps = np.array(run.shown_steps, dtype=float)
    limit = _limit(heat.values)
    mesh = axes.pcolormesh(
        _boundaries(steps),
        np.arange(count + 1) - 0.5,
        np.ma.masked_invalid(heat.values.to_numpy()),
        cmap=style.AROUND_ONE,
        norm=LogNorm(1 / limit, limit),
        rasterized=True,
    )
    for edge in heat.edges:
        axes.axhline(edge - 0.5, color=style.PAPER, lw=1)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_yticks(
        list(heat.labels), [style.short(name) for name in heat.labels.values()]
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("step")
    if len(steps) < 6:
        axes.set_xticks(steps)
    bar = figure.colorbar(mesh, ax=axes, location="top", shrink=0.6, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    style.log_axis(bar.ax, "x", [1 / limit, limit])
    bar.set_label("trust ratio r̂")
    return figure


def rows_of(run: Run) -> Heat:
    """One row for each matrix while they are few; else one for each layer, or class."""
    if run.matrices <= MAX_MATRICES:
        return _by_matrix(run)
    column = "layer" if run.last["layer"].nunique() > 1 else "group"
    rows = run.shown.assign(log=_log(run.shown["trust_ratio"]))
    # Classes count alike: 64 experts do not outvote the attention beside them.
    keys = ["step", column, "group"] if column == "layer" else ["step", "group"]
    means = rows.groupby(keys, sort=False)["log"].mean()
    means = means.groupby(level=[0, 1], sort=False).mean()
    values = np.exp(means.unstack("step"))
    values = values.reindex(sorted(values.index, key=_place(run, column)))
    names = [str(name) or "no layer" for name in values.index]
    every = -(-len(names) // MAX_LABELS)
    return Heat(values, dict(list(enumerate(names))[::every]), [])


def _by_matrix(run: Run) -> Heat:
    place = _place(run, "group")
    pairs = zip(run.last["matrix"], run.last["group"], strict=True)
    order = sorted(pairs, key=lambda pair: (place(pair[1]), natural(pair[0])))
    values = run.shown.assign(ratio=np.exp(_log(run.shown["trust_ratio"])))
    table = values.pivot_table(
        index="matrix", columns="step", values="ratio", dropna=False, sort=False
    )
    groups = [group for _, group in order]
    starts = [i for i, group in enumerate(groups) if i == 0 or group != groups[i - 1]]
    ends = [*starts[1:], len(groups)]
    labels = {
        (start + end - 1) / 2: groups[start]
        for start, end in zip(starts, ends, strict=True)
    }
    return Heat(table.reindex([matrix for matrix, _ in order]), labels, starts[1:])


def _place(run: Run, column: str) -> Callable[[str], Any]:
    """The key that sorts rows: classes as everywhere, layers by their numbers."""
    return run.groups.index if column == "group" else natural


def _log(ratio: pd.Series) -> pd.Series:
    return np.log(ratio.where(ratio > 0))


def _limit(values: pd.DataFrame) -> float:
    """The ratio at the dark end of the colors, whose inverse is at the other."""
    logs = np.abs(np.log(values.to_numpy()))
    logs = logs[np.isfinite(logs)]
    return float(np.exp(max(logs.max(initial=0.0), 0.05)))


def _boundaries(steps: np.ndarray) -> np.ndarray:
    """The edges of the columns: halfway between steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    first, last = steps[0] - (middles[0] - steps[0]), 2 * steps[-1] - middles[-1]
    return np.array([first, *middles, last])
