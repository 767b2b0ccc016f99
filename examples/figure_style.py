"""The look of the figures of the examples and of the documentation.

The documentation shows a figure 700 pixels wide, which is 7.3 inches of text: drawn 7.5
inches wide, letters of 9.5 points are still larger than 9 there. A phone shows the narrow
version of a figure, 358 pixels wide. The paper is white by name, so that a dark page does
not swallow the ink.
"""

import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

WIDTH, NARROW, DPI = 7.5, 3.9, 200  # Inches, and pixels in each.
SMALL, NORMAL = 9.5, 10.5  # Points.
INK, FAINT, PAPER = "#333333", "#D9D9D9", "#FFFFFF"

# Okabe and Ito's colours, which are told apart without full colour vision. AdamW has gray
# in place of their black, which is for axes.
GRAY, BLUE, VERMILION, SKY = "#666666", "#0072B2", "#D55E00", "#56B4E9"
GREEN, PURPLE, ORANGE, BLACK, YELLOW = (
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#000000",
    "#F0E442",
)
COLORS: Mapping[str, str] = {
    "adamw": GRAY,
    "muon": BLUE,
    "muon_unit_scale": SKY,
    "orscale": VERMILION,
}
OTHER_COLORS = (GREEN, PURPLE, ORANGE, BLACK, YELLOW)

RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": PAPER,
    "axes.labelcolor": INK,
    "axes.labelsize": NORMAL,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": NORMAL,
    "figure.constrained_layout.use": True,
    "figure.dpi": DPI,
    "figure.facecolor": PAPER,
    "figure.labelsize": NORMAL,
    "figure.titlesize": NORMAL,
    "font.size": NORMAL,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "savefig.dpi": DPI,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.color": INK,
    "ytick.labelsize": SMALL,
}


# Decorates functions that draw: texts take their sizes when they are made.
styled = matplotlib.rc_context(RC)


def new_figure(
    height: float, rows: int = 1, columns: int = 1, narrow: bool = False, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure of the page's width, and the panels of its rows.

    Args:
      height: In inches.
      rows: Of panels.
      columns: Of panels.
      narrow: Whether the page is a phone's.
      **options: Of `Figure.subplots`.
    """
    figure = Figure(figsize=(NARROW if narrow else WIDTH, height))
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def set_title(figure: Figure, *lines: str) -> None:
    """Tells above a figure what it shows: the quantity, then model, rate and seeds."""
    if figure.get_figwidth() == NARROW:
        lines = tuple(textwrap.fill(line, 46) for line in lines)
    figure.suptitle("\n".join(lines), x=0.01, ha="left")


def color_of(name: str, known: Mapping[str, Any]) -> str:
    """The colour of an optimizer, the same in all figures.

    Args:
      name: Its name.
      known: All that there are; those without a colour of their own take turns.
    """
    others = [other for other in known if other not in COLORS]
    return COLORS.get(name) or OTHER_COLORS[others.index(name) % len(OTHER_COLORS)]


def narrow_path(path: pathlib.Path) -> pathlib.Path:
    """The narrow version of a figure, where docs/_extensions/narrow.py finds it."""
    return path.with_stem(f"{path.stem}_narrow")


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes the PNG, on white paper."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor=PAPER)
