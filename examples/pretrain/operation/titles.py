"""What a figure says of the runs that it shows."""

import pathlib
from collections.abc import Sequence

from examples.pretrain.kinds import recorded_kind
from examples.pretrain.operation.records import read_csv
from examples.pretrain.operation.rundir import read_facts


def run_line(folders: Sequence[pathlib.Path]) -> str:
    """Model, learning rate and seeds of finished runs that differ in their seed alone."""
    facts = [read_facts(folder) for folder in folders]
    parameters = int(read_csv(folders[0] / "summary.csv")[0]["parameters"])
    seeds = ", ".join(str(other["seed"]) for other in facts)
    return (
        f"{recorded_kind(facts[0]).label}, {parameters:,} parameters; "
        f"learning rate {facts[0]['learning_rate']:g}; "
        f"seed{'s' if len(facts) > 1 else ''} {seeds}"
    )
