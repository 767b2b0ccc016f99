"""Which optimizer is better? A row of the leaderboard, on the cores of this machine.

    python -m examples.track0 MODULE:FACTORY [--name NAME]   # a row: within an hour
    python -m examples.track0                                # the table of all rows

A row that was killed continues where it was.
"""

import argparse
import math
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

from examples.pretrain.errors import UsageError
from examples.track0.entries import ENTRIES
from examples.track0.factories import check, find_factory
from examples.track0.losses import Losses
from examples.track0.prose import write_prose
from examples.track0.row import (
    GUESS,
    SEARCH_SEEDS,
    Cell,
    fresh_seeds,
    make_row,
    stored_row,
)
from examples.track0.runs import Rates, Run
from examples.track0.table import STORED, Entry, markdown, stored_entries
from examples.track0.workers import workers
from examples.track0.workloads import WORKLOADS, shortened

REFERENCE = ENTRIES["muon"]
NEAR = 0.001  # Nats: a stored loss of the reference that is as near stands for ours.


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m examples.track0", description=__doc__)
    parser.add_argument("entry", nargs="?", metavar="MODULE:FACTORY")
    parser.add_argument("--name", help="of the row; without it, FACTORY")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/track0"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    around = "rates of the matrices and of the rest, to search around"
    parser.add_argument(
        "--guess", type=float, nargs=2, default=GUESS, metavar="RATE", help=around
    )
    smoke = "one text, 300 steps, four seeds: minutes, and no verdict"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    given = parser.parse_args(arguments)
    if given.entry is None:
        print(markdown(stored_entries()))
        return
    name = given.name or given.entry.rpartition(":")[2]
    if not re.fullmatch(r"[\w-]+", name):
        parser.error(f"--name {name}: a name has letters, digits, - and _ only.")
    if ENTRIES.get(name, given.entry) != given.entry:
        parser.error(f"{name} is the name of {ENTRIES[name]}: pass another --name.")
    if given.processes < 1 or not all(0 < rate < math.inf for rate in given.guess):
        parser.error("--processes and both rates of --guess have to be above 0.")
    check(find_factory(given.entry), given.entry)
    workloads, folder = WORKLOADS, given.out
    seeds: Sequence[int] = SEARCH_SEEDS
    if given.smoke:
        workloads = {"code": shortened(WORKLOADS["code"], 300, 4)}
        folder, seeds = folder / "smoke", seeds[:1]
    else:
        write_prose()

    def row(entry: str, path: pathlib.Path, guess: Rates) -> Mapping[str, Cell]:
        # A search takes some seven points.
        expected = sum(7 * len(seeds) + w.seeds for w in workloads.values())
        with workers(entry, workloads, path, expected, given.processes) as runs:
            return make_row(workloads, runs, guess, seeds)

    # The reference first: a file of it that other code has made is refused at once.
    stored, here = STORED / "muon.csv", folder / "reference.csv"
    theirs: Mapping[str, Cell] = {}
    if given.entry != REFERENCE and (given.smoke or not stored.exists()):
        theirs = row(REFERENCE, here, GUESS)
    elif given.entry != REFERENCE:
        theirs = reference_here(stored, here, given.processes)
    ours = row(given.entry, folder / f"{name}.csv", Rates(*given.guess))
    theirs = theirs or ours
    others = {} if given.smoke else stored_entries()
    both = {"muon": Entry(REFERENCE, theirs), name: Entry(given.entry, ours)}
    print(markdown(others | both))
    first = next(iter(workloads))
    times = ours[first].seconds / theirs[first].seconds
    print(f"A step on {first} took {times:.2f} times the CPU time of a step of muon.")


def reference_here(
    stored: pathlib.Path, here: pathlib.Path, processes: int
) -> Mapping[str, Cell]:
    """The stored row of the reference, if this machine gives the same losses.

    Two seeds of each workload are run again. Where one of them differs by more than
    `NEAR`, all seeds are.
    """
    known, found = stored_row(Losses(stored)), {}
    with workers(REFERENCE, WORKLOADS, here, 2 * len(known), processes) as runs:
        for name, cell in known.items():
            seeds = fresh_seeds(WORKLOADS[name])
            [first] = runs(name, [cell.rates], seeds[:2])
            pairs = zip(first, cell.runs, strict=False)
            if any(abs(run.loss - other.loss) > NEAR for run, other in pairs):
                [all_here] = runs(name, [cell.rates], seeds)
                found[name] = Cell(cell.rates, all_here)
            else:
                seconds = min(run.seconds for run in first)
                timed = [Run(run.losses, seconds) for run in cell.runs]
                found[name] = Cell(cell.rates, timed)
    return found


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped. The same command continues.")
