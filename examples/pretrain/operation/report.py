"""What a run shows at its end: a table, the metrics of all in one file, reports."""

import csv
import io
import pathlib
from collections.abc import Mapping, Sequence

from rich.table import Table

from examples.pretrain.curves import BASELINE, Curve, as_text, draw
from examples.pretrain.operation.rundir import (
    read_csv,
    read_facts,
    read_result,
    write_atomically,
)
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.output import Output
from examples.report import write_report
from orscale_jax.diagnostics.history import FILE_NAME

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
    told = any(rows[-1].get("val_accuracy") for rows in metrics.values())
    titles = ("optimizer", f"nats/{facts['unit']}", *["accuracy"] * told, "s/step")
    for title in (*titles, "reaches AdamW's loss after"):
        shown.add_column(title, justify="right" if shown.columns else "left")
    curves = {name: Curve.of(rows) for name, rows in metrics.items()}
    baseline = curves.get(BASELINE)
    for name in metrics:
        last = metrics[name][-1]
        loss, accuracy = float(last["val_loss"]), last.get("val_accuracy")
        shown.add_row(
            OPTIMIZERS[name].label,
            f"{loss:.4f}",
            *([f"{float(accuracy):.2%}" if accuracy else ""] if told else []),
            f"{float(last['seconds']) / facts['steps']:.3f}",
            curves[name].reaching(baseline) if baseline and name != BASELINE else "",
        )
    if curves:
        draw(folder / "losses.png", curves, facts["unit"])
        console.print(as_text(curves))
    console.print(shown)
    for name in metrics:
        history = folder / name / FILE_NAME
        read = read_csv(history) if history.exists() else []
        if read and read[-1]["trust_ratio"]:
            page = write_report(folder / name)
            console.print(f"What {OPTIMIZERS[name].label} did: {page}")
