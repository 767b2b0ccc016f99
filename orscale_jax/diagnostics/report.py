"""The report of a run: one HTML page and its figures, with the extra ``report``."""

import html
import io
import pathlib
import re
import string
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from orscale_jax.diagnostics.history import FILE_NAME, read_rows
from orscale_jax.diagnostics.problems import Problem, find_problems

# What can be told apart in a figure, and read in a table.
MAX_STEPS, MAX_CLASSES, EXTREMES, MAX_AUDIT_ROWS = 240, 14, 40, 300
OTHERS = "all other classes"
# Below this standard deviation of log r̂, the ratios are one learning rate.
UNIFORM_SPREAD = 0.02

# Columns of the table of matrices, and their headings.
NUMBERS = {
    "trust_ratio": "r̂", "raw_trust_ratio": "r", "calibration": "c",
    "growth": "‖W‖/‖W₀‖", "weight_norm": "‖W‖", "direction_norm": "‖D‖",
    "relative_step": "η r̂ ‖D‖/‖W‖",
}  # fmt: skip

# Columns and what they are called in figures.
LOSSES = {"loss": "training", "val_loss": "validation"}
AT_BOUNDS = {"at_r_min": "at r_min", "at_r_max": "at r_max"}

INK, MUTED, GRID = "#1F2328", "#666E77", "#E1E4E8"
# Okabe and Ito's colors, which are told apart without full color vision; then dashed.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#C9B400")
# In the page, each becomes a variable of report.html, with a light and a dark value.
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid"} | {
    color: f"series-{index}" for index, color in enumerate(COLORS)
}
RC: dict[Any, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": MUTED, "axes.grid": True,
    "axes.labelcolor": INK, "axes.linewidth": 0.6, "axes.spines.right": False,
    "axes.spines.top": False, "font.size": 9.5, "grid.color": GRID, "grid.linewidth": 0.6,
    "legend.fontsize": 9, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "orscale",  # The same history makes the same page.
    "text.color": INK, "text.parse_math": False,  # A name may hold a dollar.
    "xtick.color": MUTED, "xtick.labelcolor": INK, "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}  # fmt: skip
# The line of Muon, whose ratios are 1.
AT_ONE: Any = {"color": MUTED, "lw": 0.8, "ls": (0, (4, 3))}


class RunError(ValueError):
    """A run folder from which no report can be made."""


class Run(NamedTuple):
    """The history of a run and, where there is one, its audit."""

    name: str  # Of the run folder.
    rows: pd.DataFrame  # One for each matrix and recorded step; NaN where it is empty.
    steps: list[int]  # The recorded ones.
    last: pd.DataFrame  # The rows of the last step.
    shown: pd.DataFrame  # The rows of some of many steps, without infinite numbers.
    looks: dict[str, dict[str, Any]]  # The line of each class.
    audit: pd.DataFrame  # The rows of orscale_jax.describe, as strings, if there.

    def has(self, *columns: str) -> bool:
        """Whether each of these columns holds a finite number."""
        return all(
            column in self.rows and bool(np.isfinite(self.rows[column]).any())
            for column in columns
        )

    def per_step(self, *columns: str) -> pd.DataFrame:
        """What all rows of a step share, at the steps that have it."""
        rows = self.rows[np.isfinite(self.rows[columns[0]])]
        values = rows.drop_duplicates("step").set_index("step")[[*columns]]
        return values.loc[_thinned(list(values.index))]


def read_run(folder: pathlib.Path) -> Run:
    """The run of a folder, without a last step that was not written to its end."""
    path = folder / FILE_NAME
    if not path.is_file():
        lacks = f"has no {FILE_NAME}" if folder.is_dir() else "is not a folder"
        raise RunError(
            f"{folder} {lacks}: pass the folder of a run that writes its "
            "orscale_jax.diagnostics.History there."
        )
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]  # It may be killed in the middle of a row.
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
    if rows["class"].nunique() > MAX_CLASSES:
        kept = rows["class"].value_counts().index[: MAX_CLASSES - 1]
        rows["class"] = rows["class"].where(rows["class"].isin(kept), OTHERS)
    steps, audit = [*map(int, sizes.index)], pd.DataFrame()
    if (folder / "audit.csv").is_file() and (folder / "audit.csv").stat().st_size:
        audit = pd.read_csv(folder / "audit.csv", dtype=str, keep_default_na=False)
    return Run(
        name=folder.resolve().name,
        rows=rows,
        steps=steps,
        last=rows[rows["step"] == steps[-1]],
        shown=rows[rows["step"].isin(_thinned(steps))].replace([np.inf, -np.inf], np.nan),
        looks=_looks(rows["class"].unique()),
        audit=audit,
    )


def _looks(classes: Any) -> dict[str, dict[str, Any]]:
    """The line of each class, in the order in which a model has them."""
    return {
        name: {
            "color": COLORS[i % len(COLORS)],
            "ls": ("-", (0, (4, 2)))[i // len(COLORS) % 2],
            "label": name if len(name) <= 30 else name[:29] + "…",
        }
        for i, name in enumerate(sorted(classes, key=OTHERS.__eq__))
    }


def _thinned(steps: list[Any]) -> list[Any]:
    """Some of many steps, at equal distances, with both ends."""
    places = np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS))
    return [steps[int(place)] for place in places.round()]


# What is found in a run.


def uniform_part(run: Run) -> pd.DataFrame:
    """At each step what all ratios share, the rest of each class, and the spread."""
    # As in summarize: means of log r̂ over what is measured, by the relative steps.
    rows = run.shown[run.shown["trust_ratio"] > 0]
    for column in ("calibration", "direction_norm"):
        if column in rows:
            rows = rows[rows[column] > 0]
    step = rows["relative_step"] if "relative_step" in rows else 0 * rows["trust_ratio"]
    weight = step.clip(lower=0).fillna(0)
    rows = rows.assign(log=np.log(rows["trust_ratio"]), weight=weight)
    totals = rows.groupby("step")["weight"].transform("sum")
    rows["weight"] = rows["weight"].where(totals > 0, 1.0)

    def mean(column: str, *by: str) -> pd.Series:
        products = rows.assign(product=rows[column] * rows["weight"])
        sums = products.groupby([*by])[["product", "weight"]].sum()
        return sums["product"] / sums["weight"]

    uniform = mean("log", "step")
    rows["square"] = (rows["log"] - rows["step"].map(uniform)) ** 2
    ratio = mean("log", "step", "class").unstack("class").sub(uniform, axis="index")
    ratio = np.exp(ratio.assign(uniform=uniform))
    return ratio.assign(spread=mean("square", "step") ** 0.5)


def verdict(run: Run) -> list[str]:
    """Whether the ratios of the last step do more than a learning rate, in sentences."""
    if not run.has("trust_ratio"):
        return ["The history has no trust ratios, like any run of Muon."]
    split = uniform_part(run)
    if split.empty:
        return ["There is not enough data to tell: no matrix has a ratio yet."]
    uniform, spread = split[["uniform", "spread"]].iloc[-1]
    shared = (
        f"All matrices share a factor of {uniform:.2f}, which a learning rate could "
        "provide as well; from matrix to matrix, ratios differ by a factor of "
        f"{np.exp(spread):.2f}."
    )
    for problem in find_problems(run.last):
        if problem.title.startswith("Saturated"):
            told = f"{problem.title}: {len(problem.matrices) / len(run.last):.0%}"
            told += " of the matrices take their step from it, not from their ratio."
            return [told, shared]
    if spread <= UNIFORM_SPREAD:
        return [f"Uniform: this is Muon at {uniform:.2g} × the learning rate."]
    advice = "To see whether that lowers the loss, train with muon, too."
    return ["The ratios differ from matrix to matrix.", shared, advice]


def occurrences(run: Run) -> list[tuple[Problem, int, int]]:
    """The problems, as last seen, and the first and last step shown that have them."""
    seen: dict[str, tuple[Problem, int, int]] = {}
    shown = run.rows[run.rows["step"].isin(_thinned(run.steps))]
    for step, rows in shown.groupby("step"):
        for problem in find_problems(rows):
            _, first, _ = seen.get(problem.title, (problem, int(step), 0))
            seen[problem.title] = problem, first, int(step)
    return sorted(seen.values(), key=lambda occurrence: -occurrence[-1])


def key_numbers(run: Run) -> Iterator[tuple[str, str]]:
    """The key numbers of the last step: labels and values."""
    for column in [x for x in LOSSES if run.has(x)][-1:]:
        yield f"{LOSSES[column]} loss", f"{run.per_step(column).iloc[-1, 0]:.4g}"
    at_end = run.shown[run.shown["step"] == run.steps[-1]]
    if run.has("trust_ratio") and at_end["trust_ratio"].notna().any():
        p05, p95 = at_end["trust_ratio"].quantile([0.05, 0.95])
        yield "r̂, 5th to 95th percentile", f"{p05:.2f} – {p95:.2f}"
    if run.has(*AT_BOUNDS):
        share = (run.last[[*AT_BOUNDS]].sum(axis="columns") == 1).mean()
        yield "of the matrices at a bound", f"{share:.0%}"
    if run.has("relative_step"):
        medians = 100 * run.shown.groupby("step")["relative_step"].median().dropna()
        largest = f"at most {medians.max():.2g}%, at step {medians.idxmax():,}"
        yield f"median relative step ({largest})", f"{medians.iloc[-1]:.2g}%"


# Figures.


def draw_lines(axes: Axes, run: Run, values: pd.DataFrame) -> None:
    """A line for each column, through the steps that have it."""
    for color, (name, line) in zip(COLORS * 2, values.items(), strict=False):
        look = run.looks.get(str(name), {"color": color, "label": name})
        marker = "." if line.count() < 20 else ""
        axes.plot(line.dropna(), marker=marker, **look)


def by_class(run: Run, column: str) -> pd.DataFrame:
    """The means of a quantity where it is positive, with a column for each class."""
    rows = run.shown[run.shown[column] > 0]
    means = rows.groupby(["step", "class"])[column].mean().unstack("class")
    return means[[name for name in run.looks if name in means]]


def draw_ratios(axes: Axes, run: Run) -> None:
    """The means of the classes, over a band of all matrices."""
    ratios = run.shown[run.shown["trust_ratio"] > 0].groupby("step")["trust_ratio"]
    low, high = ratios.quantile(0.05), ratios.quantile(0.95)
    axes.fill_between(low.index, low, high, color=MUTED, alpha=0.18, lw=0)
    axes.axhline(1, **AT_ONE)
    draw_lines(axes, run, by_class(run, "trust_ratio"))


def draw_uniform_part(axes: Axes, run: Run) -> None:
    """What all ratios share, and what is left of each class."""
    parts = uniform_part(run)
    axes.plot(parts.index, parts["uniform"], color=INK, lw=2.4, label="uniform part")
    axes.axhline(1, **AT_ONE)
    draw_lines(axes, run, parts[[name for name in run.looks if name in parts]])


def draw_growth(axes: Axes, run: Run) -> None:
    """A point for each matrix, empty where it is held at a bound."""
    rows = run.last.replace(np.inf, np.nan)
    rows = rows[(rows["growth"] > 0) & (rows["raw_trust_ratio"] > 0)]
    held = (rows["at_r_min"] == 1) | (rows["at_r_max"] == 1)
    for name, look in run.looks.items():
        style: Any = {
            "s": 22, "marker": "o" if look["ls"] == "-" else "s",
            "edgecolors": look["color"], "rasterized": len(rows) > 500,
        }  # fmt: skip
        for chosen, face in ((~held, look["color"]), (held, "none")):
            points = rows[chosen & (rows["class"] == name)]
            places = points["growth"], points["raw_trust_ratio"]
            axes.scatter(*places, facecolors=face, alpha=0.75, **style)
        axes.scatter([], [], facecolors=look["color"], label=look["label"], **style)
    values = pd.concat([rows["growth"], rows["raw_trust_ratio"]])
    ends = [values.min(), values.max()]
    axes.plot(ends, ends, color=MUTED, lw=0.9, label="r = growth")
    axes.set_xlabel("growth ‖W‖/‖W₀‖")


def draw_bounds(axes: Axes, run: Run) -> None:
    shares = 100 * run.shown.groupby("step")[[*AT_BOUNDS]].mean()
    draw_lines(axes, run, shares.rename(columns=AT_BOUNDS))
    axes.set_ylim(0, 100)


class Entry(NamedTuple):
    """A figure, which has a place and its caption in report.html."""

    needs: tuple[str, ...]  # Columns of the history.
    label: str  # Of the vertical axis.
    log: str  # Which axes are logarithmic: "", "y" or "xy".
    draw: Callable[[Axes, Run], None]


# By the name of its file.
FIGURES = {
    "trust_ratio_by_class": Entry(("trust_ratio",), "trust ratio r̂", "y", draw_ratios),
    "uniform_part": Entry(
        ("trust_ratio",), "uniform part; class / uniform part", "y", draw_uniform_part,
    ),
    "growth_against_ratio": Entry(
        ("raw_trust_ratio", "growth"), "r before the clip", "xy", draw_growth,
    ),
    "bounds": Entry(tuple(AT_BOUNDS), "matrices at a bound (%)", "", draw_bounds),
    "relative_step": Entry(
        ("relative_step",), "relative step (% of ‖W‖)", "y",
        lambda axes, run: draw_lines(axes, run, 100 * by_class(run, "relative_step")),
    ),
    "loss": Entry(
        ("loss",), "loss", "",
        lambda axes, run: draw_lines(axes, run, pd.concat([
            run.per_step(name).rename(columns=LOSSES) for name in LOSSES if run.has(name)
        ], axis="columns")),
    ),
}  # fmt: skip


# The page.


def write_report(
    folder: str | pathlib.Path, out: str | pathlib.Path | None = None
) -> pathlib.Path:
    """Write the report of a run; the path of its page. RunError if there is none."""
    run = read_run(pathlib.Path(folder))
    out = pathlib.Path(folder) / "report" if out is None else pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    headline, *sentences = verdict(run)
    problems = ""
    for problem, first, last in occurrences(run):
        names = ", ".join(problem.matrices[:6]) + " …" * (len(problem.matrices) > 6)
        when = f"steps {first:,} to {last:,}" if first != last else f"step {last:,}"
        problems += (
            f"<div class=problem><h3>{html.escape(problem.title)}</h3>"
            f"<p class=muted>{when}; matrices: {len(problem.matrices):,}</p>"
            f"<p>{_prose(problem.meaning)} {_prose(problem.remedy)}</p>"
            f"<p class=muted>{html.escape(names)}</p></div>"
        )
    none = "<p>None: no recorded step shows one of the problems that are looked for.</p>"
    shown = run.shown["step"].nunique()
    thinned = f" The figures show {shown:,} of the recorded steps."
    audit = "There is no audit.csv, the rows of orscale_jax.describe, in the run folder."
    template = pathlib.Path(__file__).with_suffix(".html").read_text("utf-8")
    text = string.Template(template).substitute(
        name=html.escape(run.name),
        facts=f"step {run.steps[-1]:,} · recorded steps: {len(run.steps):,} · "
        f"matrices: {len(run.last):,} · classes: {run.last['class'].nunique()}",
        step=f"{run.steps[-1]:,}",
        headline=_prose(headline),
        sentences="".join(f"<p>{_prose(sentence)}</p>" for sentence in sentences),
        tiles="".join(
            f"<div><dt>{_prose(label)}</dt><dd>{html.escape(value)}</dd></div>"
            for label, value in key_numbers(run)
        ),
        problems=problems or none,
        **{f"figure_{name}": _figure(name, run, out) for name in FIGURES},
        matrices=_matrices(run),
        audit=f"<p class=muted>{audit}</p>"
        if run.audit.empty
        else _table(f"{len(run.audit):,} parameters", run.audit, MAX_AUDIT_ROWS),
        thinned=thinned if shown < len(run.steps) else "",
    )
    page = out / "report.html"
    page.write_text(text, encoding="utf-8")
    return page


def _prose(text: str) -> str:
    """A sentence in HTML; r_max has a subscript."""
    return re.sub(r"\br_(\w+)", r"r<sub>\1</sub>", html.escape(text))


def _figure(name: str, run: Run, out: pathlib.Path) -> str:
    """A figure in the page; its PNG is written beside it."""
    entry, image = FIGURES[name], out / f"{name}.png"
    if lacking := [name for name in entry.needs if not run.has(name)]:
        image.unlink(missing_ok=True)  # It may be left from an earlier report.
        reason = f"Left out. The history has no {' and no '.join(lacking)}."
        return f'<p class="muted lacking">{reason}</p>'
    with matplotlib.rc_context(RC):
        # At the width of a phone, 9.5 points are about 11 pixels.
        height = 3.2 + 0.09 * len(run.looks)
        figure = Figure(figsize=(4.4, height), layout="constrained", facecolor="none")
        axes = figure.subplots()
        axes.set(facecolor="none", xlabel="step", ylabel=entry.label)
        if len(run.steps) < 6:
            axes.set_xticks(run.steps)
        entry.draw(axes, run)
        for which in entry.log:
            _log(axes, which)
        if labels := axes.get_legend_handles_labels()[1]:
            columns = 3 if max(map(len, labels)) <= 16 else 2
            figure.legend(loc="outside lower center", ncols=columns)
        figure.savefig(image, dpi=180, facecolor="white")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", dpi=220, metadata={"Date": None})
    # Colors as variables, text in the font of the page, ids that no other figure has.
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"(font: [^;\"']*?px) [^;\"]*", r"\1 var(--font)", svg)
    for color, variable in VARIABLES.items():
        svg = re.sub(f": {color}", f": var(--{variable})", svg, flags=re.IGNORECASE)
    # The last values in words, for those who cannot see them.
    known = run.rows[np.isfinite(run.rows[entry.needs[0]])]
    last = known[known["step"] == known["step"].iloc[-1]]
    means = last.groupby("class", sort=False)[entry.needs[0]].mean()
    told = ", ".join(f"{label} {mean:.3g}" for label, mean in means.items())
    words = html.escape(f"{entry.label}. Means of {entry.needs[0]}: {told}.")
    return svg.replace("<svg", f'<svg role="img" aria-label="{words}"', 1)


def _log(axes: Axes, which: str) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks."""
    axis, data = getattr(axes, f"{which}axis"), axes.dataLim
    least, most = getattr(data, f"minpos{which}"), getattr(data, f"{which}1")
    if least <= most < np.inf:  # Otherwise there is nothing to show.
        margin = max((most / least) ** 0.06, 1.02)
        ends = least / margin, most * margin
        axes.set(**{f"{which}scale": "log", f"{which}lim": ends})
        near = (1, 1.5, 2, 3, 5, 7) if most < 6 * least else (1, 2, 5)
        locator: Locator = LogLocator(subs=near if most < 100 * least else (1,))
        if most < 3 * least:
            locator = MaxNLocator(5)  # Powers of ten would give one tick or none.
        axis.set(minor_locator=NullLocator(), major_locator=locator)
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _matrices(run: Run) -> str:
    """The last values of every matrix, or of those with extreme ratios."""
    rows, step = run.last, run.steps[-1]
    title = f"All {len(rows):,} matrices at step {step:,}"
    if len(rows) > 2 * EXTREMES:
        by = "trust_ratio" if run.has("trust_ratio") else "weight_norm"
        ordered = rows.sort_values(by, na_position="first")
        title = (
            f"The {EXTREMES} matrices with the smallest and the {EXTREMES} with the "
            f"largest {NUMBERS[by]} of {len(rows):,}, at step {step:,}"
        )
        rows = pd.concat([ordered[:EXTREMES], ordered[-EXTREMES:]])
    numbers = [name for name in NUMBERS if name in rows and rows[name].notna().any()]
    table = rows[["matrix", "class", *numbers]].rename(columns=NUMBERS)
    for flag, value, note in (
        ("at_r_min", 1, "at r_min"), ("at_r_max", 1, "at r_max"),
        ("started", 0, "no update yet"), ("anchored", 0, "no calibration"),
    ):  # fmt: skip
        if flag in rows and (rows[flag] == value).any():
            table[note] = np.where(rows[flag] == value, "yes", "")
    return _table(title, table, len(table))


def _table(title: str, rows: pd.DataFrame, at_most: int) -> str:
    more = f"; the first {at_most:,} of them" if len(rows) > at_most else ""
    table = rows[:at_most].to_html(
        index=False, border=0, na_rep="–", float_format="{:.4g}".format
    )
    scroll = f'<div class="scroll" tabindex="0">{table}</div>'
    return f"<details><summary>{title}{more}</summary>{scroll}</details>"
