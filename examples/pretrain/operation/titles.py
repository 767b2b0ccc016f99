"""What a figure says of the runs that it shows."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from examples.pretrain.operation.records import read_csv
from examples.pretrain.operation.rundir import read_facts


def run_line(folders: Sequence[pathlib.Path]) -> str:
    """Model, learning rate and seeds of finished runs that differ in their seed alone."""
    facts = [read_facts(folder) for folder in folders]
    parameters = int(read_csv(folders[0] / "summary.csv")[0]["parameters"])
    seeds = ", ".join(str(other["seed"]) for other in facts)
    return (
        f"{model_name(facts[0])}, {parameters:,} parameters; "
        f"learning rate {facts[0]['learning_rate']:g}; "
        f"seed{'s' if len(facts) > 1 else ''} {seeds}"
    )


def model_name(facts: Mapping[str, Any]) -> str:
    """The model of a config.json in words."""
    if "model.widths" in facts:
        return "DavidNet"
    if any(name.startswith("model.") and "experts" in name for name in facts):
        return "Mixture of experts"
    return "Decoder"
