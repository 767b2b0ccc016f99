"""Quartiles of several variants in several cases as a figure: a band for each case."""

import pathlib
import textwrap
from collections.abc import Mapping

from examples import figure_style as style
from examples.benchmarks.contenders import MARIN
from examples.benchmarks.timing import Quartiles

MARKERS = "so^Dv*"
# In the colours of the figures of losses.
COLORS = {
    "optax.adamw": style.GRAY,
    "optax.contrib.muon": style.SKY,
    "muon": style.BLUE,
    "orscale": style.VERMILION,
    MARIN: style.YELLOW,
}


def four_digits(x: float) -> str:
    """Such as 12.63 and 17,300."""
    return f"{float(f'{x:.4g}'):,g}"


@style.styled
def draw(
    cases: Mapping[str, Mapping[str, Quartiles]],
    path: pathlib.Path,
    label: str,
    *title: str,
    narrow: bool = False,
) -> None:
    """A line for each variant, on a logarithmic axis where all values are positive.

    Args:
      cases: Quartiles by variant, of each case by its name.
      path: Of the PNG.
      label: Of the axis.
      *title: Lines.
      narrow: Whether for a phone; the cases' names then stand in the bands.
    """
    names = list(dict.fromkeys(name for found in cases.values() for name in found))
    others = [name for name in names if name not in COLORS]
    lines = len(names) + 1 + narrow
    figure, panels = style.new_figure(1.8 + 0.22 * lines * len(cases), narrow=narrow)
    axes = panels[0, 0]
    for place, name in enumerate(names):
        shift = (place + 1 + narrow) / lines - 0.5
        points = [(row + shift, found[name]) for row, found in enumerate(cases.values())
                  if name in found]  # fmt: skip
        heights, found = zip(*points, strict=True)
        medians = [x.median for x in found]
        ends = [x.median - x.low for x in found], [x.high - x.median for x in found]
        color = COLORS.get(name) or style.OTHER_COLORS[others.index(name) % 5]
        axes.errorbar(
            medians, heights, xerr=ends, color=color, fmt=MARKERS[place % len(MARKERS)],
            ms=5, capsize=3, label=name,
        )  # fmt: skip
        for height, x in points:
            axes.annotate(
                four_digits(x.median), (x.high, height), (6, 0), va="center",
                textcoords="offset points", fontsize=style.SMALL,
            )  # fmt: skip
    if all(x.low > 0 for found in cases.values() for x in found.values()):
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=1e-6)
    axes.margins(x=0.12)
    axes.grid(axis="x")
    axes.set_xlabel(label)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    for row in range(1, len(cases)):
        axes.axhline(row - 0.5, color=style.FAINT, lw=0.6)
    if narrow:
        axes.set_yticks([])
        for row, case in enumerate(cases):
            axes.annotate(
                case, (0, row - 0.5), (4, -4), axes.get_yaxis_transform(), va="top",
                textcoords="offset points", fontsize=style.SMALL,
            )  # fmt: skip
    else:
        axes.set_yticks(range(len(cases)), [textwrap.fill(case, 22) for case in cases])
    figure.legend(loc="outside lower center", ncols=2 if narrow else 4)
    style.set_title(figure, *title)
    style.save(figure, path)
