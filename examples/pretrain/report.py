"""What a run shows at its end: tables, CSV files and figures."""

import json
import pathlib
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.pretrain import plots
from examples.pretrain.arms import ARMS
from examples.pretrain.records import METRICS, read_csv, write_csv
from examples.pretrain.rundir import read_facts
from orscale_jax.diagnostics.history import FILE_NAME
from orscale_jax.diagnostics.report import write_report

SUMMARY = [
    "arm", "label", "val_loss", "steps", "tokens", "parameters",
    "seconds_per_step", "optimizer_share", "tokens_per_second",
]  # fmt: skip


def write(folder: pathlib.Path, console: Console) -> None:
    """Reports on all finished arms of a run folder."""
    unit = read_facts(folder)["unit"]
    finished = [arm for arm in ARMS if (folder / arm / "result.json").exists()]
    metrics = {arm: read_csv(folder / arm / "metrics.csv") for arm in finished}
    summary = [_summary(arm, metrics[arm], folder) for arm in finished]
    every_row = [row for rows in metrics.values() for row in rows]
    write_csv(folder / "metrics.csv", METRICS, every_row)
    write_csv(folder / "summary.csv", SUMMARY, summary)
    train = {arm: curve(rows, "train_loss") for arm, rows in metrics.items()}
    val = {arm: curve(rows, "val_loss") for arm, rows in metrics.items()}
    plots.draw_losses(folder / "losses.png", train, val, unit)
    console.print(_table(summary, unit))
    console.print(f"Figures and CSV files are in {folder}", highlight=False)
    for arm in finished:
        if (folder / arm / FILE_NAME).exists():
            _report_ratios(arm, folder, console)


def _report_ratios(arm: str, folder: pathlib.Path, console: Console) -> None:
    """Reports on an optimizer's trust ratios, if it has any."""
    rows = read_csv(folder / arm / FILE_NAME)
    if not rows[-1]["trust_ratio"]:
        return
    names = dict.fromkeys(row["matrix"] for row in rows)
    curves = {
        name: curve([row for row in rows if row["matrix"] == name], "trust_ratio")
        for name in names
    }
    plots.draw_trust_ratios(folder / "trust_ratios.png", curves)
    page = write_report(folder / arm)
    console.print(f"What {ARMS[arm].label} did: {page}", highlight=False)


def curve(rows: list[dict[str, str]], column: str) -> plots.Curve:
    """Steps and values of a column, where it has any."""
    points = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
    steps, values = zip(*points, strict=True)
    return np.array(steps), np.array(values)


def _summary(
    arm: str, rows: list[dict[str, str]], folder: pathlib.Path
) -> dict[str, Any]:
    result = json.loads((folder / arm / "result.json").read_text())
    seconds = result["seconds"]
    steps, tokens = int(rows[-1]["step"]), int(rows[-1]["tokens"])
    return {
        "arm": arm,
        "label": ARMS[arm].label,
        "val_loss": rows[-1]["val_loss"],
        "steps": steps,
        "tokens": tokens,
        "parameters": result["parameters"],
        "seconds_per_step": f"{seconds['step']:.5f}",
        "optimizer_share": f"{seconds['optimizer'] / seconds['step']:.4f}",
        "tokens_per_second": f"{tokens / steps / seconds['step']:.0f}",
    }


def _table(summary: list[dict[str, Any]], unit: str) -> Table:
    table = Table(title="Same learning rate, weights and batches; validation loss")
    table.add_column("optimizer")
    for title in (f"nats/{unit}", "s/step", "optimizer's share", "tokens/s"):
        table.add_column(title, justify="right")
    for row in summary:
        table.add_row(
            row["label"],
            f"{float(row['val_loss']):.4f}",
            f"{float(row['seconds_per_step']):.3f}",
            f"{float(row['optimizer_share']):.1%}",
            f"{int(row['tokens_per_second']):,}",
        )
    return table
