"""The figures of the study."""

import math
import pathlib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from examples import figure_style as style
from examples.figure_style import COLORS, GREEN, INK, ORANGE, PURPLE, SKY
from examples.study.arms import ARMS
from examples.study.plan import find_workload
from examples.study.results import UNIFORM_EVERY
from examples.study.study import COLUMNS, REFERENCE, Column, Study, reference_of
from examples.study.workloads import SMALL_INIT

_TITLES = {
    "inherited": "At AdamW's best rate",
    "own": "At each optimizer's own best rate",
}
_COMPARED = tuple(arm for arm in ARMS if arm != REFERENCE)
_SUMMARY = ("adamw", REFERENCE, "orscale", "normuon")
# In the figure of learning rates.
_CURVES = {
    "adamw": "s", REFERENCE: "o", "orscale": "^", "pooled": "D", "full_rank_anchor": "v",
}  # fmt: skip
# In the figure of seconds.
_TIMED = {"adamw": "s", "muon": "D", REFERENCE: "o", "orscale": "^"}

# None of the colours of the optimizers that have one of their own in the same figure.
_KINDS = {"dense": SKY, "prose": GREEN, "mixture": ORANGE, "vision": PURPLE}


def color_of(arm: str) -> str:
    """The same for an arm in all figures."""
    return style.color_of(arm, ARMS)


def _look_of(workload: str) -> tuple[str, str]:
    """Its colour, and its marker: a triangle for small initial weights."""
    kind = workload.split("-")[0]
    return _KINDS[kind], "v" if workload.endswith(SMALL_INIT) else "o"


@style.styled
def draw_differences(study: Study, path: pathlib.Path, narrow: bool = False) -> None:
    """Loss minus Muon+Moonlight's: a mark for every workload, a bar for their mean."""
    arms = [a for a in _COMPARED if any(study.has(n, a) for n in study.workloads)]

    def set_axis(axes: Axes) -> None:
        axes.set_xscale("symlog", linthresh=0.05, linscale=1)
        ticks = [-0.3, 0, 0.3] if narrow else [-0.3, -0.05, 0, 0.05, 0.3]
        axes.set_xticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
        axes.minorticks_off()

    figure = _difference_panels(study, arms, set_axis, narrow)
    style.set_title(
        figure,
        "Validation loss minus Muon+Moonlight's, with 95 % intervals",
        f"{_extent(study)}; axis linear within ±0.05; * Muon+Moonlight, too, "
        "has AdamW's rate apart",
    )
    style.save(figure, path)


@style.styled
def draw_summary(study: Study, path: pathlib.Path) -> None:
    """The differences of a few arms, on a linear axis, for the README."""
    arms = [a for a in _SUMMARY if any(study.has(n, a) for n in study.workloads)]

    def set_axis(axes: Axes) -> None:
        axes.set_xlim(-0.35, 0.75)
        axes.grid(axis="x")

    figure = _difference_panels(study, arms, set_axis)
    style.set_title(
        figure,
        "Validation loss minus Muon+Moonlight's, with 95 % intervals",
        f"{_extent(study)}; the axis ends at +0.75",
    )
    style.save(figure, path)


def _difference_panels(
    study: Study,
    arms: Sequence[str],
    set_axis: Callable[[Axes], None],
    narrow: bool = False,
) -> Figure:
    """A panel for each rate, beside each other or one below the other, and a legend."""
    rows, columns = (len(COLUMNS), 1) if narrow else (1, len(COLUMNS))
    height = rows * (0.55 * len(arms) + 1.9)
    figure, panels = style.new_figure(
        height, rows, columns, narrow, sharey=True, sharex=True
    )
    for axes, column in zip(panels.ravel(), COLUMNS, strict=True):
        for place, arm in enumerate(arms):
            if arm == REFERENCE:
                _mean(axes, 0.0, place)
            else:
                _marks(axes, study, arm, column, place)
        axes.axvline(0, color=INK, lw=1)
        axes.set_title(textwrap.fill(_TITLES[column], 24) if narrow else _TITLES[column])
        set_axis(axes)
    panels[0, 0].set_yticks(range(len(arms)), [_wrapped(arm) for arm in arms])
    panels[0, 0].set_ylim(len(arms) - 0.4, -0.6)
    for axes in panels[-1]:
        axes.set_xlabel("difference (nats; left is better)")
    hollow = _mark("o", INK, "interval includes 0", mfc="white")
    mean = _mark("|", INK, "mean of the workloads", markersize=12, mew=2.5)
    _explain_marks(figure, study, hollow, mean, columns=2 if narrow else 4)
    return figure


def _wrapped(arm: str) -> str:
    """A label in lines that leave the panels room, with a star if rates are apart."""
    star = "" if reference_of(arm) == REFERENCE else "*"
    return ARMS[arm].label.replace(", ", ",\n") + star


def _extent(study: Study) -> str:
    """How many workloads and seeds there are."""
    return f"{len(study.workloads)} workloads, {_seeds(study)} each"


def _seeds(study: Study) -> str:
    """How many seeds the arms of the workloads have."""
    counts = {
        len(study.losses(name, arm, column))
        for name in study.workloads
        for arm in ARMS
        for column in COLUMNS
        if study.has(name, arm)
    }
    return f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} seeds"


def _marks(axes: Axes, study: Study, arm: str, column: Column, place: int) -> None:
    names = [n for n in study.workloads if study.has(n, arm)]
    found = [study.difference(n, arm, column, reference_of(arm)) for n in names]
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
        _mean(axes, float(np.mean([difference.mean for difference in found])), place)


def _mean(axes: Axes, mean: float, place: int) -> None:
    axes.plot([mean] * 2, [place - 0.4, place + 0.4], color=INK, lw=2.5)


def _explain_marks(
    figure: Figure, study: Study, *others: Line2D, columns: int = 4
) -> None:
    present = {name.split("-")[0] for name in study.workloads}
    kinds = [_mark("o", color, kind) for kind, color in _KINDS.items() if kind in present]
    marks = [*kinds, _mark("v", INK, "small initial weights"), *others]
    figure.legend(
        handles=marks, loc="outside lower center", ncols=columns, handletextpad=0.3,
        columnspacing=1.2,
    )  # fmt: skip


def _mark(marker: str, color: str, label: str, **style: Any) -> Line2D:
    look = {"markersize": 5, "linestyle": "", **style}
    return Line2D([], [], marker=marker, color=color, label=label, **look)


@style.styled
def draw_rates(study: Study, path: pathlib.Path, narrow: bool = False) -> None:
    """Loss by learning rate at the first seed, for every workload."""

    def draw(axes: Axes, name: str) -> str:
        best = []
        for arm, marker in _CURVES.items():
            found = study.search(name, arm)
            if found:
                rates = sorted(found)
                losses = [found[rate] for rate in rates]
                best.append(min(losses))
                label = ARMS[arm].label
                color = color_of(arm)
                axes.plot(rates, losses, marker=marker, ms=4, color=color, label=label)
        axes.set_xscale("log", base=2)
        rates = sorted({r for arm in _CURVES for r in study.search(name, arm)})
        shown = rates[:: 3 if narrow else 2]
        axes.set_xticks(shown, [f"{rate:.3g}" for rate in shown])
        top = max(1.15 * min(best), 1.05 * max(best))
        axes.set_ylim(min(best) - 0.1 * (top - min(best)), top)
        return ""

    figure = _grid(
        study.workloads, draw, "learning rate", "validation loss (nats)", narrow
    )
    style.set_title(
        figure,
        "Loss by learning rate, seed 0 of each workload",
        "Losses far above the best ones lie outside of the panels",
    )
    style.save(figure, path)


@style.styled
def draw_seconds(study: Study, path: pathlib.Path, narrow: bool = False) -> None:
    """Loss by seconds of training, at each arm's own best rate, for timed workloads.

    Nothing is drawn before the steps have been timed.
    """
    names = [name for name in study.workloads if name in study.seconds]
    if not names:
        return

    def draw(axes: Axes, name: str) -> str:
        recipe = find_workload(name).config.recipe
        for arm, marker in _TIMED.items():
            if study.has(name, arm) and arm in study.seconds[name]:
                runs = study.runs(name, arm, "own").values()
                losses = np.mean([run.losses for run in runs], axis=0)
                ends = recipe.validation_every * (1 + np.arange(len(losses)))
                steps = np.minimum(ends, recipe.num_steps)
                axes.plot(
                    study.seconds[name][arm] * steps, losses, marker=marker, ms=4,
                    color=color_of(arm), label=ARMS[arm].label,
                )  # fmt: skip
        axes.set_xlim(left=0)
        return ""

    figure = _grid(names, draw, "seconds of training", "validation loss (nats)", narrow)
    style.set_title(
        figure,
        f"Loss by time, each optimizer at its own best rate, mean of {_seeds(study)}",
        "Seconds: steps times the median time of a step, on one core",
    )
    style.save(figure, path)


@style.styled
def draw_ratios(study: Study, path: pathlib.Path, narrow: bool = False) -> None:
    """OrScale's mean ratio along the runs, at both rates."""
    labels = {"inherited": "At AdamW's best rate", "own": "At its own best rate"}
    looks = dict(zip(COLUMNS, ((COLORS["orscale"], "-"), (INK, "--")), strict=True))

    def draw(axes: Axes, name: str) -> str:
        for column, (color, dashes) in looks.items():
            for run in study.runs(name, "orscale", column).values():
                steps = 1 + UNIFORM_EVERY * np.arange(len(run.uniform))
                axes.plot(steps, run.uniform, lw=0.9, color=color, ls=dashes)
            axes.plot([], [], color=color, ls=dashes, label=labels[column])
        axes.axhline(1, color=INK, lw=0.6, ls=":")
        axes.set_yscale("log", base=2)
        axes.set_ylim(0.75, 5.6)
        axes.set_yticks([1, 2, 4], ["1", "2", "4"])
        axes.minorticks_off()
        rates = [f"{study.rate(name, 'orscale', column):.3g}" for column in COLUMNS]
        return f"rates {' and '.join(rates)}"

    figure = _grid(study.workloads, draw, "step", "geometric mean of r̂", narrow)
    style.set_title(
        figure,
        "OrScale's trust ratio, geometric mean over the matrices",
        f"{_seeds(study)}, a line each; rates: AdamW's best and OrScale's own best",
    )
    style.save(figure, path)


@style.styled
def draw_kappa(study: Study, path: pathlib.Path, narrow: bool = False) -> None:
    """The gain of every workload by κ, as the model and the step have it.

    Larger models have larger marks. Nothing is drawn before κ has been measured.
    """
    if not study.gains:
        return
    rows, columns = (2, 1) if narrow else (1, 2)
    figure, panels = style.new_figure(4.2 * rows, rows, columns, narrow, sharey=True)
    titles = {"kappa_eff": "κ_eff of the paper's model", "kappa": "κ along the step"}
    for axes, (field, title) in zip(panels.ravel(), titles.items(), strict=True):
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
    for axes in panels[:, 0]:
        axes.set_ylabel("gain over Muon+Moonlight (nats)")
    _explain_marks(figure, study, columns=3 if narrow else 5)
    style.set_title(
        figure,
        "OrScale's gain over Muon+Moonlight at AdamW's best rate, by κ",
        f"{_extent(study)}; large marks are the large models",
    )
    style.save(figure, path)


def _grid(
    names: Sequence[str],
    draw: Callable[[Axes, str], str],
    x_label: str,
    y_label: str,
    narrow: bool,
) -> Figure:
    """A panel for every workload, and a legend of what the first has labels for.

    Args:
      names: Of the workloads.
      draw: Draws one; what it gives is the second line of the title.
      x_label: Of the lowest panels.
      y_label: Of all.
      narrow: Whether for a phone: fewer panels in a row, and fewer ticks.
    """
    columns = min(2 if narrow else 3, len(names))
    rows = -(-len(names) // columns)
    figure, grid = style.new_figure(1.9 * rows + 1.2, rows, columns, narrow)
    panels = grid.ravel()
    for axes, name in zip(panels, names, strict=False):
        line = draw(axes, find_workload(name).name)
        title = name.replace(SMALL_INIT, f"\n{SMALL_INIT}") if narrow else name
        axes.set_title(f"{title}\n{line}".rstrip())
    for axes in panels[: len(names)][-columns:]:
        axes.set_xlabel(x_label)
    handles = panels[0].get_legend_handles_labels()
    free = panels[len(names) :]
    for axes in free:
        axes.axis("off")
    if len(free):
        free[0].legend(*handles, loc="center")
    else:
        figure.legend(*handles, loc="outside lower center", ncols=columns)
    figure.supylabel(y_label)
    return figure


class Draw(Protocol):
    """Draws a figure of the study, or its narrow version, to a path."""

    def __call__(
        self, study: Study, path: pathlib.Path, narrow: bool = False
    ) -> None: ...


FIGURES: dict[str, Draw] = {
    "differences": draw_differences,
    "rates": draw_rates,
    "ratios": draw_ratios,
    "kappa": draw_kappa,
    "seconds": draw_seconds,
}
