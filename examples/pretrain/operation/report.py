"""What a run shows at its end: tables, CSV files and figures."""

import csv
import io
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

from examples import figure_style as style
from examples.figure_style import INK
from examples.pretrain.operation.rundir import read_csv, read_facts, write_atomically
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.tasks import recorded_kind
from orscale_jax.diagnostics.history import FILE_NAME
from orscale_jax.diagnostics.report import write_report

SUMMARY = [
    "optimizer", "label", "val_loss", "val_accuracy", "steps", "parameters",
    "seconds_per_step",
]  # fmt: skip
# Columns of the table: title, key of the summary, format.
COLUMNS = (
    ("accuracy", "val_accuracy", ".2%"),
    ("s/step", "seconds_per_step", ".3f"),
)
SMOOTHING = 0.9  # Of the training loss: the weight of the past at each step.
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
    draw_losses(folder / "losses.png", train, val, facts["unit"], run_line(folder))
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
    for name in finished:
        history = folder / name / FILE_NAME
        rows = read_csv(history) if history.exists() else []
        if rows and rows[-1]["trust_ratio"]:
            page = write_report(folder / name)
            console.print(f"What {OPTIMIZERS[name].label} did: {page}", highlight=False)


def curve(rows: Sequence[Row], column: str) -> Curve:
    """Steps and values of a column, where it has any."""
    points = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
    steps, values = zip(*points, strict=True)
    return np.array(steps), np.array(values)


def run_line(folder: pathlib.Path) -> str:
    """Model, learning rate and seed of a finished run."""
    facts = read_facts(folder)
    parameters = int(read_csv(folder / "summary.csv")[0]["parameters"])
    whose = "AdamW's learning rate" if facts["rates"] == "advised" else "learning rate"
    return (
        f"{recorded_kind(facts).label}, {parameters:,} parameters; "
        f"{whose} {facts['learning_rate']:g}; seed {facts['seed']}"
    )


def look(name: str) -> dict[str, Any]:
    """The look of an optimizer's line, the same in all figures."""
    color = style.color_of(name, OPTIMIZERS)
    return {"color": color, "lw": 1.8, "marker": MARKERS.get(name, "D"), "ms": 4}


def _summary(name: str, rows: Sequence[Row], folder: pathlib.Path) -> dict[str, Any]:
    result = json.loads((folder / name / "result.json").read_text())
    last = rows[-1]
    return {
        "optimizer": name,
        "label": OPTIMIZERS[name].label,
        "val_loss": last["val_loss"],
        "val_accuracy": last.get("val_accuracy", ""),
        "steps": last["step"],
        "parameters": result["parameters"],
        "seconds_per_step": f"{float(last['seconds']) / int(last['step']):.5f}",
    }


def _write_csv(
    path: pathlib.Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


@style.styled
def draw_losses(
    path: pathlib.Path,
    train: Mapping[str, Curve],
    val: Mapping[str, Curve],
    unit: str,
    run: str,
) -> None:
    """Loss curves by optimizer: the whole run, and its second half closer up."""
    figure, [[whole, late]] = style.new_figure(3.7, 1, 2)
    whole.set_ylabel(f"cross-entropy (nats per {unit})")
    for axes in (whole, late):
        axes.grid(axis="y")
        axes.set_xlabel("step")
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
    # Names below the panels: at the ends of the lines, those of equal ones would overlap.
    handles = [
        Line2D([], [], label=f"{OPTIMIZERS[name].label}  {values[-1]:.4f}", **look(name))
        for name, (_, values) in val.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    style.set_title(
        figure, "Training and validation loss; below, validation loss at the end", run
    )
    style.save(figure, path)
