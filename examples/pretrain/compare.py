"""Several finished runs, of different seeds, side by side.

python -m examples.pretrain.compare runs/seed0 runs/seed1 runs/seed2
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from examples import figure_style as style
from examples.pretrain.errors import UsageError, exit_code_of
from examples.pretrain.operation import report
from examples.pretrain.operation.rundir import (
    FREE_OPTIONS,
    differences,
    read_csv,
    read_facts,
)
from examples.pretrain.optimizers import OPTIMIZERS

BASELINE = "muon_moonlight"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compare finished runs that differ in nothing but their seed."""

    runs: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    """Folders of the runs."""

    out: pathlib.Path = pathlib.Path("runs/compare.png")
    """The figure to write."""


def compare(comparison: Comparison, console: Console) -> None:
    """Prints the table and draws the figure."""
    folders, out = comparison.runs, comparison.out
    if out.suffix != ".png":
        raise UsageError(f"--out {out} is no file name that ends in .png.")
    if not folders:
        raise UsageError("name the folders of finished runs.")
    for folder in folders:
        if not (folder / "summary.csv").exists():
            raise UsageError(f"{folder} holds no finished run: finish it first.")
    facts = [read_facts(folder) for folder in folders]
    for folder, other in zip(folders, facts, strict=True):
        different = differences(facts[0], other)
        if different.keys() - FREE_OPTIONS - {"seed"}:
            raise UsageError(
                f"{folders[0]} and {folder} differ in more than their seed:\n"
                + "\n".join(f"  {n}: {a} and {b}" for n, (a, b) in different.items())
            )
    if len({other["seed"] for other in facts}) < len(facts):
        raise UsageError("two of these runs have the same seed: leave one out.")
    unit = facts[0]["unit"]
    curves: dict[str, list[report.Curve]] = {}
    for folder in folders:
        by_name: dict[str, list[dict[str, str]]] = {}
        for row in read_csv(folder / "metrics.csv"):
            by_name.setdefault(row["optimizer"], []).append(row)
        for name, rows in by_name.items():
            curves.setdefault(name, []).append(report.curve(rows, "val_loss"))
    curves = {n: curves[n] for n in OPTIMIZERS if len(curves.get(n, ())) == len(folders)}
    if not curves:
        raise UsageError("no optimizer is finished in all of these runs.")
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_seeds(out, curves, unit, report.run_line(folders))
    count = len(folders)
    table = Table(title=f"Validation loss (nats/{unit}) of {count} runs: mean \\[range]")
    table.add_column("optimizer")
    for title in ("loss", f"minus {OPTIMIZERS[BASELINE].label}", "lower"):
        table.add_column(title, justify="right")
    final = {name: np.array([y[-1] for _, y in curves[name]]) for name in curves}
    for name, losses in final.items():
        paired = ("", "")
        if BASELINE in final and name != BASELINE:
            difference = losses - final[BASELINE]
            paired = _spread(difference, "+.4f"), f"{np.sum(difference < 0)} of {count}"
        table.add_row(OPTIMIZERS[name].label, _spread(losses, ".4f"), *paired)
    console.print(table)
    console.print(f"The curves are in {out}", highlight=False)


@style.styled
def draw_seeds(
    path: pathlib.Path, val: Mapping[str, Sequence[report.Curve]], unit: str, run: str
) -> None:
    """Validation loss of several runs of each optimizer, and its difference from one's.

    The difference is taken seed by seed: thin lines; the thick one is their mean. The
    runs are in the same order for each, and their curves have the same steps.
    """
    subtracted = BASELINE if BASELINE in val else next(iter(val))
    figure, (losses, apart) = report.two_panels(f"validation loss (nats per {unit})")
    texts = {subtracted: ""}
    for name, curves in val.items():
        values = np.array([y for _, y in curves])
        difference = values - np.array([y for _, y in val[subtracted]])
        panels = [(losses, values)]
        if name != subtracted:
            panels.append((apart, difference))
            texts[name] = f"{difference[:, -1].mean():+.4f}".replace("-", "−")
        for axes, lines in panels:
            shown = report.look(name)
            for line in lines:
                axes.plot(curves[0][0], line, color=shown["color"], lw=0.8, alpha=0.6)
            axes.plot(curves[0][0], lines.mean(0), **shown)
    label = OPTIMIZERS[subtracted].label
    apart.axhline(0, color=report.look(subtracted)["color"], lw=1.8)
    losses.set_title("Mean of the seeds (thick) and each seed")
    apart.set_title(f"Minus {label}'s, seed by seed")
    apart.set_ylabel(f"difference (nats per {unit})")
    report.add_names(figure, {name: texts[name] for name in val})
    title = "Validation loss; below, the mean difference at the end"
    style.set_title(figure, title, run)
    style.save(figure, path)


def _spread(values: np.ndarray, form: str) -> str:
    return f"{values.mean():{form}} \\[{values.min():{form}},{values.max():{form}}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    prog = "python -m examples.pretrain.compare"
    return exit_code_of(
        lambda: compare(tyro.cli(Comparison, args=arguments, prog=prog), Console())
    )


if __name__ == "__main__":
    sys.exit(main())
