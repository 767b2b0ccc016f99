"""The folder of a run: one process at a time, and one configuration for good."""

import contextlib
import csv
import dataclasses
import fcntl
import io
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from examples.pretrain.config import Config
from examples.pretrain.errors import UsageError
from examples.pretrain.meshes import MeshConfig
from examples.pretrain.operation.processes import is_first
from examples.pretrain.optimizers import OPTIMIZERS, find_optimizer
from examples.pretrain.task import Data
from examples.pretrain.tasks import recorded_kind

# These leave the result as it is, but for rounding: where it goes, which optimizers come
# now (they do not touch each other), on which devices and in which parts a step is
# computed, how often to save, and where the data lies (its fingerprint is compared).
FREE_OPTIONS = frozenset(
    "out optimizer data val_data per_device_batch loss_chunks checkpoint_every keep "
    "sample model.remat".split()
    + [f"mesh.{field.name}" for field in dataclasses.fields(MeshConfig)]
)


@contextlib.contextmanager
def claim(config: Config, data: Data) -> Iterator[None]:
    """Holds the folder for this run, as the home of this configuration.

    Of several processes the first one holds it for all.
    """
    if not is_first():
        yield
        return
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"--out {config.out} cannot be a folder: {error}.") from error
    with open(config.out / ".lock", "w") as lock:
        try:
            # The system releases it when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is running in {config.out}.") from None
        _settle(config.out / "config.json", config, data)
        yield


def read_facts(folder: pathlib.Path) -> dict[str, Any]:
    """The configuration and the data of a run, as its config.json tells them."""
    path = folder / "config.json"
    try:
        facts = json.loads(path.read_text())
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise UsageError(f"{path} is damaged: use another folder.")
    return facts


def run_facts(folder: pathlib.Path) -> dict[str, Any]:
    """The same of the run that a folder with one optimizer belongs to."""
    try:
        facts = read_facts(folder.absolute().parent)
    except (FileNotFoundError, NotADirectoryError):
        facts = {}
    if "unit" not in facts:
        raise UsageError(
            f"{folder} is not the folder of a run with one optimizer, such as "
            "runs/demo/orscale: the folder above it has no config.json of a run."
        )
    return facts


def saved_config(folder: pathlib.Path) -> Config:
    """The run with one optimizer that a folder holds."""
    facts = run_facts(folder) | {"optimizer": folder.name}
    kind = recorded_kind(facts)

    def filled(cls: type, prefix: str = "") -> Any:
        """A dataclass with those of the facts that it has; JSON's lists are tuples."""
        names = [f.name for f in dataclasses.fields(cls) if f"{prefix}{f.name}" in facts]
        values = {name: facts[f"{prefix}{name}"] for name in names}
        lists = {n: tuple(v) for n, v in values.items() if isinstance(v, list)}
        return cls(**(values | lists))

    return Config(
        recipe=filled(kind.recipe),
        model=filled(kind.model, "model."),
        optimizer=(folder.name,),
        out=pathlib.Path(),
        loss_chunks=facts["loss_chunks"],
    )


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file, up to its last line end."""
    with open(path, newline="") as file:
        whole, _, _ = file.read().rpartition("\n")
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file that is seen whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _settle(path: pathlib.Path, config: Config, data: Data) -> None:
    """Writes config.json, or refuses the run if it says something else."""
    facts = config.to_dict() | {"unit": data.unit, **data.facts}
    del facts["out"]  # The file lies there.
    facts = json.loads(json.dumps(facts, default=str))  # As they are read back.
    if not path.exists():
        write_atomically(path, json.dumps(facts, indent=2) + "\n")
        return
    before = read_facts(path.parent)
    # What this program does not know any more decides nothing, and so do hyperparameters
    # that none of the optimizers has.
    known = {n for entry in OPTIMIZERS.values() for n in entry.options}
    taken = {n for o in config.optimizer for n in find_optimizer(o).options}
    idle = {"optimizer", *(known - taken)}
    different = {
        name: (before.get(name), now)
        for name, now in facts.items()
        if name not in idle and before.get(name) != now
    }
    if different.keys() - FREE_OPTIONS:
        raise UsageError(
            f"{path.parent} holds a run of another configuration:\n"
            + "\n".join(
                f"  {name}: {there} there, {now} now"
                for name, (there, now) in different.items()
            )
            + "\nPass the same options to carry it on, or another --out to start anew."
        )
