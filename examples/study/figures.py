"""The figures of the study."""

import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from examples.pretrain.plots import COLORS, INK, OTHER_COLORS
from examples.study.arms import ARMS
from examples.study.plan import find_workload
from examples.study.results import UNIFORM_EVERY
from examples.study.study import COLUMNS, REFERENCE, Column, Study
from examples.study.workloads import SMALL_INIT

_TITLES = {"inherited": "At AdamW's best rate", "own": "At each arm's own best rate"}
_COMPARED = tuple(arm for arm in ARMS if arm != REFERENCE)
# In the figure of learning rates.
_CURVES = ("adamw", REFERENCE, "orscale", "pooled", "full_rank_anchor")


_KINDS = {
    "dense": COLORS["muon_moonlight"],
    "prose": OTHER_COLORS[0],
    "mixture": COLORS["orscale"],
    "vision": OTHER_COLORS[1],
}


def color_of(arm: str) -> str:
    """The same for an arm in all figures."""
    others = [name for name in ARMS if name not in COLORS]
    return COLORS.get(arm) or OTHER_COLORS[others.index(arm) % len(OTHER_COLORS)]


def _look_of(workload: str) -> tuple[str, str]:
    """Its colour, and its marker: a triangle for small initial weights."""
    kind = workload.split("-")[0]
    return _KINDS[kind], "v" if workload.endswith(SMALL_INIT) else "o"


def draw_differences(study: Study, path: pathlib.Path) -> None:
    """Loss minus Muon+Moonlight's: a mark for every workload, a bar for their mean."""
    arms = [a for a in _COMPARED if any(study.has(n, a) for n in study.workloads)]
    figure = Figure(figsize=(9, 0.55 * len(arms) + 1.6), layout="constrained")
    panels = figure.subplots(1, len(COLUMNS), sharey=True, sharex=True)
    for axes, column in zip(panels, COLUMNS, strict=True):
        for place, arm in enumerate(arms):
            _marks(axes, study, arm, column, place)
        axes.axvline(0, color=INK, lw=1)
        axes.set_title(_TITLES[column], loc="left")
        axes.set_xscale("symlog", linthresh=0.05, linscale=2)
        ticks = [-0.3, -0.05, 0, 0.05, 0.3]
        axes.set_xticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
        axes.minorticks_off()
        axes.tick_params(axis="x", labelsize=8)
        _bare(axes)
    panels[0].set_yticks(range(len(arms)), [ARMS[arm].label for arm in arms])
    panels[0].invert_yaxis()
    figure.supxlabel("validation loss − Muon+Moonlight's (nats; left is better)")
    hollow = _mark("o", INK, "interval has 0", mfc="white")
    mean = Line2D([], [], color=INK, lw=2.5, label="mean")
    _explain_marks(figure, study, hollow, mean)
    _save(figure, path)


def _marks(axes: Axes, study: Study, arm: str, column: Column, place: int) -> None:
    names = [n for n in study.workloads if study.has(n, arm)]
    found = [study.difference(name, arm, column) for name in names]
    shifts = np.linspace(-0.3, 0.3, len(names)) if len(names) > 1 else [0.0]
    for name, shift, difference in zip(names, shifts, found, strict=True):
        color, marker = _look_of(name)
        ends = [difference.low, difference.high]
        if all(map(math.isfinite, ends)):
            axes.plot(ends, [place + shift] * 2, color=color, lw=0.8, alpha=0.5)
        inside = color if difference.sign else "white"
        style: dict[str, Any] = {"ms": 4, "color": color, "mfc": inside}
        axes.plot(difference.mean, place + shift, marker, **style)
    if len(found) > 1:
        mean = float(np.mean([difference.mean for difference in found]))
        axes.plot([mean] * 2, [place - 0.4, place + 0.4], color=INK, lw=2.5)


def _explain_marks(figure: Figure, study: Study, *others: Line2D) -> None:
    present = {name.split("-")[0] for name in study.workloads}
    kinds = [_mark("o", color, kind) for kind, color in _KINDS.items() if kind in present]
    marks = [*kinds, _mark("v", INK, "small initial weights"), *others]
    figure.legend(
        handles=marks, loc="outside upper center", ncols=len(marks), frameon=False,
        fontsize=8, handletextpad=0.3, columnspacing=1.2,
    )  # fmt: skip


def _mark(marker: str, color: str, label: str, **style: Any) -> Line2D:
    return Line2D([], [], marker=marker, color=color, label=label, ls="", ms=5, **style)


def draw_rates(study: Study, path: pathlib.Path) -> None:
    """Loss by learning rate at the first seed, for every workload."""

    def draw(axes: Axes, name: str) -> None:
        best = []
        for arm in _CURVES:
            found = study.search(name, arm)
            if found:
                rates = sorted(found)
                losses = [found[rate] for rate in rates]
                best.append(min(losses))
                label = ARMS[arm].label
                axes.plot(rates, losses, "o-", ms=3, color=color_of(arm), label=label)
        axes.set_xscale("log", base=2)
        rates = sorted({r for arm in _CURVES for r in study.search(name, arm)})
        axes.set_xticks(rates[::2], [f"{rate:.3g}" for rate in rates[::2]], fontsize=7)
        top = max(1.15 * min(best), 1.05 * max(best))
        axes.set_ylim(min(best) - 0.1 * (top - min(best)), top)

    figure = _grid(study, draw, "learning rate", "validation loss, seed 0 (nats)")
    _save(figure, path)


def draw_ratios(study: Study, path: pathlib.Path) -> None:
    """OrScale's mean ratio along the runs, at both rates."""

    def draw(axes: Axes, name: str) -> None:
        for column, color in zip(COLUMNS, (COLORS["orscale"], INK), strict=True):
            for run in study.runs(name, "orscale", column).values():
                steps = 1 + UNIFORM_EVERY * np.arange(len(run.uniform))
                axes.plot(steps, run.uniform, lw=0.9, color=color)
            rate = study.rate(name, "orscale", column)
            axes.plot([], [], color=color, label=f"{column} ({rate:.3g})")
        axes.axhline(1, color=INK, lw=0.6, ls=":")
        axes.set_yscale("log", base=2)
        axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axes.legend(frameon=False, fontsize=7)

    figure = _grid(study, draw, "step", "geometric mean of r̂", legend=False)
    _save(figure, path)


def draw_kappa(study: Study, path: pathlib.Path) -> None:
    """The gain of every workload by κ, as the model and the step have it.

    Larger models have larger marks. Nothing is drawn before κ has been measured.
    """
    if not study.gains:
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"kappa_eff": "κ_eff of the paper's model", "kappa": "κ along the step"}
    for axes, (field, title) in zip(panels, titles.items(), strict=True):
        for name in study.workloads:
            kappa = study.gain(name, field)
            if math.isfinite(kappa):
                gain = -study.difference(name, "orscale", "inherited").mean
                color, marker = _look_of(name)
                size = 8 if "large" in name else 5
                axes.plot(kappa, gain, marker, color=color, ms=size)
        axes.axvline(1, color=INK, lw=0.6, ls=":")
        axes.axhline(0, color=INK, lw=0.6, ls=":")
        axes.set_xlabel(title)
        _bare(axes)
    panels[0].set_ylabel("gain over Muon+Moonlight (nats)")
    _explain_marks(figure, study)
    _save(figure, path)


def _grid(
    study: Study,
    draw: Callable[[Axes, str], None],
    x_label: str,
    y_label: str,
    legend: bool = True,
) -> Figure:
    """A panel for every workload."""
    names = study.workloads
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(
        figsize=(max(2.6 * columns, 5), 2.1 * rows + 0.8), layout="constrained"
    )
    panels: Any = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=False):
        draw(axes, find_workload(name).name)
        axes.set_title(name, loc="left", fontsize=9)
        axes.tick_params(labelsize=7)
        _bare(axes)
    for axes in panels[len(names) :]:
        axes.axis("off")
    if legend:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper center", ncols=columns + 1, frameon=False
        )
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    return figure


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


FIGURES: dict[str, Callable[[Study, pathlib.Path], None]] = {
    "differences": draw_differences,
    "rates": draw_rates,
    "ratios": draw_ratios,
    "kappa": draw_kappa,
}
