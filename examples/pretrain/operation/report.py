"""What a run shows at its end: tables, CSV files and figures."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.pretrain.operation import plots
from examples.pretrain.operation.records import read_csv, write_csv
from examples.pretrain.operation.rundir import read_facts
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


def write(folder: pathlib.Path, console: Console) -> None:
    """Reports on all finished optimizers of a run folder."""
    facts = read_facts(folder)
    unit = facts["unit"]
    finished = [n for n in OPTIMIZERS if (folder / n / "result.json").exists()]
    metrics = {name: read_csv(folder / name / "metrics.csv") for name in finished}
    summary = [_summary(name, metrics[name], folder) for name in finished]
    every_row = [row for rows in metrics.values() for row in rows]
    write_csv(folder / "metrics.csv", list(every_row[0]), every_row)
    write_csv(folder / "summary.csv", SUMMARY, summary)
    train = {name: curve(rows, "train_loss") for name, rows in metrics.items()}
    val = {name: curve(rows, "val_loss") for name, rows in metrics.items()}
    plots.draw_losses(folder / "losses.png", train, val, unit, run_line([folder]))
    same = "weights" if facts["rates"] == "advised" else "learning rate, weights"
    table = Table(title=f"Same {same} and batches; validation loss")
    shown = [c for c in COLUMNS if any(row.get(c[1]) for row in summary)]
    table.add_column("optimizer", no_wrap=True)
    for title in (f"nats/{unit}", *(title for title, _, _ in shown)):
        table.add_column(title, justify="right")
    for row in summary:
        cells = [f"{float(row[k]):{form}}" if row.get(k) else "" for _, k, form in shown]
        table.add_row(row["label"], f"{float(row['val_loss']):.4f}", *cells)
    console.print(table)
    console.print(f"Figures and CSV files are in {folder}", highlight=False)
    for name in finished:
        _report_matrices(name, folder, console)


def curve(rows: list[dict[str, str]], column: str) -> plots.Curve:
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


def _report_matrices(name: str, folder: pathlib.Path, console: Console) -> None:
    """Reports on what an optimizer did to matrices and experts, if it did."""
    loads, history = folder / name / "expert_loads.csv", folder / name / FILE_NAME
    line = f"{OPTIMIZERS[name].label}. {run_line([folder])}"
    if loads.exists() and (shares := read_csv(loads)):
        plots.draw_loads(folder / name / "expert_loads.png", shares, line)
    rows = read_csv(history) if history.exists() else []
    if not rows or not rows[-1]["trust_ratio"]:
        return
    plots.draw_trust_ratios(folder / name / "trust_ratios.png", rows, line)
    page = write_report(folder / name)
    console.print(f"What {OPTIMIZERS[name].label} did: {page}", highlight=False)


def _summary(
    name: str, rows: list[dict[str, str]], folder: pathlib.Path
) -> dict[str, Any]:
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
    seconds = result.get("seconds")
    if seconds is None:
        return summary
    item = "images" if "images" in last else "tokens"
    per_step = int(last[item]) / int(last["step"])
    return summary | {
        "seconds_per_step": f"{seconds['step']:.5f}",
        "optimizer_share": f"{seconds['optimizer'] / seconds['step']:.4f}",
        "items_per_second": f"{per_step / seconds['step']:.0f}",
    }
