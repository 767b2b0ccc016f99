"""What a run shows at its end: tables, CSV files and figures."""

import csv
import io
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from examples import figure_style as style
from examples.figure_style import INK
from examples.pretrain.operation.rundir import read_csv, read_facts, write_atomically
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.tasks import recorded_kind
from examples.report import write_report
from orscale_jax.diagnostics.history import FILE_NAME

# Columns of the table: title, key of the summary, format.
COLUMNS = (("accuracy", "val_accuracy", ".2%"), ("s/step", "seconds_per_step", ".3f"))
BASELINE = "adamw"
MARKERS = {"adamw": "s", "muon_moonlight": "o", "orscale": "^"}

Row = Mapping[str, str]
Curve = tuple[np.ndarray, np.ndarray]  # Steps and values.


def write(folder: pathlib.Path, console: Console) -> None:
    """Reports on all finished optimizers of a run folder."""
    facts = read_facts(folder)
    finished = [n for n in OPTIMIZERS if (folder / n / "result.json").exists()]
    metrics = {name: read_csv(folder / name / "metrics.csv") for name in finished}
    summary = []
    for name, rows in metrics.items():
        result, last = json.loads((folder / name / "result.json").read_text()), rows[-1]
        seconds = float(last["seconds"]) / int(last["step"])
        summary.append(
            {
                "optimizer": name,
                "label": OPTIMIZERS[name].label,
                "val_loss": last["val_loss"],
                "val_accuracy": last.get("val_accuracy", ""),
                "steps": last["step"],
                "parameters": result["parameters"],
                "seconds_per_step": f"{seconds:.5f}",
            }
        )
    every_row = [row for rows in metrics.values() for row in rows]
    _write_csv(folder / "metrics.csv", list(every_row[0]), every_row)
    _write_csv(folder / "summary.csv", list(summary[0]), summary)
    validations = {name: [r for r in metrics[name] if r["val_loss"]] for name in metrics}
    curves: dict[str, Curve] = {
        name: (np.array([int(r["step"]) for r in rows]),
               np.array([float(r["val_loss"]) for r in rows]))
        for name, rows in validations.items()
    }  # fmt: skip
    draw_losses(folder / "losses.png", curves, facts["unit"], run_line(folder))
    console.print(plotted(curves), highlight=False, markup=False)
    table = Table(title="Same initial weights and batches; final validation loss")
    shown = [c for c in COLUMNS if any(row.get(c[1]) for row in summary)]
    reached = {name: reaching(name, curves) for name in finished}
    table.add_column("optimizer", no_wrap=True)
    for title in (f"nats/{facts['unit']}", *(title for title, _, _ in shown)):
        table.add_column(title, justify="right")
    if any(reached.values()):
        table.add_column("reaches AdamW's loss after", justify="right")
    for row in summary:
        cells = [f"{float(row[k]):{form}}" if row.get(k) else "" for _, k, form in shown]
        loss = f"{float(row['val_loss']):.4f}"
        table.add_row(row["label"], loss, *cells, reached[row["optimizer"]])
    console.print(table)
    console.print(f"Figures and CSV files are in {folder}", highlight=False)
    for name in finished:
        history = folder / name / FILE_NAME
        rows = read_csv(history) if history.exists() else []
        if rows and rows[-1]["trust_ratio"]:
            page = write_report(folder / name)
            console.print(f"What {OPTIMIZERS[name].label} did: {page}", highlight=False)


def step_of_reaching(curve: Curve, loss: float) -> float | None:
    """Where a curve first comes down to a loss, by linear interpolation."""
    steps, losses = curve
    reached = np.flatnonzero(losses <= loss)
    if not reached.size:
        return None
    around = slice(max(reached[0] - 1, 0), reached[0] + 1)
    return float(np.interp(-loss, -losses[around], steps[around]))


def reaching(name: str, curves: Mapping[str, Curve]) -> str:
    """In words, when an optimizer reaches AdamW's final loss; nothing for AdamW."""
    if BASELINE not in curves or name == BASELINE:
        return ""
    steps, losses = curves[BASELINE]
    step = step_of_reaching(curves[name], losses[-1])
    return "not reached" if step is None else f"{step:.0f} steps ({step / steps[-1]:.0%})"


def plotted(curves: Mapping[str, Curve], width: int = 60, height: int = 12) -> str:
    """The curves in lines of text, each of a letter; later ones cover earlier ones."""
    steps = np.concatenate([curve[0] for curve in curves.values()])
    losses = np.concatenate([curve[1] for curve in curves.values()])
    low, high = np.nanmin(losses), np.nanmax(losses)
    columns = np.linspace(steps.min(), steps.max(), width)
    cells, names = np.full((height, width), " "), list[str]()
    for letter, (name, curve) in zip(ascii_uppercase, curves.items(), strict=False):
        height_of = (high - np.interp(columns, *curve)) / max(high - low, 1e-9)
        for column, place in enumerate(height_of):
            if np.isfinite(place):
                cells[round(place * (height - 1)), column] = letter
        names.append(f"{letter} {OPTIMIZERS[name].label}")
    edges = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{edges.get(n, ''):>6} |{''.join(row)}" for n, row in enumerate(cells)]
    first, last = f"step {steps.min()}", str(steps.max())
    return "\n".join(
        [
            f"Validation loss: {', '.join(names)}",
            *lines,
            f"{'':7}+{'-' * width}",
            f"{'':8}{first} {last.rjust(width - len(first) - 1)}",
        ]
    )


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
    path: pathlib.Path, curves: Mapping[str, Curve], unit: str, run: str
) -> None:
    """The validation losses of all optimizers, and when they reach AdamW's last one."""
    figure, [[axes]] = style.new_figure(3.7)
    for name, (steps, losses) in curves.items():
        told = reaching(name, curves)
        told = f", AdamW's loss after {told}" if told else ""
        label = f"{OPTIMIZERS[name].label} {losses[-1]:.4f}{told}"
        axes.plot(steps, losses, label=label, **look(name))
    if BASELINE in curves:
        axes.axhline(curves[BASELINE][1][-1], color=INK, lw=1, ls=":")
    axes.set(xlabel="step", ylabel=f"validation loss, nats per {unit}")
    axes.grid(axis="y")
    axes.legend()
    style.set_title(figure, "Validation loss; the dotted line is AdamW's final loss", run)
    style.save(figure, path)
