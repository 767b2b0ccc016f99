"""The report of a run that wrote a history: one HTML page and its figures."""

import argparse
import base64
import html
import io
import pathlib
import string
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator

from examples import figure_style as style
from orscale_jax.diagnostics.history import FILE_NAME
from orscale_jax.diagnostics.problems import Problem, find_problems

# What can be told apart in a figure, and read in a table.
MAX_STEPS, MAX_CLASSES, MAX_ROWS = 240, 14, 300
OTHERS = "all other classes"
# Below this standard deviation of log r̂, the ratios are one learning rate.
UNIFORM_SPREAD = 0.02
# Columns of the table of matrices, and their headings.
NUMBERS = {
    "trust_ratio": "r̂", "raw_trust_ratio": "r", "calibration": "c",
    "growth": "‖W‖/‖W₀‖", "weight_norm": "‖W‖", "direction_norm": "‖D‖",
    "relative_step": "η r̂ ‖D‖/‖W‖", "at_r_min": "at r_min", "at_r_max": "at r_max",
    "started": "started", "anchored": "anchored",
}  # fmt: skip
COLORS = (
    style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, style.SKY,
    "#C9B400",  # A yellow that is visible on paper.
)  # fmt: skip

PAGE = string.Template("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$name: optimizer report</title>
<style>
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }
main { max-width: 66rem; margin: auto; padding: 1rem }
p, h1 { overflow-wrap: anywhere }
img { width: 100%; background: #fff }
div { overflow: auto; max-height: 36rem }
section { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)) }
section, figure { gap: 2rem; margin: 0 }
td, th { padding: 0.2rem 0.6rem; text-align: right; font-size: 0.8rem }
</style>
<main>
<h1>$name</h1>
<p>$facts</p>
<h2>Verdict, at step $step</h2>
$verdict
<h2>Warnings</h2>
$problems
<h2>Figures</h2>
<section>$figures</section>
<h2>Matrices</h2>
$matrices
<h2>Audit</h2>
$audit
</main>
</html>
""")


class RunError(ValueError):
    """A run folder from which no report can be made."""


def read_run(folder: pathlib.Path) -> pd.DataFrame:
    """The history of a run, without a last step that was not written to its end."""
    path = folder / FILE_NAME
    if not path.is_file():
        lacks = f"has no {FILE_NAME}" if folder.is_dir() else "is not a folder"
        raise RunError(
            f"{folder} {lacks}: pass the folder of a run that writes its "
            "orscale_jax.diagnostics.History there."
        )
    whole = path.read_bytes().rpartition(b"\n")[0]  # It may end in the middle of a row.
    try:
        rows = read_rows(io.BytesIO(whole))
    except ValueError as error:  # As those of pandas are, and those of encodings.
        raise RunError(f"{path} is not the history of a run: {error}") from error
    if missing := [name for name in ("step", "matrix", "class") if name not in rows]:
        raise RunError(
            f"{path} has no column {' or '.join(missing)}: pass a folder that "
            "orscale_jax.diagnostics.History wrote."
        )
    if rows["step"].isna().any():
        raise RunError(f"{path} has rows without a step: the file is damaged.")
    sizes = rows.groupby("step", sort=False).size()
    if len(sizes) > 1 and sizes.iloc[-1] < sizes.iloc[0]:
        rows, sizes = rows[rows["step"] != sizes.index[-1]], sizes[:-1]
    if rows.empty:
        raise RunError(f"{path} holds no complete step: let the run record one.")
    if len(odd := sizes[sizes != sizes.iloc[0]]):
        raise RunError(
            f"The history is damaged: step {odd.index[0]} has {odd.iloc[0]} rows, and "
            f"step {sizes.index[0]} has {sizes.iloc[0]}, one for each matrix."
        )
    kept = rows["class"].value_counts().index[: MAX_CLASSES - 1]
    if rows["class"].nunique() > MAX_CLASSES:
        rows["class"] = rows["class"].where(rows["class"].isin(kept), OTHERS)
    return rows


def read_rows(file: Any) -> pd.DataFrame:
    """The rows of a history, in which "NA" and an empty text are names of matrices."""
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    numbers = rows.columns.difference(["matrix", "class"])
    rows[numbers] = rows[numbers].apply(pd.to_numeric, errors="coerce")
    return rows


def thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of some of many steps, at equal distances, with both ends."""
    steps = rows["step"].unique()
    places = np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS))
    return rows[rows["step"].isin(steps[places.round().astype(int)])]


def uniform_part(rows: pd.DataFrame) -> pd.DataFrame:
    """At each step what all ratios share, the rest of each class, and the spread."""
    # As in summarize: means of log r̂ over what is measured, by the relative steps.
    for column in ("trust_ratio", "calibration", "direction_norm"):
        rows = rows[rows[column] > 0]

    def of_step(rows: pd.DataFrame) -> pd.Series:
        log, weight = np.log(rows["trust_ratio"]), rows["relative_step"].fillna(0)
        weight = weight if weight.sum() > 0 else weight + 1.0
        mean = np.average(log, weights=weight)
        spread = np.average((log - mean) ** 2, weights=weight) ** 0.5
        of_classes = {
            name: np.exp(np.average(log[own], weights=weight[own] + 1e-30) - mean)
            for name, own in rows.groupby("class").groups.items()
        }
        return pd.Series(of_classes | {"uniform": np.exp(mean), "spread": spread})

    return pd.DataFrame({step: of_step(group) for step, group in rows.groupby("step")}).T


def verdict(rows: pd.DataFrame) -> list[str]:
    """Whether the ratios of the last step do more than a learning rate, in sentences."""
    if "trust_ratio" not in rows or not np.isfinite(rows["trust_ratio"]).any():
        return ["The history has no trust ratios, like any run of Muon."]
    last = rows[rows["step"] == rows["step"].iloc[-1]]
    if (split := uniform_part(last.replace(np.inf, np.nan))).empty:
        return ["There is not enough data to tell: no matrix has a ratio yet."]
    uniform, spread = split[["uniform", "spread"]].iloc[-1]
    shared = (
        f"All matrices share a factor of {uniform:.2f}, which a learning rate could "
        "provide as well; from matrix to matrix, ratios differ by a factor of "
        f"{np.exp(spread):.2f}."
    )
    for problem in find_problems(last):
        if problem.title.startswith("Saturated"):
            told = f"{problem.title}: {len(problem.matrices) / len(last):.0%}"
            told += " of the matrices take their step from it, not from their ratio."
            return [told, shared]
    if spread <= UNIFORM_SPREAD:
        return [f"Uniform: this is Muon at {uniform:.2g} × the learning rate."]
    advice = "To see whether that lowers the loss, train with muon, too."
    return ["The ratios differ from matrix to matrix.", shared, advice]


def occurrences(rows: pd.DataFrame) -> list[tuple[Problem, int, int]]:
    """The problems, as last seen, and the first and last step shown that have them."""
    seen: dict[str, tuple[Problem, int, int]] = {}
    for step, of_step in thinned(rows).groupby("step"):
        for problem in find_problems(of_step):
            _, first, _ = seen.get(problem.title, (problem, int(step), 0))
            seen[problem.title] = problem, first, int(step)
    return sorted(seen.values(), key=lambda occurrence: -occurrence[-1])


def by_class(column: str, factor: float = 1) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A function to the means of a quantity where it is positive, class by class."""

    def means(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows[rows[column] > 0]
        return factor * rows.pivot_table(column, "step", "class", observed=True)

    return means


def ratios_by_growth(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Of each class, r of its matrices at the last step, by their growth."""
    last = rows[rows["step"] == rows["step"].iloc[-1]]
    last = last[(last["growth"] > 0) & (last["raw_trust_ratio"] > 0)].set_index("growth")
    return {name: own["raw_trust_ratio"] for name, own in last.groupby("class")}


class Entry(NamedTuple):
    """A figure of lines over steps, or of a point for each matrix."""

    title: str
    needs: tuple[str, ...]  # Columns of the history.
    label: str  # Of the vertical axis.
    lines: Callable[[pd.DataFrame], Any]  # To series by name, such as a data frame.
    log: bool
    caption: str
    points_over: str = ""  # The label of the horizontal axis, if it is not the step.
    limits: tuple[float, float] | None = None  # Of the vertical axis.


# By the name of its file.
FIGURES = {
    "trust_ratio_by_class": Entry(
        "Trust ratio by class", ("trust_ratio",), "trust ratio r̂",
        by_class("trust_ratio"), True,
        "The mean of r̂, which scaled each step; where it is 1, the step is Muon's. "
        "Classes that part and stay apart are where a gain over Muon can come from: if "
        "all move together, only the learning rate has changed.",
    ),
    "uniform_part": Entry(
        "How much of the ratio is uniform",
        ("trust_ratio", "calibration", "direction_norm"), "uniform part; class / uniform",
        lambda rows: uniform_part(rows).drop(columns="spread"), True,
        "The geometric mean of r̂ over all matrices, weighted by their relative steps, "
        "acts like a factor of the learning rate; the others are what is left of each "
        "class after division by it. Only that is layer-wise.",
    ),
    "growth_against_ratio": Entry(
        "Growth against ratio", ("growth", "raw_trust_ratio"), "r before the clip",
        ratios_by_growth, True,
        "Each point is a matrix at the last step. The distance from the line is the "
        "factor ‖D₀‖/‖D‖: points far below it had a small first direction, on which c is "
        "anchored.",
        points_over="growth ‖W‖/‖W₀‖",
    ),
    "bounds": Entry(
        "Matrices at a bound", ("at_r_min", "at_r_max"), "matrices at a bound (%)",
        lambda rows: 100 * rows.groupby("step")[["at_r_min", "at_r_max"]]
        .mean().rename(columns=NUMBERS), False,
        "Where the clip decides, the ratio no longer tells layers apart.",
        limits=(-3, 103),
    ),
    "relative_step": Entry(
        "Relative step", ("relative_step",), "relative step (% of ‖W‖)",
        by_class("relative_step", 100), True,
        "How far a step moves the weights of a class, relative to their norm. A class "
        "far above the others is the first suspect when a run turns unstable.",
    ),
    "loss": Entry(
        "Loss", ("loss",), "loss",
        lambda rows: rows.groupby("step")[
            [name for name in ("loss", "val_loss") if name in rows]
        ].first(), False,
        "A jump that follows a jump of a relative step names its likely cause.",
    ),
}  # fmt: skip


@style.styled
def figure_of(entry: Entry, rows: pd.DataFrame) -> Figure:
    """A figure of the history, in which each class has the same color as in others."""
    figure = Figure(figsize=(6, 4.4))
    axes, classes = figure.subplots(), sorted(rows["class"].unique())
    for index, (name, line) in enumerate(entry.lines(rows).items()):
        place = classes.index(name) if name in classes else index
        color = style.BLACK if name == "uniform" else COLORS[place % len(COLORS)]
        form = "-" if place < len(COLORS) else "--"
        few = len(line) < 20 or entry.points_over
        axes.plot(
            line.dropna(), color=color, marker="o" if few else "", markersize=4,
            ls="" if entry.points_over else form, label=name,
        )  # fmt: skip
    axes.set(xlabel=entry.points_over or "step", ylabel=entry.label)
    if entry.limits:
        axes.set_ylim(entry.limits)
    if entry.points_over:
        axes.axline((1, 1), (2, 2), color=style.GRAY, lw=0.9)
        axes.set_xscale("log")
    if entry.log:
        axes.set_yscale("log")
    for axis, (least, most) in (
        (axes.xaxis, axes.get_xlim()),
        (axes.yaxis, axes.get_ylim()),
    ):
        if axis.get_scale() == "log":
            locator: Locator = LogLocator(subs=(1, 2, 5) if most < 100 * least else (1,))
            if most < 3 * least:  # Powers of ten would give one tick or none.
                locator = MaxNLocator(5)
            axis.set(major_locator=locator, minor_locator=NullLocator())
            axis.set_major_formatter("{x:g}")
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=3)
    texts: list[Any] = figure.findobj(Text)
    for text in texts:
        text.set_parse_math(False)  # A name may hold a dollar.
    return figure


def write_report(folder: str | pathlib.Path) -> pathlib.Path:
    """Write the report of a run into its folder; the path of the page."""
    folder = pathlib.Path(folder)
    rows, out = read_run(folder), folder / "report"
    out.mkdir(exist_ok=True)
    last = rows[rows["step"] == rows["step"].iloc[-1]]
    shown, figures = thinned(rows).replace([np.inf, -np.inf], np.nan), ""
    for name, entry in FIGURES.items():
        image = out / f"{name}.png"
        lacking = [x for x in entry.needs if x not in shown or shown[x].isna().all()]
        content = f"<p>Left out. The history has no {' and no '.join(lacking)}.</p>"
        image.unlink(missing_ok=True)  # It may be left from an earlier report.
        if not lacking:
            figure_of(entry, shown).savefig(image, dpi=150)
            data = base64.b64encode(image.read_bytes()).decode()
            content = f'<img alt="{entry.label}" src="data:image/png;base64,{data}">'
        figures += f"<figure><h3>{entry.title}</h3>{content}{entry.caption}</figure>"
    problems = "".join(
        f"<h3>{html.escape(problem.title)}</h3><p>Steps {first:,} to {end:,}, matrices: "
        f"{len(problem.matrices):,}. {html.escape(str(problem))}</p>"
        for problem, first, end in occurrences(rows)
    )
    by = "trust_ratio" if last["trust_ratio"].notna().any() else "weight_norm"
    table = last.sort_values(by).dropna(axis="columns", how="all")
    kept = [name for name in ("matrix", "class", *NUMBERS) if name in table]
    audit = folder / "audit.csv"
    if audit.is_file() and audit.stat().st_size:
        parameters = pd.read_csv(audit, dtype=str, keep_default_na=False)
        audit_table = _table(f"{len(parameters):,} parameters", parameters)
    else:
        audit_table = "<p>There is no audit.csv, the rows of orscale_jax.describe.</p>"
    steps = rows["step"].nunique()
    page = out / "report.html"
    text = PAGE.substitute(
        name=html.escape(folder.resolve().name),
        facts=f"recorded steps: {steps:,} · matrices: {len(last):,} · "
        f"classes: {last['class'].nunique()}",
        step=f"{last['step'].iloc[0]:,}",
        verdict="".join(f"<p>{html.escape(x)}</p>" for x in verdict(rows)),
        problems=problems or "<p>None: no recorded step shows one.</p>",
        figures=figures,
        matrices=_table(
            f"{len(last):,} matrices at the last step, by {by}",
            table[kept].rename(columns=NUMBERS),
        ),
        audit=audit_table,
    )
    page.write_text(text, encoding="utf-8")
    return page


def _table(title: str, rows: pd.DataFrame) -> str:
    if len(rows) > MAX_ROWS:
        title += f"; the first and the last {MAX_ROWS // 2} of them"
        rows = pd.concat([rows[: MAX_ROWS // 2], rows[-MAX_ROWS // 2 :]])
    table = rows.to_html(index=False, na_rep="–", float_format="{:.4g}".format)
    return f"<details><summary>{title}</summary><div>{table}</div></details>"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the folder of a run that writes a history")
    try:
        print(write_report(parser.parse_args().folder))
    except (RunError, OSError) as error:
        sys.exit(str(error))
