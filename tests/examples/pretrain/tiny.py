"""Runs that take seconds: a narrow model of one layer on a made-up text."""

import csv
import dataclasses
import functools
import os
import pathlib
import random
import subprocess
import sys

from examples.pretrain.__main__ import main
from examples.pretrain.config import Config

ROOT = pathlib.Path(__file__).parents[3]
WORDS = "the model reads a line of text and says which letter comes next".split()
TINY = Config(
    width=16,
    layers=1,
    heads=2,
    seq_len=16,
    batch_size=4,
    steps=6,
    warmup_steps=2,
    learning_rate=0.003,
    val_every=4,
    val_batches=2,
    log_every=3,
    checkpoint_every=5,
)


STEPS = 120
# Readings, validations and checkpoints at steps that do not coincide.
OPTIONS = {
    "steps": STEPS,
    "log_every": 4,
    "measure_every": 50,
    "val_every": 50,
    "checkpoint_every": 17,
}


def config(**changes) -> Config:
    return dataclasses.replace(TINY, **changes)


def arguments(data: pathlib.Path, out: pathlib.Path, **changes) -> list[str]:
    """The command line of `config(**changes)`."""
    options = []
    values = dataclasses.asdict(config(**changes, data=(str(data),), out=out))
    for name, value in values.items():
        if value not in (None, ()):
            options.append("--" + name.replace("_", "-"))
            options += map(str, value if isinstance(value, tuple) else (value,))
    return options


@functools.cache
def finished_run(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A finished run of all arms with `OPTIONS`: where it lies, and its data."""
    data, out = write_texts(folder / "texts"), folder / "finished"
    assert main(arguments(data, out, **OPTIONS)) == 0
    return out, data


def start(options: list[str]) -> subprocess.Popen:
    """The command in a process of its own, in which every warning is an error."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "examples.pretrain", *options],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
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
