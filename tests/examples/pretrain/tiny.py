"""Runs that take seconds: a narrow model of one layer on a made-up text."""

import csv
import dataclasses
import functools
import os
import pathlib
import random
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp

from examples.pretrain import __main__ as program
from examples.pretrain.config import Config
from examples.pretrain.meshes import make_mesh
from examples.pretrain.models.dense import DenseConfig
from examples.pretrain.models.moonlight import MoonlightConfig
from examples.pretrain.recipes import DEMOS

ROOT = pathlib.Path(__file__).parents[3]
WORDS = "the model reads a line of text and says which letter comes next".split()
OF_THE_RUN = {field.name for field in dataclasses.fields(Config)}
TINY = {
    "model.width": 16,
    "model.layers": 1,
    "model.heads": 2,
    "seq_len": 16,
    "batch_size": 4,
    "steps": 6,
    "warmup_steps": 2,
    "learning_rate": 0.003,
    "rates": "shared",
    "val_every": 4,
    "val_batches": 2,
    "log_every": 3,
    "measure_every": None,
    "checkpoint_every": 5,
}
# Of "demo-moe", besides.
MIXTURE = {
    "model.layers": 2,
    "model.dense_hidden": 32,
    "model.kv_rank": 8,
    "model.nope_dim": 8,
    "model.rope_dim": 4,
    "model.value_dim": 8,
    "model.experts": 8,
    "model.expert_hidden": 16,
}

# Models of their own.
DENSE = DenseConfig(vocab_size=256, width=64, layers=2, heads=2)
MOONLIGHT = MoonlightConfig(
    vocab_size=256, width=64, layers=3, dense_hidden=256, heads=4, kv_rank=32,
    nope_dim=16, rope_dim=16, value_dim=16, experts=8, experts_per_token=2,
    shared_experts=1, expert_hidden=64,
)  # fmt: skip

STEPS = 120
# Readings, validations and checkpoints at steps that do not coincide.
OPTIONS = {
    "steps": STEPS,
    "log_every": 4,
    "measure_every": 50,
    "val_every": 50,
    "checkpoint_every": 34,
}


def config(demo: str = "demo", **changes) -> Config:
    """A tiny run with other options, by their names: steps=7, **{"model.width": 8}."""
    small = TINY | (MIXTURE if demo == "demo-moe" else {})
    groups = {"": {}, "recipe": {}, "model": {}, "mesh": {}}
    for name, value in (small | changes).items():
        group, _, field = name.rpartition(".")
        if not group and name not in OF_THE_RUN:
            group = "recipe"
        groups[group][field] = value
    parts = {
        group: dataclasses.replace(getattr(DEMOS[demo], group), **values)
        for group, values in groups.items()
        if group
    }
    return dataclasses.replace(DEMOS[demo], **(parts | groups[""]))


def arguments(
    data: pathlib.Path, out: pathlib.Path, demo: str = "demo", **changes
) -> list[str]:
    """The command line of `config(demo, **changes)`."""
    defaults = DEMOS[demo].to_dict()
    options = ["--recipe", demo]
    made = config(demo, **changes, data=(str(data),), out=out)
    for name, value in made.to_dict().items():
        if value == defaults[name]:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            group, dot, last = flag.rpartition(".")
            options.append(f"--{group}{dot}{'' if value else 'no-'}{last}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            options += [f"--{flag}", *map(str, values)]
    return options


def main(options: list[str]) -> int:
    """The command in this process, on one of its devices."""
    on_one = functools.partial(make_mesh, devices=jax.devices()[:1])
    with mock.patch.object(program, "make_mesh", on_one):
        return program.main(options)


@functools.cache
def finished_run(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A finished run of all optimizers with `OPTIONS`: where it lies, and its data."""
    data, out = write_texts(folder / "texts"), folder / "finished"
    assert main(arguments(data, out, **OPTIONS)) == 0
    return out, data


# The command, which waits before it writes the row of a step until a file exists.
HELD = """
import pathlib, sys, time
from examples.pretrain import __main__ as command
from examples.pretrain.operation import run

def held(interval, *rest, check=run.check_finite):
    while interval.step >= {step} and not pathlib.Path({until!r}).exists():
        time.sleep(0.01)
    check(interval, *rest)

run.check_finite = held
sys.exit(command.main())
"""


def start(
    options: list[str], hold: tuple[int, pathlib.Path] | None = None
) -> subprocess.Popen:
    """The command in a process of its own, in which every warning is an error.

    With `hold`, a step and a file, it does not write that step's row before the file
    exists: what a test does to a run in its middle then meets it there on any machine.
    """
    program = ["-m", "examples.pretrain"]
    if hold is not None:
        program = ["-c", HELD.format(step=hold[0], until=str(hold[1]))]
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "error", *program, *options],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | compiled,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_texts(folder: pathlib.Path, files: int = 12, words: int = 200) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    for index in range(files):
        text = " ".join(draw.choice(WORDS) for _ in range(words))
        (folder / f"text{index}.txt").write_text(text)
    return folder


def rows(path: pathlib.Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def last_state(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of the last checkpoint by name, whatever mesh has saved it.

    Args:
      folder: Of the run with one optimizer.
    """
    steps = (folder / "checkpoints").glob("[0-9]*")
    newest = max((p for p in steps if p.name.isdigit()), key=lambda p: int(p.name))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        path = (newest / "state").absolute()
        metadata = reader.metadata(path).item_metadata
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
        state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=plain))
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
