"""The figures of docs/study/two_rates.md, from the runs that are complete."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from examples import figure_style as style
from examples.figure_style import BLUE, COLORS, GREEN, INK, ORANGE, PURPLE, SKY
from examples.study.arms import KNOWN
from examples.study.questions import FIRST, LONGER, comparison
from examples.study.records import Cell, Records, difference
from examples.study.second import IMAGES, LARGE, REFERENCE, TEXTS
from examples.study.second_tables import Found
from examples.study.statistics import Interval, interval
from examples.study.workloads import LADDER, SMALL_INIT

# Of the workloads, with their colours.
_DENSE = tuple(name for name in (*TEXTS, *LARGE) if "mixture" not in name)
_MIXTURES = (
    "mixture-small", f"mixture-small{SMALL_INIT}",
    *(name for name in LADDER.values() if name not in TEXTS), "like-16b", *LARGE[2:],
)  # fmt: skip
GROUPS: Mapping[str, tuple[str, Sequence[str]]] = {
    "dense": (SKY, _DENSE),
    "mixtures of experts": (ORANGE, _MIXTURES),
    "images": (PURPLE, IMAGES),
    "longer": (GREEN, (*LONGER[1200], *LONGER[4800])),
}
_LADDER = {REFERENCE: "o", "pooled": "D"}
# Of the classes of layers.
_KINDS = {
    "attention": SKY, "mlp": BLUE, "routed expert": ORANGE, "shared expert": GREEN,
    "router": PURPLE,
}  # fmt: skip


class _Row(NamedTuple):
    """A line of a panel."""

    label: str
    color: str
    found: Interval


@style.styled
def draw_differences(found: Found, path: pathlib.Path, narrow: bool = False) -> None:
    """OrScale − Muon+Moonlight by workload and the first endpoint; images below."""
    rows = [
        _Row(_wrapped(name, narrow), color, of)
        for color, names in GROUPS.values()
        for name in names
        if (of := _interval(found.records, name, REFERENCE)) is not None
    ]
    images = [row for row in rows if row.color == GROUPS["images"][0]]
    texts = [row for row in rows if row not in images]
    endpoint = comparison(FIRST, found.records)
    if endpoint is not None:
        texts.append(_Row("mean of the six\ntext workloads", INK, endpoint.average))
    panels = [panel for panel in (texts, images) if panel]
    figure, axes = style.new_figure(
        (0.33 if narrow else 0.27) * len(rows) + 1.5 + 0.7 * len(panels),
        len(panels),
        narrow=narrow,
        height_ratios=[len(panel) + 1 for panel in panels],
    )
    for of_panel, panel in zip(axes.ravel(), panels, strict=True):
        _draw_rows(of_panel, panel)
    axes[-1, 0].set_xlabel("difference (nats; left is better)")
    present = {row.color for row in rows}
    handles = [
        Line2D([], [], color=color, marker="o", ms=5, label=label)
        for label, (color, _) in GROUPS.items()
        if color in present
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if narrow else 4)
    style.set_title(
        figure,
        "OrScale's validation loss minus Muon+Moonlight's",
        "95 % intervals over fresh seeds; hollow: includes 0",
    )
    style.save(figure, path)


def _draw_rows(axes: Axes, rows: Sequence[_Row]) -> None:
    """A bar for each interval."""
    for place, (_, color, of) in enumerate(rows):
        axes.plot([of.low, of.high], [place] * 2, color=color, lw=1.6)
        inside = color if of.sign else "white"
        marker = "D" if color == INK else "o"
        axes.plot(of.mean, place, marker, ms=5.5, color=color, mfc=inside)
    axes.axvline(0, color=INK, lw=1)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.grid(axis="x")


def _wrapped(name: str, narrow: bool) -> str:
    """A workload's name, in two lines on a phone if it is long."""
    return name.replace(SMALL_INIT, f"\n{SMALL_INIT}") if narrow else name


def _interval(records: Records, name: str, theirs: str) -> Interval | None:
    by_seed = difference(records, name, "orscale", theirs)
    return None if by_seed is None else interval(list(by_seed.values()))


@style.styled
def draw_ladder(found: Found, path: pathlib.Path, narrow: bool = False) -> None:
    """OrScale's difference from two others by the number of experts."""
    figure, [[axes]] = style.new_figure(4.2 if narrow else 3.6, narrow=narrow)
    for shift, (theirs, marker) in zip((-0.06, 0.06), _LADDER.items(), strict=True):
        intervals = {
            np.log2(experts) + shift: of
            for experts, name in LADDER.items()
            if (of := _interval(found.records, name, theirs)) is not None
        }
        color = COLORS[theirs]
        means = [of.mean for of in intervals.values()]
        axes.plot(list(intervals), means, color=color, lw=0.8, alpha=0.5)
        for x, of in intervals.items():
            axes.plot([x] * 2, [of.low, of.high], color=color, lw=1.6)
            inside = color if of.sign else "white"
            axes.plot(x, of.mean, marker, ms=6, color=color, mfc=inside)
        label = f"OrScale − {KNOWN[theirs].label}"
        axes.plot([], [], color=color, marker=marker, label=label)
    axes.axhline(0, color=INK, lw=1)
    axes.set_xticks([np.log2(experts) for experts in LADDER], list(map(str, LADDER)))
    axes.set_xlabel("experts")
    axes.set_ylabel("difference (nats)")
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=1 if narrow else 2)
    style.set_title(
        figure,
        "OrScale's validation loss minus two others', by the number of experts",
        "Small initial weights, 300 steps, 12 fresh seeds, 95 % intervals; hollow: "
        "includes 0",
    )
    style.save(figure, path)


@style.styled
def draw_classes(found: Found, path: pathlib.Path, narrow: bool = False) -> None:
    """OrScale's ratio and r* of each class of layers, dense and mixture."""
    kinds = {"dense-small": "dense", "mixture-small": "mixture of 8 experts"}
    rows, columns = (2, 1) if narrow else (1, 2)
    figure, panels = style.new_figure(
        3.3 * rows + 0.9, rows, columns, narrow, sharex=True, sharey=True
    )
    for axes, (kind, title) in zip(panels.ravel(), kinds.items(), strict=True):
        for init, filled in (("", True), (SMALL_INIT, False)):
            by_class = found.optima.get(Cell(f"{kind}{init}", "orscale"), {})
            for name, (ratio, optimum) in by_class.items():
                color, marker = _look_of(name)
                inside = color if filled else "white"
                axes.plot(ratio, optimum, marker, ms=7, color=color, mfc=inside)
        axes.axhline(1, color=INK, lw=0.6, ls=":")
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(base=2, subs=(1, 2**0.5)))
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.2g}"))
    for axes in panels[-1]:
        axes.set_xlabel("OrScale's ratio")
    for axes in panels[:, 0]:
        axes.set_ylabel("r*, with mean 1")
    _explain_classes(figure, found, narrow)
    style.set_title(
        figure,
        "OrScale's ratio and the ratio r* of the paper's model, by class of layers",
        "Along OrScale's runs: geometric means of 2 seeds and 2 steps",
    )
    style.save(figure, path)


def _look_of(name: str) -> tuple[str, str]:
    """The colour of a class of layers, and its marker: a triangle if it goes down."""
    [color] = {color for kind, color in _KINDS.items() if name.startswith(kind)}
    return color, "v" if name.endswith("down") else "o"


def _explain_classes(figure: Figure, found: Found, narrow: bool) -> None:
    names = {name for by_class in found.optima.values() for name in by_class}
    kinds = [kind for kind in _KINDS if any(name.startswith(kind) for name in names)]
    marks = [
        *(Line2D([], [], ls="", marker="o", ms=6, color=_KINDS[kind], label=kind)
          for kind in kinds),
        Line2D([], [], ls="", marker="v", ms=6, color=INK, label="down"),
        Line2D([], [], ls="", marker="o", ms=6, color=INK, mfc="white",
               label="small initial weights"),
    ]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower center", ncols=2 if narrow else 4)


class Draw(Protocol):
    """Draws a figure of the page, or its narrow version, to a path."""

    def __call__(
        self, found: Found, path: pathlib.Path, narrow: bool = False
    ) -> None: ...


FIGURES: dict[str, Draw] = {
    "differences": draw_differences,
    "ladder": draw_ladder,
    "classes": draw_classes,
}
