"""The folder of a run: one process at a time, and one configuration for good."""

import contextlib
import csv
import dataclasses
import fcntl
import glob
import io
import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import orscale_jax
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
    path = str(config.out.absolute())
    if glob.escape(path) != path:
        raise UsageError(
            f"--out {config.out}: Orbax takes {path} for a pattern, and would lose "
            "checkpoints there. Choose a path without [, * and ?."
        )
    facts = config.to_dict() | {"unit": data.unit, **data.facts}
    _refuse_other_processes(facts | {"out": config.out.absolute()})
    if not is_first():
        yield
        return
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"--out {config.out} cannot be a folder: {error}.") from error
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # A link may lead to any file.
    with open(os.open(config.out / ".lock", flags, 0o666), "w") as lock:
        try:
            # The system releases it when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is running in {config.out}.") from None
        _settle(config, facts)
        yield


def read_facts(folder: pathlib.Path) -> dict[str, Any]:
    """The configuration and the data of a run, as its config.json tells them."""
    facts = _read_json(folder / "config.json")
    if facts is None:
        raise UsageError(f"{folder / 'config.json'} is damaged: use another folder.")
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


def read_result(folder: pathlib.Path) -> dict[str, Any] | None:
    """The result of a run with one optimizer, if it is finished."""
    path = folder / "result.json"
    return _read_json(path) if path.exists() else None


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """A dictionary from a file, unless it is damaged."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """The rows of a CSV file, up to its last line end."""
    with open(path, newline="") as file:
        whole, _, _ = file.read().rpartition("\n")
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file that is seen whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # A link may lead to any file.
    with open(temporary, "x", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _refuse_other_processes(facts: dict[str, Any]) -> None:
    """Refuses processes with other options, data or versions than the first one's.

    Where the data lies may differ: what it holds is compared.
    """
    if jax.process_count() == 1:
        return
    versions = {"jax": jax.__version__, "orscale_jax": orscale_jax.__version__}
    facts = facts | versions | {"data": "", "val_data": ""}
    mine = json.dumps(facts, default=str).encode()
    longest = max(multihost_utils.process_allgather(np.array(len(mine))))
    padded = np.frombuffer(mine.ljust(longest), np.uint8)
    first, *others = map(
        json.loads, map(bytes, multihost_utils.process_allgather(padded))
    )
    for index, its in enumerate(others, start=1):
        if names := [name for name in first | its if first.get(name) != its.get(name)]:
            raise UsageError(
                f"process {index} was started in another way than process 0:\n"
                + _listed(names, its, first, "in process 0")
                + "\nStart all of them with the same options and data."
            )


def _listed(names: Iterable[str], there: Any, here: Any, now: str = "now") -> str:
    return "\n".join(
        f"  {name}: {there.get(name)} there, {here.get(name)} {now}" for name in names
    )


def _settle(config: Config, facts: dict[str, Any]) -> None:
    """Writes config.json, or refuses the run if it says something else."""
    path = config.out / "config.json"
    facts = json.loads(json.dumps(facts, default=str))  # As they are read back.
    del facts["out"]  # The file lies there.
    if not path.exists():
        if begun := [name for name in OPTIMIZERS if (config.out / name).exists()]:
            raise UsageError(
                f"{config.out} holds {', '.join(begun)}, but no config.json, which tells "
                "with which options they were begun. Put it back, or pass another --out."
            )
        write_atomically(path, json.dumps(facts, indent=2) + "\n")
        return
    before = read_facts(path.parent)
    # What this program does not know any more decides nothing, and so do hyperparameters
    # that none of the optimizers has.
    known = {n for entry in OPTIMIZERS.values() for n in entry.options}
    taken = {n for o in config.optimizer for n in find_optimizer(o).options}
    idle = {"optimizer", *(known - taken)}
    different = [n for n in facts if n not in idle and before.get(n) != facts[n]]
    if not FREE_OPTIONS.issuperset(different):
        raise UsageError(
            f"{path.parent} holds a run of another configuration:\n"
            + _listed(different, before, facts)
            + "\nPass the same options to carry it on, or another --out to start anew."
        )
