"""What a run shows at its end: tables, CSV files and figures."""

import csv
import io
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter
from rich.console import Console
from rich.table import Table

from examples import figure_style as style
from examples.figure_style import BLUE, GREEN, INK
from examples.pretrain.operation.rundir import read_csv, read_facts, write_atomically
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.tasks import recorded_kind
from orscale_jax.diagnostics.history import FILE_NAME
from orscale_jax.diagnostics.report import write_report

SUMMARY = [
    "optimizer", "label", "val_loss", "val_accuracy", "steps", "parameters",
    "seconds_per_step", "optimizer_share", "items_per_second",
]  # fmt: skip
# Columns of the table: title, key of the summary, format.
COLUMNS = (
    ("accuracy", "val_accuracy", ".2%"),
    ("s/step", "seconds_per_step", ".3f"),
    ("optimizer's share", "optimizer_share", ".1%"),
    ("per second", "items_per_second", ",.0f"),
)
SMOOTHING = 0.9  # Of the training loss: the weight of the past at each step.
RATIO_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
MOST_LINES = 8  # More matrices than these are drawn as a band.
MARKERS = {"adamw": "s", "muon_moonlight": "o", "orscale": "^"}

Row = Mapping[str, str]
Curve = tuple[np.ndarray, np.ndarray]  # Steps and values.


def write(folder: pathlib.Path, console: Console) -> None:
    """Reports on all finished optimizers of a run folder."""
    facts = read_facts(folder)
    finished = [n for n in OPTIMIZERS if (folder / n / "result.json").exists()]
    metrics = {name: read_csv(folder / name / "metrics.csv") for name in finished}
    summary = [_summary(name, metrics[name], folder) for name in finished]
    every_row = [row for rows in metrics.values() for row in rows]
    _write_csv(folder / "metrics.csv", list(every_row[0]), every_row)
    _write_csv(folder / "summary.csv", SUMMARY, summary)
    train = {name: curve(rows, "train_loss") for name, rows in metrics.items()}
    val = {name: curve(rows, "val_loss") for name, rows in metrics.items()}
    run = run_line([folder])
    _draw_losses(folder / "losses.png", train, val, facts["unit"], run)
    same = "weights" if facts["rates"] == "advised" else "learning rate, weights"
    table = Table(title=f"Same {same} and batches; validation loss")
    shown = [c for c in COLUMNS if any(row.get(c[1]) for row in summary)]
    table.add_column("optimizer", no_wrap=True)
    for title in (f"nats/{facts['unit']}", *(title for title, _, _ in shown)):
        table.add_column(title, justify="right")
    for row in summary:
        cells = [f"{float(row[k]):{form}}" if row.get(k) else "" for _, k, form in shown]
        table.add_row(row["label"], f"{float(row['val_loss']):.4f}", *cells)
    console.print(table)
    console.print(f"Figures and CSV files are in {folder}", highlight=False)
    # What an optimizer did to experts and matrices, if it did.
    for name in finished:
        line, here = f"{OPTIMIZERS[name].label}. {run}", folder / name
        loads, history = here / "expert_loads.csv", here / FILE_NAME
        if loads.exists() and (shares := read_csv(loads)):
            draw_loads(here / "expert_loads.png", shares, line)
        rows = read_csv(history) if history.exists() else []
        if rows and rows[-1]["trust_ratio"]:
            _draw_trust_ratios(here / "trust_ratios.png", rows, line)
            page = write_report(here)
            console.print(f"What {OPTIMIZERS[name].label} did: {page}", highlight=False)


def curve(rows: Sequence[Row], column: str) -> Curve:
    """Steps and values of a column, where it has any."""
    points = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
    steps, values = zip(*points, strict=True)
    return np.array(steps), np.array(values)


def run_line(folders: Sequence[pathlib.Path]) -> str:
    """Model, learning rate and seeds of finished runs that differ in their seed alone."""
    facts = [read_facts(folder) for folder in folders]
    parameters = int(read_csv(folders[0] / "summary.csv")[0]["parameters"])
    seeds = ", ".join(str(other["seed"]) for other in facts)
    whose = "AdamW's learning rate" if facts[0]["rates"] == "advised" else "learning rate"
    return (
        f"{recorded_kind(facts[0]).label}, {parameters:,} parameters; "
        f"{whose} {facts[0]['learning_rate']:g}; "
        f"seed{'s' if len(facts) > 1 else ''} {seeds}"
    )


@style.styled
def draw_loads(path: pathlib.Path, rows: Sequence[Row], run: str) -> None:
    """Loads of the experts, of expert_loads.csv, relative to even ones, by layer.

    Of all figures, `run` is the line with model, rate and seed that goes into the title.
    """
    steps = sorted({int(row["step"]) for row in rows})
    layers = 1 + max(int(row["layer"]) for row in rows)
    experts = 1 + max(int(row["expert"]) for row in rows)
    shares = np.array([float(row["share"]) for row in rows])
    loads = shares.reshape(len(steps), layers, experts) * experts
    figure, panels, _ = _grid(layers, 0.9, 2.3)
    for layer, axes in enumerate(panels):
        axes.plot(steps, loads[:, layer], color=GREEN, lw=0.8, alpha=0.6)
        axes.set_title(f"mixture layer {layer}")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.supylabel("load of an expert (1 is even)")
    style.set_title(figure, "Load of each expert, one line for each", run)
    style.save(figure, path)


def look(name: str) -> dict[str, Any]:
    """The look of an optimizer's line, the same in all figures."""
    marker = MARKERS.get(name, "D")
    return {
        "color": style.color_of(name, OPTIMIZERS),
        "lw": 1.8,
        "marker": marker,
        "ms": 4,
    }


def two_panels(ylabel: str) -> tuple[Figure, Sequence[Axes]]:
    """A figure with two panels over the steps."""
    figure, [panels] = style.new_figure(3.7, 1, 2)
    panels[0].set_ylabel(ylabel)
    for axes in panels:
        axes.grid(axis="y")
        axes.set_xlabel("step")
    return figure, panels


def add_names(figure: Figure, values: Mapping[str, str]) -> None:
    """A legend of the optimizers below the panels, each with a number.

    Not at the ends of the lines, where names of equal ones would stand apart.
    """
    handles = [
        Line2D([], [], label=f"{OPTIMIZERS[name].label}  {value}".rstrip(), **look(name))
        for name, value in values.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _summary(name: str, rows: Sequence[Row], folder: pathlib.Path) -> dict[str, Any]:
    result = json.loads((folder / name / "result.json").read_text())
    last = rows[-1]
    summary = {
        "optimizer": name,
        "label": OPTIMIZERS[name].label,
        "val_loss": last["val_loss"],
        "val_accuracy": last.get("val_accuracy", ""),
        "steps": last["step"],
        "parameters": result["parameters"],
    }
    if (seconds := result.get("seconds")) is not None:
        step = seconds["step"]
        items = int(last["images" if "images" in last else "tokens"])
        summary["seconds_per_step"] = f"{step:.5f}"
        summary["optimizer_share"] = f"{seconds['optimizer'] / step:.4f}"
        summary["items_per_second"] = f"{items / int(last['step']) / step:.0f}"
    return summary


def _write_csv(
    path: pathlib.Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


@style.styled
def _draw_losses(
    path: pathlib.Path,
    train: Mapping[str, Curve],
    val: Mapping[str, Curve],
    unit: str,
    run: str,
) -> None:
    """Loss curves by optimizer: the whole run, and its second half closer up."""
    figure, (whole, late) = two_panels(f"cross-entropy (nats per {unit})")
    for name, curve in val.items():
        steps, losses = train[name]
        # An exponential moving average, corrected for its start.
        shares = (1 - SMOOTHING) * SMOOTHING ** np.arange(len(losses))
        means = np.convolve(losses, shares)[: len(losses)] / np.cumsum(shares)
        whole.plot(steps, means, color=look(name)["color"], lw=1, alpha=0.45)
        for axes in (whole, late):
            axes.plot(*curve, **look(name))
    whole.plot([], [], color=INK, lw=1.8, label="validation")
    whole.plot([], [], color=INK, lw=1, alpha=0.45, label="training, smoothed")
    whole.legend()
    whole.set_title("Whole run")
    late.set_title("Second half, validation")
    last = max(steps[-1] for steps, _ in val.values())
    shown = np.concatenate([values[steps >= last / 2] for steps, values in val.values()])
    shown = shown[np.isfinite(shown)]
    late.set_xlim(0.49 * last, 1.01 * last)  # Room for the first and last markers.
    if shown.size:
        margin = 0.05 * np.ptp(shown) + 1e-6
        late.set_ylim(shown.min() - margin, shown.max() + margin)
    add_names(figure, {name: f"{values[-1]:.4f}" for name, (_, values) in val.items()})
    style.set_title(
        figure, "Training and validation loss; below, validation loss at the end", run
    )
    style.save(figure, path)


@style.styled
def _draw_trust_ratios(path: pathlib.Path, rows: Sequence[Row], run: str) -> None:
    """Trust ratios as applied: a panel for each class of layers, a line for each matrix.

    Where a class has many, its panel has their median and the band of the middle 90 %.
    The rows are those of history.csv.
    """
    classes: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        lines = classes.setdefault(row["class"], {})
        lines.setdefault(row["matrix"], []).append(float(row["trust_ratio"]))
    steps = sorted({int(row["step"]) for row in rows})
    figure, panels, columns = _grid(len(classes), 1.2, 1.7, sharex=True)
    for axes, (name, lines) in zip(panels, classes.items(), strict=True):
        values = np.array(list(lines.values()))
        axes.set_title(name)
        if len(values) <= MOST_LINES:
            shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(values)))
            for shade, line in zip(shades, values, strict=True):
                axes.plot(steps, line, color=shade, lw=1.6)
        else:
            low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
            axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, lw=0)
            axes.plot(steps, middle, color=BLUE, lw=1.8)
            axes.set_title(f"{name}\nmedian, 90 % of {len(values)}")
    # A logarithmic axis with some room around what is drawn, and around 1.
    first = panels[0]
    first.set_yscale("log")
    lowest, highest = first.get_ylim()
    first.set_ylim(min(lowest, 0.7), max(highest, 1.5))
    first.yaxis.set_major_locator(FixedLocator(RATIO_TICKS))
    first.yaxis.set_minor_locator(NullLocator())
    first.yaxis.set_major_formatter(ScalarFormatter())
    for axes in panels[-columns:]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("step; a line is a layer, from dark (first) to light")
    figure.supylabel("trust ratio r̂ (log scale)")
    style.set_title(figure, "Trust ratio of each matrix, by class", run)
    style.save(figure, path)


def _grid(
    count: int, margin: float, row_height: float, **options: Any
) -> tuple[Figure, Sequence[Axes], int]:
    """A figure with so many panels, up to three in a row, each with a line at 1."""
    columns = min(count, 3)
    rows = -(-count // columns)
    height = margin + row_height * rows
    figure, grid = style.new_figure(height, rows, columns, sharey=True, **options)
    panels = list(grid.ravel())
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in panels[:count]:
        axes.grid(axis="y")
        axes.axhline(1, color=INK, lw=0.8, ls=(0, (4, 3)))
    return figure, panels[:count], columns
