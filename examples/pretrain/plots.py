"""The figures."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from examples.pretrain.arms import ARMS, R_MAX, R_MIN

SMOOTHING = 0.9  # Of the training loss: the weight of the past at each step.
INK, FAINT = "#333333", "#D9D9D9"
# Panels of the matrices stand in the order in which a block uses them.
KINDS = ("query", "key", "value", "out", "up", "down")

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
      train: Training loss of every step, by arm.
      val: Validation loss, by arm.
      unit: What one token is.
    """
    figure, (whole, late) = _two_panels(f"cross-entropy (nats per {unit})")
    for arm, curve in val.items():
        steps, losses = train[arm]
        color = ARMS[arm].color
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
      val: One curve per run, over the same steps, by arm.
      unit: What one token is.
    """
    figure, (whole, late) = _two_panels(f"validation cross-entropy (nats per {unit})")
    means = {}
    for arm, curves in val.items():
        means[arm] = curves[0][0], np.mean([losses for _, losses in curves], axis=0)
        for axes in (whole, late):
            for curve in curves:
                axes.plot(*curve, color=ARMS[arm].color, lw=0.8, alpha=0.5)
            axes.plot(*means[arm], color=ARMS[arm].color, lw=2.2)
    whole.plot([], [], color=INK, lw=2.2, label="mean of the runs")
    whole.plot([], [], color=INK, lw=0.8, alpha=0.5, label="single runs")
    whole.legend(frameon=False)
    late.set_title("Second half", loc="left")
    _zoom(late, [curve for curves in val.values() for curve in curves])
    _label_ends(late, means)
    _save(figure, path)


def draw_trust_ratios(path: pathlib.Path, ratios: Mapping[str, Curve]) -> None:
    """Trust ratios as applied: one panel per kind of matrix, one line per layer.

    Args:
      path: Of the PNG.
      ratios: By name of the matrix, such as blocks.0.attention.query.kernel.
    """
    kinds: dict[str, dict[int, Curve]] = {}
    for name, curve in ratios.items():
        _, index, kind = name.removesuffix(".kernel").split(".", 2)
        kinds.setdefault(kind, {})[int(index)] = curve
    layers = sorted({layer for lines in kinds.values() for layer in lines})
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(layers)))
    figure, grid = _figure(2, 3, (10, 6), sharex=True, sharey=True)
    panels = grid.ravel()
    in_order = sorted(kinds, key=lambda kind: KINDS.index(kind.rpartition(".")[2]))
    for axes, kind in zip(panels, in_order, strict=True):
        axes.set_title(kind, loc="left")
        _bounds(axes)
        for layer, shade in zip(layers, shades, strict=True):
            steps, values = kinds[kind][layer]
            axes.plot(steps, values, color=shade, lw=1.8, label=f"layer {layer}")
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("trust ratio applied (log scale)", fontsize=10)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper right",
        ncols=min(len(layers), 8),
        frameon=False,
    )
    _save(figure, path)


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
    grid = figure.subplots(rows, columns, **options)
    for axes in grid.ravel():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, lw=0.6)
        axes.set_axisbelow(True)
    return figure, grid


def _bounds(axes: Axes) -> None:
    """A logarithmic axis between the clip bounds, with lines at them and at 1."""
    axes.set_yscale("log")
    axes.set_ylim(R_MIN * 0.8, R_MAX * 1.25)
    axes.yaxis.set_major_locator(FixedLocator([R_MIN, 0.2, 0.5, 1, 2, R_MAX]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    for bound, name, side in ((R_MIN, "r_min", 3), (1.0, "", 0), (R_MAX, "r_max", -3)):
        axes.axhline(bound, color=INK, lw=0.8, ls=(0, (4, 3)))
        axes.annotate(
            name,
            xy=(1, bound),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, side),
            textcoords="offset points",
            ha="right",
            va="bottom" if side > 0 else "top",
            color=INK,
            fontsize=8,
        )


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
            f"{ARMS[arm].label}  {value:.4f}",
            color=ARMS[arm].color,
            transform=axes.transAxes,
            va="center",
            fontweight="bold",
            fontsize=9,
        )


def _save(figure: Figure, path: pathlib.Path) -> None:
    figure.savefig(path)
