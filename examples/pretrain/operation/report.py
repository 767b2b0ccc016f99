"""What a run shows at its end: a table, the metrics of all in one file, reports."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from examples.pretrain.errors import Output
from examples.pretrain.operation.rundir import (
    read_csv,
    read_facts,
    read_result,
    write_atomically,
)
from examples.pretrain.optimizers import OPTIMIZERS
from orscale_jax.diagnostics.history import FILE_NAME
from orscale_jax.diagnostics.report import write_report

BASELINE = "adamw"
Rows = Sequence[Mapping[str, str]]


def write(folder: pathlib.Path, console: Output) -> None:
    """Compares the finished optimizers of a run folder."""
    facts, metrics = read_facts(folder), dict[str, Rows]()
    for name in (n for n in OPTIMIZERS if read_result(folder / n) is not None):
        table = folder / name / "metrics.csv"
        rows = read_csv(table) if table.exists() else []
        if rows and int(rows[-1]["step"]) == facts["steps"]:
            metrics[name] = rows
        else:
            console.print(f"{table} lacks the last step, and is left out.")
    text = io.StringIO(newline="")
    every_row = [row for rows in metrics.values() for row in rows]
    columns = list(every_row[0]) if every_row else []
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(every_row)
    write_atomically(folder / "metrics.csv", text.getvalue())
    shown = Table(title="Same initial weights and batches; final validation loss")
    titles = ("optimizer", f"nats/{facts['unit']}", "accuracy", "s/step")
    for title in (*titles, "reaches AdamW's loss after"):
        shown.add_column(title, justify="right" if shown.columns else "left")
    for name in metrics:
        last = metrics[name][-1]
        loss, accuracy = float(last["val_loss"]), last.get("val_accuracy")
        shown.add_row(
            OPTIMIZERS[name].label,
            f"{loss:.4f}",
            f"{float(accuracy):.2%}" if accuracy else "",
            f"{float(last['seconds']) / facts['steps']:.3f}",
            "" if name == BASELINE else reaching(metrics[name], metrics.get(BASELINE)),
        )
    console.print(shown)
    for name in metrics:
        history = folder / name / FILE_NAME
        read = read_csv(history) if history.exists() else []
        if read and read[-1]["trust_ratio"]:
            page = write_report(folder / name)
            console.print(f"What {OPTIMIZERS[name].label} did: {page}")


def reaching(rows: Rows, of_baseline: Rows | None) -> str:
    """In words, when an optimizer first comes down to AdamW's final loss, if it does."""
    if of_baseline is None:
        return ""
    validated = [row for row in rows if row["val_loss"]]
    losses = np.array([float(row["val_loss"]) for row in validated])
    steps = np.array([int(row["step"]) for row in validated])
    loss = float(of_baseline[-1]["val_loss"])
    reached = np.flatnonzero(losses <= loss)
    if not reached.size:
        return "not reached"
    around = slice(max(reached[0] - 1, 0), reached[0] + 1)
    step = np.interp(-loss, -losses[around], steps[around])
    return f"{step:.0f} steps ({step / steps[-1]:.0%})"
