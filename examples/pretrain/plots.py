"""The figures."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

from examples.pretrain.optimizers import OPTIMIZERS

SMOOTHING = 0.9  # Of the training loss: the weight of the past at each step.
RATIO_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
MOST_LINES = 8  # More matrices than these are drawn as a band.
INK, FAINT = "#333333", "#D9D9D9"
# Told apart by the colour-blind, too (Okabe and Ito).
COLORS = {"adamw": "#666666", "muon_moonlight": "#0072B2", "orscale": "#D55E00"}
OTHER_COLORS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

Curve = tuple[np.ndarray, np.ndarray]  # Steps and values.


def draw_losses(
    path: pathlib.Path,
    train: Mapping[str, Curve],
    val: Mapping[str, Curve],
    unit: str,
) -> None:
    """Loss curves of the arms: the whole run, and its second half closer up.

    Args:
      path: Of the PNG.
      train: Training loss of every step, by optimizer.
      val: Validation loss, by optimizer.
      unit: What one token is.
    """
    figure, (whole, late) = _two_panels(f"cross-entropy (nats per {unit})")
    for arm, curve in val.items():
        steps, losses = train[arm]
        color = color_of(arm)
        whole.plot(steps, smooth(losses), color=color, lw=1, alpha=0.45)
        for axes in (whole, late):
            axes.plot(*curve, color=color, lw=1.8, marker="o", ms=3.5)
    whole.plot([], [], color=INK, lw=1.8, marker="o", ms=3.5, label="validation")
    whole.plot([], [], color=INK, lw=1, alpha=0.45, label="training, smoothed")
    whole.legend(frameon=False)
    late.set_title("Second half, validation", loc="left")
    _zoom(late, list(val.values()))
    _label_ends(late, val)
    _save(figure, path)


def draw_seeds(path: pathlib.Path, val: Mapping[str, Sequence[Curve]], unit: str) -> None:
    """Validation loss of several runs of each arm (thin) and their mean (thick).

    Args:
      path: Of the PNG.
      val: One curve per run, over the same steps, by optimizer.
      unit: What one token is.
    """
    figure, (whole, late) = _two_panels(f"validation cross-entropy (nats per {unit})")
    means = {}
    for arm, curves in val.items():
        means[arm] = curves[0][0], np.mean([losses for _, losses in curves], axis=0)
        for axes in (whole, late):
            for curve in curves:
                axes.plot(*curve, color=color_of(arm), lw=0.8, alpha=0.5)
            axes.plot(*means[arm], color=color_of(arm), lw=2.2)
    whole.plot([], [], color=INK, lw=2.2, label="mean of the runs")
    whole.plot([], [], color=INK, lw=0.8, alpha=0.5, label="single runs")
    whole.legend(frameon=False)
    late.set_title("Second half", loc="left")
    _zoom(late, [curve for curves in val.values() for curve in curves])
    _label_ends(late, means)
    _save(figure, path)


def draw_trust_ratios(path: pathlib.Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Trust ratios as applied: a panel for each class of layers, a line for each matrix.

    Where a class has many, its panel has their median and the band of the middle 90 %.

    Args:
      path: Of the PNG.
      rows: Of history.csv.
    """
    classes: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        lines = classes.setdefault(row["class"], {})
        lines.setdefault(row["matrix"], []).append(float(row["trust_ratio"]))
    steps = sorted({int(row["step"]) for row in rows})
    columns = min(len(classes), 3 if len(classes) <= 6 else 4)
    height = -(-len(classes) // columns)
    size = (10, 1.2 + 2.1 * height)
    figure, grid = _figure(height, columns, size, sharex=True, sharey=True)
    panels = grid.ravel()
    for axes, (name, lines) in zip(panels, classes.items(), strict=False):
        _draw_class(axes, name, steps, np.array(list(lines.values())))
    _ratio_axis(panels[0])
    for axes in panels[len(classes) :]:
        axes.set_visible(False)
    figure.supxlabel("step. Lines are layers, from dark (first) to light", fontsize=10)
    figure.supylabel("trust ratio applied (log scale)", fontsize=10)
    _save(figure, path)


def _draw_class(axes: Axes, name: str, steps: Sequence[int], values: np.ndarray) -> None:
    axes.set_title(name, loc="left", fontsize=10)
    axes.axhline(1, color=INK, lw=0.8, ls=(0, (4, 3)))
    if len(values) <= MOST_LINES:
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(values)))
        for shade, line in zip(shades, values, strict=True):
            axes.plot(steps, line, color=shade, lw=1.6)
        return
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
    axes.fill_between(steps, low, high, color="#0072B2", alpha=0.2, lw=0)
    axes.plot(steps, middle, color="#0072B2", lw=1.8)
    axes.annotate(
        f"median and middle 90 % of {len(values)}",
        (0.02, 0.03),
        xycoords="axes fraction",
        fontsize=7,
        color=INK,
    )


def _ratio_axis(axes: Axes) -> None:
    """A logarithmic axis with some room around what is drawn, and around 1."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.7), max(high, 1.5))
    axes.yaxis.set_major_locator(FixedLocator(RATIO_TICKS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())


def draw_loads(path: pathlib.Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Loads of the experts relative to even ones, a panel for each layer.

    Args:
      path: Of the PNG.
      rows: Of expert_loads.csv.
    """
    steps = sorted({int(row["step"]) for row in rows})
    layers = 1 + max(int(row["layer"]) for row in rows)
    experts = 1 + max(int(row["expert"]) for row in rows)
    shares = np.array([float(row["share"]) for row in rows])
    loads = shares.reshape(len(steps), layers, experts) * experts
    figure, grid = _figure(1, layers, (min(4 + 3 * layers, 14), 3.4), sharey=True)
    for layer, axes in enumerate(grid.ravel()):
        axes.axhline(1, color=INK, lw=0.8, ls=(0, (4, 3)))
        axes.plot(steps, loads[:, layer], color="#009E73", lw=0.8, alpha=0.6)
        axes.set_title(f"mixture layer {layer}", loc="left")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    grid.ravel()[0].set_ylabel("load of an expert (1 is even)")
    _save(figure, path)


def color_of(name: str) -> str:
    """The colour of an optimizer, the same in all figures."""
    others = [other for other in OPTIMIZERS if other not in COLORS]
    if name in COLORS:
        return COLORS[name]
    return OTHER_COLORS[others.index(name) % len(OTHER_COLORS)]


def smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average, corrected for its start."""
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(mean / weight)
    return np.array(result)


def _two_panels(ylabel: str) -> tuple[Figure, np.ndarray]:
    figure, panels = _figure(1, 2, (10, 4.2), width_ratios=(1, 1.15))
    panels[0].set_title("Whole run", loc="left")
    panels[0].set_ylabel(ylabel)
    for axes in panels:
        axes.set_xlabel("step")
    return figure, panels


def _figure(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    grid = np.atleast_1d(figure.subplots(rows, columns, **options))
    for axes in grid.ravel():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, lw=0.6)
        axes.set_axisbelow(True)
    return figure, grid


def _zoom(axes: Axes, curves: Sequence[Curve]) -> None:
    """Limits the axes to the second half of the curves."""
    last = max(steps[-1] for steps, _ in curves)
    shown = np.concatenate([values[steps >= last / 2] for steps, values in curves])
    shown = shown[np.isfinite(shown)]
    axes.set_xlim(last / 2, 1.01 * last)  # Room for the last marker.
    if shown.size:
        margin = 0.05 * np.ptp(shown) + 1e-6
        axes.set_ylim(shown.min() - margin, shown.max() + margin)


def _label_ends(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Names the arms at the right ends of their lines, far enough apart to be read."""
    low, high = axes.get_ylim()
    lowest = 0.0
    ends = {arm: float(values[-1]) for arm, (_, values) in curves.items()}
    for arm, value in sorted(ends.items(), key=lambda item: item[1]):
        place = max((value - low) / (high - low), lowest) if np.isfinite(value) else 1.0
        lowest = place + 0.065
        axes.text(
            1.02,
            place,
            f"{OPTIMIZERS[arm].label}  {value:.4f}",
            color=color_of(arm),
            transform=axes.transAxes,
            va="center",
            fontweight="bold",
            fontsize=9,
        )


def _save(figure: Figure, path: pathlib.Path) -> None:
    figure.savefig(path)
