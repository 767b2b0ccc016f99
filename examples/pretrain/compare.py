"""Several finished runs, of different seeds, side by side.

python -m examples.pretrain.compare runs/seed0 runs/seed1 runs/seed2
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from examples.pretrain.errors import UsageError, exit_code_of
from examples.pretrain.operation import plots
from examples.pretrain.operation.records import read_csv
from examples.pretrain.operation.report import curve, run_line
from examples.pretrain.operation.rundir import FREE_OPTIONS, differences, read_facts
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
    unit = _check(folders)
    curves: dict[str, list[plots.Curve]] = {}
    for folder in folders:
        by_name: dict[str, list[dict[str, str]]] = {}
        for row in read_csv(folder / "metrics.csv"):
            by_name.setdefault(row["optimizer"], []).append(row)
        for name, rows in by_name.items():
            curves.setdefault(name, []).append(curve(rows, "val_loss"))
    curves = {n: curves[n] for n in OPTIMIZERS if len(curves.get(n, ())) == len(folders)}
    if not curves:
        raise UsageError("no optimizer is finished in all of these runs.")
    out.parent.mkdir(parents=True, exist_ok=True)
    plots.draw_seeds(out, curves, unit, BASELINE, run_line(folders))
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


def _check(folders: Sequence[pathlib.Path]) -> str:
    """Refuses runs that do not go together; gives their unit."""
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
    return facts[0]["unit"]


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
