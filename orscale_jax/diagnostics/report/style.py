"""The look of the figures: one palette for the page and the PNGs, light and dark.

Figures are drawn once, in the colors below. In the page, where they are SVG, each color
becomes a variable of ``page.css``, which has a light and a dark value, and text is set in
the font of the page.
"""

import io
import re
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

MAX_NAME = 30  # Characters.
WIDTH = 5.0  # In inches: at the width of a phone, 9 points are 9 pixels.
INK, MUTED, GRID, PAPER = "#1F2328", "#666E77", "#E1E4E8", "#FFFFFF"
# Okabe and Ito's colors, which are told apart without full color vision.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW = (
    "#E69F00",
    "#56B4E9",
    "#C9B400",
)  # Yellow is darkened for white paper.
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, YELLOW)
MARKERS = ("o", "s", "^")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.2, 1.5)))

# The variables of page.css.
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    color: f"series-{index}" for index, color in enumerate(COLORS)
}

RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.columnspacing": 1.2,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "orscale",  # The same history makes the same page.
    "text.color": INK,
    "text.parse_math": False,  # A name may hold a dollar.
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}

# Blue below the middle, vermilion above; a gray that shows on light and on dark paper.
AROUND_ONE = LinearSegmentedColormap.from_list(
    "around_one", ["#003F63", BLUE, "#B4BAC2", VERMILION, "#7A3300"]
)


class Look(NamedTuple):
    """How a class is drawn in every figure."""

    color: str
    marker: str
    dashes: Any


def looks(groups: list[str]) -> dict[str, Look]:
    """One look for each class: 7 colors, then again with another marker and dashes."""
    return {
        group: Look(
            COLORS[index % len(COLORS)],
            MARKERS[index // len(COLORS) % len(MARKERS)],
            DASHES[index // len(COLORS) % len(DASHES)],
        )
        for index, group in enumerate(groups)
    }


def new_figure(height: float) -> Figure:
    """An empty figure of the page's width."""
    return Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")


def log_axis(axes: Axes, which: Literal["x", "y"], values: Any) -> None:
    """Make an axis logarithmic, with ticks at plain numbers.

    Args:
      axes: The axes.
      which: The axis.
      values: All that is drawn along it.
    """
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values) & (values > 0)]
    if not values.size:
        axis.set_major_locator(NullLocator())
        return
    margin = max((values.max() / values.min()) ** 0.06, 1.02)
    low, high = float(values.min() / margin), float(values.max() * margin)
    axes.set(**{f"{which}lim": (low, high)})
    axis.set_major_locator(FixedLocator(_plain_ticks(low, high)))


def add_legend(figure: Figure, groups: list[str]) -> None:
    """A legend of the classes below a figure; see ``legend_height``."""
    columns = 3 if max(map(len, groups), default=0) <= 16 else 2
    figure.legend(loc="outside lower center", ncols=columns, handlelength=2.2)


def legend_height(groups: list[str]) -> float:
    """The approximate height that ``add_legend`` takes in a figure, in inches."""
    return 0.08 * len(groups) + 0.1


def short(name: str) -> str:
    """A name that fits into a figure."""
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def marks(line: pd.Series, marker: str = "o") -> dict[str, Any]:
    """Markers on a line, where it has so few points that it might not be seen."""
    few = int(line.notna().sum()) < 20
    return {"marker": marker, "markersize": 3.5} if few else {}


def _plain_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two numbers; where they are few, closer numbers, too."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 3:
            return inside[:: -(-len(inside) // 6)]
    even = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [float(tick) for tick in even if low <= tick <= high]


def svg(figure: Figure, name: str) -> str:
    """A figure for the page: colors as variables, text in the font of the page.

    Args:
      figure: The figure.
      name: A prefix of its ids, which no other figure of the page has.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format="svg", dpi=220, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"(font: [^;\"']*?px) [^;\"]*", r"\1 var(--font)", text)
    for color, variable in VARIABLES.items():
        text = re.sub(f": {color}", f": var(--{variable})", text, flags=re.IGNORECASE)
    return text


def png(figure: Figure) -> bytes:
    """A figure on white paper."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format="png", dpi=180, facecolor=PAPER)
    return buffer.getvalue()
