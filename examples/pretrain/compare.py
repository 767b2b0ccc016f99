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


def compare(comparison: Comparison, console: Console) -> None:
    """Prints the table."""
    folders = comparison.runs
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
    losses: dict[str, list[float]] = {}
    for folder in folders:
        for row in read_csv(folder / "summary.csv"):
            losses.setdefault(row["optimizer"], []).append(float(row["val_loss"]))
    names = [n for n in OPTIMIZERS if len(losses.get(n, ())) == len(folders)]
    if not names:
        raise UsageError("no optimizer is finished in all of these runs.")
    final = {name: np.array(losses[name]) for name in names}
    count = len(folders)
    table = Table(title=f"Validation loss (nats/{unit}) of {count} runs: mean \\[range]")
    table.add_column("optimizer")
    for title in ("loss", f"minus {OPTIMIZERS[BASELINE].label}", "lower"):
        table.add_column(title, justify="right")
    for name, ours in final.items():
        paired = ("", "")
        if BASELINE in final and name != BASELINE:
            difference = ours - final[BASELINE]
            paired = _spread(difference, "+.4f"), f"{np.sum(difference < 0)} of {count}"
        table.add_row(OPTIMIZERS[name].label, _spread(ours, ".4f"), *paired)
    console.print(table)


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
