"""The quartiles of a quantity, by case and variant."""

import pathlib
import textwrap
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

from examples import figure_style as style
from examples.benchmarks.gpu_session.table import Row

COLORS = {
    "the gradient alone": style.BLACK,
    "optax.adamw": style.GRAY,
    "optax.contrib.muon": style.SKY,
    "muon": style.BLUE,
    "orscale": style.VERMILION,
    "normuon": style.GREEN,
}
_OTHERS = (style.BLUE, style.VERMILION, style.SKY, style.ORANGE, style.GREEN, style.GRAY)


def path_of(table: pathlib.Path) -> pathlib.Path:
    """The figure beside a table."""
    return table.with_suffix(".png")


def measured_with(rows: Sequence[Row]) -> str:
    """The card, driver, JAX and clocks of rows; where they differ, all are listed."""
    card, drivers, versions = (
        ", ".join(sorted({getattr(row, name) for row in rows}))
        for name in ("card", "driver", "jax")
    )
    clocks = {int(row.clock_mhz) for row in rows if row.clock_mhz}
    driver = f"driver {drivers}" if drivers else ""
    clock = " to ".join(map(str, sorted({min(clocks), max(clocks)}))) if clocks else ""
    parts = (card, driver, f"JAX {versions}", clock and f"{clock} MHz")
    return "; ".join(filter(None, parts))


def color_of(variant: str, variants: Sequence[str]) -> str:
    return COLORS.get(variant) or _OTHERS[variants.index(variant) % len(_OTHERS)]


def of_quantity(
    quantity: str, title: str
) -> Callable[[Sequence[Row], pathlib.Path], None]:
    """What draws a quantity: a band for each case, in it a line for each variant."""

    @style.styled
    def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
        drawn = [row for row in rows if row.quantity == quantity]
        cases = list(dict.fromkeys(row.case for row in drawn))
        variants = list(dict.fromkeys(row.variant for row in drawn))
        lines = len(variants) + 1
        figure, panels = style.new_figure(1.9 + 0.13 * lines * len(cases))
        axes = panels[0, 0]
        for place, variant in enumerate(variants):
            _draw_variant(axes, variant, (place + 1) / lines - 0.5, drawn)
        axes.set_yticks(range(len(cases)), [textwrap.fill(case, 24) for case in cases])
        axes.set_ylim(len(cases) - 0.5, -0.5)
        for band in range(1, len(cases)):
            axes.axhline(band - 0.5, color=style.FAINT, lw=0.6)
        _set_scale(axes, drawn)
        figure.legend(loc="outside lower center", ncols=3)
        style.set_title(figure, title, measured_with(drawn))
        style.save(figure, path)

    return draw


def _draw_variant(axes: Axes, variant: str, shift: float, rows: Sequence[Row]) -> None:
    cases = list(dict.fromkeys(row.case for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    found = [row for row in rows if row.variant == variant]
    median = [row.median for row in found]
    below = [row.median - row.low for row in found]
    above = [row.high - row.median for row in found]
    axes.errorbar(
        median, [cases.index(row.case) + shift for row in found], xerr=[below, above],
        color=color_of(variant, variants), fmt="o", ms=4, capsize=2, label=variant,
    )  # fmt: skip


def _set_scale(axes: Axes, rows: Sequence[Row]) -> None:
    unit = f" ({rows[0].unit})" if rows[0].unit else ""
    if all(row.median > 0 for row in rows):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    else:
        axes.set_xscale("symlog", linthresh=1e-6)
    axes.set_xlabel(rows[0].quantity + unit)
    axes.margins(x=0.1)
    axes.grid(axis="x")
