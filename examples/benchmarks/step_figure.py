"""The times of the benchmark of a step, as a CSV file and as a figure."""

import csv
import os
import pathlib
import platform
import textwrap
from collections.abc import Mapping

import jax
import numpy as np
from matplotlib.axes import Axes

from examples import figure_style as style
from examples.benchmarks.contenders import MARIN, relatives
from examples.benchmarks.timing import Quartiles

COLUMNS = ("case", "contender", "low", "median", "high", "turns")
MARKERS = "so^Dv*"
# In the colours of the figures of losses. Here `muon` is Muon+Moonlight.
COLORS = {
    "optax.adamw": style.GRAY,
    "optax.contrib.muon": style.SKY,
    "muon": style.BLUE,
    "orscale": style.VERMILION,
    MARIN: style.OTHER_COLORS[-1],
}


def where(ns_dtype: str) -> str:
    """What the times were measured with."""
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        kind = f"{cores} cores of {_cpu_name()}"
    return f"{kind}; {ns_dtype} products; JAX {jax.__version__}"


def _cpu_name() -> str:
    """The name that Linux gives it, or that of the architecture."""
    path = pathlib.Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def milliseconds(seconds: float) -> str:
    """Four digits, such as 12.63 and 17,300."""
    return f"{float(f'{1000 * seconds:.4g}'):,g}"


def write_times(
    cases: Mapping[str, Mapping[str, Quartiles]], ns_dtype: str, path: pathlib.Path
) -> None:
    """One row for each contender of each case."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, "where"])
        for case, times in cases.items():
            for name, found in times.items():
                seconds = [f"{x:.4g}" for x in (found.low, found.median, found.high)]
                writer.writerow([case, name, *seconds, found.number, where(ns_dtype)])


def read_times(path: pathlib.Path) -> tuple[dict[str, dict[str, Quartiles]], str]:
    """Times by case and contender, and what they were measured with."""
    found: dict[str, dict[str, Quartiles]] = {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        low, median, high = (float(row[name]) for name in ("low", "median", "high"))
        times = Quartiles(low, median, high, int(row["turns"]))
        found.setdefault(row["case"], {})[row["contender"]] = times
    return found, rows[0]["where"]


def color_of(name: str) -> str:
    """That of a contender; relatives of OrScale take turns."""
    others = [*relatives(None, None)]
    return COLORS.get(name) or style.OTHER_COLORS[others.index(name) % 5]


@style.styled
def draw(
    cases: Mapping[str, Mapping[str, Quartiles]],
    measured: str,
    path: pathlib.Path,
    narrow: bool = False,
) -> None:
    """Milliseconds of every contender, on a logarithmic axis: a band for each case.

    Args:
      cases: Times by contender, of each case by its name in words.
      measured: What with.
      path: Of the PNG.
      narrow: Whether for a phone; the cases' names then stand in the bands.
    """
    names = list(next(iter(cases.values())))
    lines = len(names) + 1 + narrow
    figure, panels = style.new_figure(1.8 + 0.22 * lines * len(cases), narrow=narrow)
    axes = panels[0, 0]
    for place, name in enumerate(names):
        rows = np.arange(len(cases)) + (place + 1 + narrow) / lines - 0.5
        _draw_contender(axes, name, MARKERS[place % len(MARKERS)], rows, cases)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.grid(axis="x")
    _name_cases(axes, list(cases), narrow)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    for row in range(1, len(cases)):
        axes.axhline(row - 0.5, color=style.FAINT, lw=0.6)
    axes.set_xlabel("time of a step (ms, log scale; left is better)")
    figure.legend(loc="outside lower center", ncols=2 if narrow else 4)
    turns = [found.number for times in cases.values() for found in times.values()]
    told = "to".join(f" {n} " for n in sorted({min(turns), max(turns)}))
    title = f"A step of the optimizer alone: median and quartiles of{told}turns"
    style.set_title(figure, title, measured)
    style.save(figure, path)


def _name_cases(axes: Axes, cases: list[str], narrow: bool) -> None:
    """Left of the bands, or in their upper left corners."""
    if not narrow:
        axes.set_yticks(range(len(cases)), [textwrap.fill(case, 22) for case in cases])
        return
    axes.set_yticks([])
    for row, case in enumerate(cases):
        axes.annotate(
            case, (0, row - 0.5), (4, -4), axes.get_yaxis_transform(),
            textcoords="offset points", va="top", fontsize=style.SMALL,
        )  # fmt: skip


def _draw_contender(
    axes: Axes,
    name: str,
    marker: str,
    rows: np.ndarray,
    cases: Mapping[str, Mapping[str, Quartiles]],
) -> None:
    found = [times[name] for times in cases.values()]
    low, median, high = 1000 * np.array([(x.low, x.median, x.high) for x in found]).T
    axes.errorbar(
        median, rows, xerr=[median - low, high - median], color=color_of(name),
        fmt=marker, ms=5, capsize=3, label=name,
    )  # fmt: skip
    for row, end, middle in zip(rows, high, median, strict=True):
        axes.annotate(
            milliseconds(middle / 1000), (end, row), (6, 0), textcoords="offset points",
            va="center", fontsize=style.SMALL,
        )  # fmt: skip
