"""The figures."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

from examples import figure_style as style
from examples.figure_style import BLUE, GREEN, INK
from examples.pretrain.optimizers import OPTIMIZERS

SMOOTHING = 0.9  # Of the training loss: the weight of the past at each step.
RATIO_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
MOST_LINES = 8  # More matrices than these are drawn as a band.
MARKERS = {"adamw": "s", "muon_moonlight": "o", "orscale": "^"}

Curve = tuple[np.ndarray, np.ndarray]  # Steps and values.


@style.styled
def draw_losses(
    path: pathlib.Path,
    train: Mapping[str, Curve],
    val: Mapping[str, Curve],
    unit: str,
    run: str,
) -> None:
    """Loss curves by optimizer: the whole run, and its second half closer up.

    Of all figures, `run` is the line with model, rate and seed that goes into the title.
    """
    figure, (whole, late) = _two_panels(f"cross-entropy (nats per {unit})")
    for name, curve in val.items():
        steps, losses = train[name]
        # An exponential moving average, corrected for its start.
        shares = (1 - SMOOTHING) * SMOOTHING ** np.arange(len(losses))
        means = np.convolve(losses, shares)[: len(losses)] / np.cumsum(shares)
        whole.plot(steps, means, color=color_of(name), lw=1, alpha=0.45)
        for axes in (whole, late):
            axes.plot(*curve, **_look(name))
    whole.plot([], [], color=INK, lw=1.8, label="validation")
    whole.plot([], [], color=INK, lw=1, alpha=0.45, label="training, smoothed")
    whole.legend()
    whole.set_title("Whole run")
    late.set_title("Second half, validation")
    last = max(steps[-1] for steps, _ in val.values())
    shown = np.concatenate([values[steps >= last / 2] for steps, values in val.values()])
    shown = shown[np.isfinite(shown)]
    late.set_xlim(0.49 * last, 1.01 * last)  # Room for the first and last markers.
    if shown.size:
        margin = 0.05 * np.ptp(shown) + 1e-6
        late.set_ylim(shown.min() - margin, shown.max() + margin)
    _add_names(figure, {name: f"{values[-1]:.4f}" for name, (_, values) in val.items()})
    style.set_title(
        figure, "Training and validation loss; below, validation loss at the end", run
    )
    style.save(figure, path)


@style.styled
def draw_seeds(
    path: pathlib.Path,
    val: Mapping[str, Sequence[Curve]],
    unit: str,
    baseline: str,
    run: str,
) -> None:
    """Validation loss of several runs of each optimizer, and the difference from one's.

    The difference is taken seed by seed: thin lines; the thick one is their mean. The
    runs are in the same order for each, and their curves have the same steps.
    """
    subtracted = baseline if baseline in val else next(iter(val))
    figure, (losses, apart) = _two_panels(f"validation loss (nats per {unit})")
    texts = {subtracted: ""}
    for name, curves in val.items():
        values = np.array([y for _, y in curves])
        difference = values - np.array([y for _, y in val[subtracted]])
        panels = [(losses, values)]
        if name != subtracted:
            panels.append((apart, difference))
            texts[name] = f"{difference[:, -1].mean():+.4f}".replace("-", "−")
        for axes, lines in panels:
            for line in lines:
                axes.plot(curves[0][0], line, color=color_of(name), lw=0.8, alpha=0.6)
            axes.plot(curves[0][0], lines.mean(0), **_look(name))
    label = OPTIMIZERS[subtracted].label
    apart.axhline(0, color=color_of(subtracted), lw=1.8)
    losses.set_title("Mean of the seeds (thick) and each seed")
    apart.set_title(f"Minus {label}'s, seed by seed")
    apart.set_ylabel(f"difference (nats per {unit})")
    _add_names(figure, {name: texts[name] for name in val})
    title = "Validation loss; below, the mean difference at the end"
    style.set_title(figure, title, run)
    style.save(figure, path)


@style.styled
def draw_trust_ratios(
    path: pathlib.Path, rows: Sequence[Mapping[str, str]], run: str
) -> None:
    """Trust ratios as applied: a panel for each class of layers, a line for each matrix.

    Where a class has many, its panel has their median and the band of the middle 90 %.
    The rows are those of history.csv.
    """
    classes: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        lines = classes.setdefault(row["class"], {})
        lines.setdefault(row["matrix"], []).append(float(row["trust_ratio"]))
    steps = sorted({int(row["step"]) for row in rows})
    columns = min(len(classes), 3)
    height = -(-len(classes) // columns)
    figure, grid = style.new_figure(
        1.2 + 1.7 * height, height, columns, sharex=True, sharey=True
    )
    panels = grid.ravel()
    for axes, (name, lines) in zip(panels, classes.items(), strict=False):
        values = np.array(list(lines.values()))
        axes.set_title(name)
        axes.grid(axis="y")
        axes.axhline(1, color=INK, lw=0.8, ls=(0, (4, 3)))
        if len(values) <= MOST_LINES:
            shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(values)))
            for shade, line in zip(shades, values, strict=True):
                axes.plot(steps, line, color=shade, lw=1.6)
        else:
            low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
            axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, lw=0)
            axes.plot(steps, middle, color=BLUE, lw=1.8)
            axes.set_title(f"{name}\nmedian, 90 % of {len(values)}")
    # A logarithmic axis with some room around what is drawn, and around 1.
    first = panels[0]
    first.set_yscale("log")
    lowest, highest = first.get_ylim()
    first.set_ylim(min(lowest, 0.7), max(highest, 1.5))
    first.yaxis.set_major_locator(FixedLocator(RATIO_TICKS))
    first.yaxis.set_minor_locator(NullLocator())
    first.yaxis.set_major_formatter(ScalarFormatter())
    for axes in panels[len(classes) :]:
        axes.set_visible(False)
    for axes in panels[: len(classes)][-columns:]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("step; a line is a layer, from dark (first) to light")
    figure.supylabel("trust ratio r̂ (log scale)")
    style.set_title(figure, "Trust ratio of each matrix, by class", run)
    style.save(figure, path)


@style.styled
def draw_loads(path: pathlib.Path, rows: Sequence[Mapping[str, str]], run: str) -> None:
    """Loads of the experts, of expert_loads.csv, relative to even ones, by layer."""
    steps = sorted({int(row["step"]) for row in rows})
    layers = 1 + max(int(row["layer"]) for row in rows)
    experts = 1 + max(int(row["expert"]) for row in rows)
    shares = np.array([float(row["share"]) for row in rows])
    loads = shares.reshape(len(steps), layers, experts) * experts
    columns = min(layers, 3)
    height = -(-layers // columns)
    figure, grid = style.new_figure(0.9 + 2.3 * height, height, columns, sharey=True)
    for layer, axes in enumerate(grid.ravel()[:layers]):
        axes.grid(axis="y")
        axes.axhline(1, color=INK, lw=0.8, ls=(0, (4, 3)))
        axes.plot(steps, loads[:, layer], color=GREEN, lw=0.8, alpha=0.6)
        axes.set_title(f"mixture layer {layer}")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for axes in grid.ravel()[layers:]:
        axes.set_visible(False)
    figure.supylabel("load of an expert (1 is even)")
    style.set_title(figure, "Load of each expert, one line for each", run)
    style.save(figure, path)


def color_of(name: str) -> str:
    """The colour of an optimizer, the same in all figures."""
    return style.color_of(name, OPTIMIZERS)


def _look(name: str) -> dict[str, Any]:
    return {
        "color": color_of(name), "lw": 1.8, "marker": MARKERS.get(name, "D"), "ms": 4
    }  # fmt: skip


def _two_panels(ylabel: str) -> tuple[Figure, Sequence[Axes]]:
    figure, grid = style.new_figure(3.7, 1, 2)
    panels = grid[0]
    panels[0].set_ylabel(ylabel)
    for axes in panels:
        axes.grid(axis="y")
        axes.set_xlabel("step")
    return figure, panels


def _add_names(figure: Figure, values: Mapping[str, str]) -> None:
    """A legend of the optimizers below the panels, each with a number.

    Not at the ends of the lines, where names of equal ones would stand apart.
    """
    handles = [
        Line2D([], [], label=f"{OPTIMIZERS[name].label}  {value}".rstrip(), **_look(name))
        for name, value in values.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
