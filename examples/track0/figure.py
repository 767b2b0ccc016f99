"""The picture of the table: each entry's mean difference from `muon`, and its interval.

    python -m examples.track0.figure

draws the rows of the repository into docs.
"""

import math
import pathlib
from collections.abc import Mapping

from examples import figure_style as style
from examples.track0.table import SMALLEST, Compared, compare, stored_entries

FIGURE = pathlib.Path("docs/track0.png")
WIDEST = 0.045  # Nats: larger differences are written at the edge.
COLORS = {"better": style.BLUE, "worse": style.VERMILION, "level": style.GRAY}


@style.styled
def draw(rows: Mapping[str, Compared], path: pathlib.Path, narrow: bool = False) -> None:
    """Draws a line for each entry, the lowest mean at the top."""
    height = 1.7 + 0.32 * len(rows)
    figure, [[axes]] = style.new_figure(height, narrow=narrow)
    style.set_title(
        figure,
        "Loss of each entry minus the loss of muon, nats per byte",
        "Means over four texts and 24 seeds, 95 % intervals; gray: called level",
    )
    axes.axvspan(-SMALLEST, SMALLEST, color=style.FAINT, lw=0)
    axes.axvline(0, color=style.INK, lw=1)
    for place, (mean, _, verdict) in enumerate(rows.values()):
        color, (low, high) = COLORS[verdict], mean.interval()
        label, at = f" {verdict}", max(high, SMALLEST)
        if abs(mean.mean) < WIDEST:
            axes.plot([low, high], [place, place], color=color, lw=2)
            axes.plot(mean.mean, place, "o", color=color, ms=6)
        else:
            label, at = f" {mean.mean:+.3f}, {verdict}", SMALLEST
            edge = math.copysign(WIDEST, mean.mean)
            arrow = {"arrowstyle": "->", "color": color, "lw": 2}
            axes.annotate("", (edge, place), (0.95 * edge, place), arrowprops=arrow)
        axes.text(at, place, label, color=color, va="center", size=style.SMALL)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlim=(-WIDEST, WIDEST), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel("lower is better")
    axes.grid(axis="x")
    style.save(figure, style.narrow_path(path) if narrow else path)


if __name__ == "__main__":
    compared = compare(stored_entries())
    for is_narrow in (False, True):
        draw(compared, FIGURE, is_narrow)
