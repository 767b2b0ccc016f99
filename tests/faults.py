"""Faults that a run of examples.pretrain survives: ``python -m tests.faults``.

``python -m tests.faults disk killed`` tries the faults with these words in their names.

A fault ends in a message, and in a folder from which the same command carries on: what
that comes to is, to the bit, what a run comes to that nothing happened to. Or the run is
refused before its first step. Faults come at a step, at which the processes wait for
them, and never after a time.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

import tests.conftest  # noqa: F401  XLA flags that compile fast.
from tests.commands import Failed, Run, check

HALFWAY, LATER = 24, 40  # Steps, of 60.
PAGE = 4096  # Bytes; files in memory take whole pages.
OPTIONS = """
    --recipe demo --optimizer orscale --rates shared --steps 60
    --model.width 16 --model.layers 1 --model.heads 2 --seq-len 16 --batch-size 4
    --warmup-steps 2 --log-every 4 --measure-every 16 --val-every 20 --val-batches 2
    --checkpoint-every 9
"""
MESHES = {1: (), 2: ("--mesh.fsdp", "2")}
ANOTHER_IS_GONE = r"another process has gone|another task died"
NAMES = "d[/red] [bold]e :smile:"  # Two folders, whose names are markup and a pattern.


class Skipped(Exception):
    """A fault that this machine does not allow."""


class Trial(NamedTuple):
    """A run that was stopped halfway, and the same without a fault."""

    run: Run
    whole: Run
    data: pathlib.Path


# A fault gives the run that was carried on, or None if it was refused.
Fault = Callable[[Trial], Run | None]


def killed(trial: Trial) -> Run:
    """As it resumes, at a step, and in the middle of a checkpoint's write."""
    run = trial.run
    with run.start() as processes:
        processes.wait(lambda: "resumes from" in run.messages(), "it resumes")
        processes.send(signal.SIGKILL)
    with run.hold(LATER) as processes:
        processes.send(signal.SIGKILL)
    with run.start("tests.faulty", "kill", str(LATER)) as processes:
        processes.end_with(lambda codes: 0 not in codes)
    run.finish()
    return run


def stopped(trial: Trial, signum: int, *indices: int) -> Run:
    """By a signal to some processes, or to all."""
    run = trial.run
    with run.hold(LATER) as processes:
        processes.send(signum, *indices)
        run.go_on()
        expected = 128 + (signum if run.processes == 1 else signal.SIGTERM)
        processes.end_with(lambda codes: set(codes) == {expected})
    (step,) = set(re.findall(r"OrScale stopped at step (\d+)", run.messages()))
    check(run.checkpoints()[-1] == run.steps() == int(step), "steps are lost")
    run.finish()
    return run


def one_killed(trial: Trial, index: int) -> Run:
    run = trial.run
    with run.hold(LATER) as processes:
        processes.send(signal.SIGKILL, index)
        run.go_on()
        processes.end_with(lambda codes: codes[1 - index] not in (0, -signal.SIGKILL))
    check(re.search(ANOTHER_IS_GONE, run.messages(1 - index)), "no message")
    run.finish()
    return run


def flip_bits(run: Run) -> None:
    """In the newest checkpoint, of what the last process has written."""
    written = run.folder / "checkpoints" / str(run.checkpoints()[-1]) / "state"
    for file in (written / f"ocdbt.process_{run.processes - 1}" / "d").iterdir():
        content = bytearray(file.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)


def replace_position(run: Run) -> None:
    newest = run.folder / "checkpoints" / str(run.checkpoints()[-1])
    (newest / "position" / "metadata").write_text("7")


def flip_bits_on_another_disk(run: Run) -> None:
    checkpoints, memory = run.folder / "checkpoints", pathlib.Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == run.folder.stat().st_dev:
        raise Skipped("there is no other disk")
    there = pathlib.Path(tempfile.mkdtemp(dir=memory)) / "checkpoints"
    shutil.move(checkpoints, there)
    checkpoints.symlink_to(there)
    flip_bits(run)


def copy_under_another_number(run: Run) -> None:
    newest = run.folder / "checkpoints" / str(run.checkpoints()[-1])
    shutil.copytree(newest, newest.with_name(str(run.checkpoints()[-1] + 1)))


def damaged(trial: Trial, damage: Callable[[Run], None]) -> Run:
    """The newest checkpoint is put aside, within the folder of the checkpoints."""
    run = trial.run
    damage(run)
    newest = run.checkpoints()[-1]
    run.finish()
    check(f"checkpoint of step {newest} is damaged" in run.messages(), "no message")
    aside = run.folder / "checkpoints" / f"damaged_checkpoint_{newest}"
    check(aside.is_dir(), "nothing kept")
    return run


def spoiled(trial: Trial) -> Run:
    """A weight is NaN as a checkpoint is due."""
    run = trial.run
    with run.start("tests.faulty", "spoil", str(LATER)) as processes:
        processes.end_with(lambda codes: set(codes) == {1})
    check("is not finite, so the state is not saved" in run.messages(), "no message")
    check(f"from step {run.checkpoints()[-1]}" in run.messages(), "another step is named")
    run.finish()
    return run


def disk_full(trial: Trial, share: float, later: bool = False) -> Run:
    """Leaves a share of what is there, at the start or some steps later; then all."""
    with disk_of(trial.run) as (run, disk, _):
        used, filler = shutil.disk_usage(disk).used, disk / "filler"
        if not later:
            fill(filler, int(share * used))
        with run.hold(LATER) if later else run.start() as processes:
            if later:
                fill(filler, int(share * used))
                run.go_on()
            processes.end_with(lambda codes: 1 in codes and 0 not in codes)
        says(run, "No space left on device")
        filler.unlink()
        return carried_on(run, trial.run)


def read_only(trial: Trial) -> Run:
    with disk_of(trial.run) as (run, _, mount):
        mount("remount,ro")
        with run.start() as processes:
            processes.end_with(lambda codes: 1 in codes and 0 not in codes)
        says(run, "Read-only file system")
        mount("remount,rw")
        return carried_on(run, trial.run)


@contextlib.contextmanager
def disk_of(run: Run) -> Iterator[tuple[Run, pathlib.Path, Callable[[str], None]]]:
    """A copy of a run on a small disk in memory, the disk, and what mounts it anew."""
    out = run.out.with_name(f"{run.out.name}.link")
    disk = run.out.with_name(f"{run.out.name}.disk")

    def mount(options: str) -> int:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode

    disk.mkdir()
    if shutil.which("mount") is None or mount("size=100m"):
        raise Skipped("only root may mount a disk here")
    try:
        shutil.copytree(run.out, disk / "run")
        out.symlink_to(disk / "run")  # What it says, beside it, has another disk.
        yield run.at(out), disk, lambda options: check(mount(options) == 0, "no mount")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(file: pathlib.Path, left: int) -> None:
    """Fills the disk of a file, but for some bytes."""
    with open(file, "wb") as filler:
        while (size := shutil.disk_usage(file.parent).free - left) > 0:
            end = filler.seek(0, os.SEEK_END)
            with contextlib.suppress(OSError):  # A run is writing, too.
                os.posix_fallocate(filler.fileno(), end, size + -size % PAGE)


def says(run: Run, reason: str) -> None:
    said = run.messages()
    check(reason in said and str(run.out) in said, "no message")
    check("Traceback" not in said, "a traceback")


def carried_on(run: Run, there: Run) -> Run:
    """Finishes a run, and copies it from the disk that goes away."""
    run.finish()
    return run.copy(there.out.with_name(f"{there.out.name}.finished"))


def refused(run: Run, reason: str, of_last: tuple[str, ...] = (), code: int = 2) -> None:
    """The command ends before the first step, and changes nothing."""
    before = run.checkpoints(), run.steps()
    with run.start(of_last=of_last) as processes:
        processes.end_with(lambda codes: set(codes) == {code})
    check(reason in run.messages(), f"no message:\n{run.messages()}")
    check((run.checkpoints(), run.steps()) == before, "the run has changed")


def other_process(trial: Trial, name: str, *option: str) -> None:
    """Only the last process has other options."""
    if name == "corpus_sha256":
        other = write_shards(trial.run.out.with_name("other_data"), seed=1)
        option = ("--data", str(other))
    refused(trial.run, f"  {name}: ", of_last=option)


def with_data(run: Run, data: pathlib.Path) -> Run:
    """The same command with data from another folder."""
    options = [*run.options]
    options[options.index("--data") + 1] = str(data)
    return dataclasses.replace(run, options=tuple(options))


def data_removed(trial: Trial) -> Run:
    data = shutil.copytree(trial.data, trial.run.out.with_name("part_of_data"))
    (data / "train_1.bin").unlink()
    refused(with_data(trial.run, data), "corpus_tokens")
    trial.run.finish()
    return trial.run


def data_changed(trial: Trial, change: Callable[[pathlib.Path], object]) -> Run:
    """While the run is in the middle, in a shard that it reads."""
    data = shutil.copytree(trial.data, trial.run.out.with_name(f"{trial.run.out.name}.d"))
    run = with_data(trial.run, data)
    with run.hold(LATER) as processes:
        change(data / "train_0.bin")
        run.go_on()
        processes.end_with(lambda codes: 1 in codes and 0 not in codes)
    check("train_0.bin has changed" in run.messages(), "no message")
    trial.run.finish()
    return trial.run


def rewrite(shard: pathlib.Path) -> None:
    content = shard.read_bytes()
    with open(shard, "r+b") as file:
        file.write(content[::-1])


def wide_integers(trial: Trial) -> None:
    data = write_shards(trial.run.out.with_name("wide"), dtype="<i4")
    refused(with_data(trial.run, data), "write its tokens as uint16")


def brackets(trial: Trial) -> None:
    refused(trial.run.at(trial.run.out.with_name("lr[3]")), "Choose a path without [")


def markup(trial: Trial) -> Run:
    data = shutil.copytree(trial.data, trial.run.out.parent / NAMES)
    run = with_data(trial.run, data)
    run.finish()
    check(str(data) in run.messages(), "the name is shown as another one")
    return run


def pipe_closed(trial: Trial) -> Run:
    run = trial.run
    with run.start(piped=True) as processes:
        processes.read_a_line()
        processes.end_with(lambda codes: set(codes) == {0})
    check("The run goes on without it" in run.messages(), "no message")
    return run


def tables_lost(trial: Trial) -> Run:
    run = trial.run
    (run.folder / "history.csv").unlink()
    table = run.folder / "metrics.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:9]))
    run.finish()
    for name in ("metrics.csv", "history.csv"):
        check(re.search(rf"{name} lacks \d+ of \d+ steps", run.messages()), "no message")
    return dataclasses.replace(run, tables=False)


def configuration_lost(trial: Trial) -> Run:
    run, config = trial.run, trial.run.out / "config.json"
    aside = config.rename(config.with_name("aside"))
    refused(run, "but no config.json")
    aside.rename(config)
    run.finish()
    return run


def link(trial: Trial) -> Run:
    """The folder was prepared by another, to overwrite a file outside."""
    run, outside = trial.run, trial.run.out.with_name("outside")
    outside.write_text("mine")
    lock = run.out / ".lock"
    lock.unlink()
    lock.symlink_to(outside)
    refused(run, ".lock", code=1)
    check(outside.read_text() == "mine", "a file outside is overwritten")
    lock.unlink()
    run.finish()
    return run


def write_shards(folder: pathlib.Path, seed: int = 0, dtype: str = "<u2") -> pathlib.Path:
    """Tokens that depend on the ones before, so that there is something to learn."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for name in ("train_0", "train_1", "val"):
        tokens = np.cumsum(rng.integers(1, 4, 6_000)) % 256
        tokens.astype(dtype).tofile(folder / f"{name}.bin")
    return folder


BOTH, ONE, TWO = (1, 2), (1,), (2,)
FAULTS: dict[str, tuple[tuple[int, ...], Fault]] = {
    "killed three times": (BOTH, killed),
    "the first of two killed": (TWO, functools.partial(one_killed, index=0)),
    "the second of two killed": (TWO, functools.partial(one_killed, index=1)),
    "SIGTERM to one process": (BOTH, lambda t: stopped(t, signal.SIGTERM, 0)),
    "Ctrl-C": (BOTH, lambda t: stopped(t, signal.SIGINT)),
    "terminal closed (SIGHUP)": (ONE, lambda t: stopped(t, signal.SIGHUP)),
    "output closed (a pipe)": (ONE, pipe_closed),
    "checkpoint: flipped bits": (BOTH, lambda t: damaged(t, flip_bits)),
    "checkpoint: position of another shape": (
        BOTH, lambda t: damaged(t, replace_position)),
    "checkpoint: copied under another number": (
        BOTH, lambda t: damaged(t, copy_under_another_number)),
    "checkpoint: flipped bits, on another disk": (
        ONE, lambda t: damaged(t, flip_bits_on_another_disk)),
    "checkpoint: a weight is NaN": (BOTH, spoiled),
    "disk has nothing left": (ONE, lambda t: disk_full(t, 0)),
    "disk has a sixteenth left": (ONE, lambda t: disk_full(t, 1 / 16)),
    # Of several processes, some wait for Orbax's barriers until it gives up (300 s).
    "disk has nothing left later": (ONE, lambda t: disk_full(t, 0, later=True)),
    "disk is read-only": (ONE, read_only),
    "data: a shard is removed": (ONE, data_removed),
    "data: a shard is rewritten while it is used": (
        BOTH, lambda t: data_changed(t, rewrite)),
    "data: a shard is cut off while it is used": (
        ONE, lambda t: data_changed(t, lambda shard: os.truncate(shard, 64))),
    "data: shards of int32": (BOTH, wide_integers),
    "data: another in the second process": (
        TWO, lambda t: other_process(t, "corpus_sha256")),
    "another learning rate in the second process": (
        TWO, lambda t: other_process(t, "learning_rate", "--learning-rate", "0.5")),
    "folder with brackets": (BOTH, brackets),
    "names that are markup": (ONE, markup),
    "folder: tables lost": (ONE, tables_lost),
    "folder: configuration lost": (ONE, configuration_lost),
    "folder: a link in place of a file": (ONE, link),
}  # fmt: skip


def stopped_halfway(whole: Run, out: pathlib.Path) -> Run:
    halfway = whole.at(out)
    with halfway.hold(HALFWAY) as processes:
        processes.send(signal.SIGTERM, whole.processes - 1)
        halfway.go_on()
        processes.end_with(lambda codes: set(codes) == {128 + signal.SIGTERM})
    return halfway


def main(words: list[str]) -> int:
    """Tries the faults, prints a table of them, and gives the exit code."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Under nohup, the runs would ignore it as well.
    signal.signal(signal.SIGHUP, lambda *_: None)
    began, wrong = time.monotonic(), 0
    table = dict[str, tuple[list[str], list[str], list[str]]]()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        data = write_shards(folder / "data")
        for processes, mesh in MESHES.items():
            chosen = {
                fault: tried
                for fault, (numbers, tried) in FAULTS.items()
                if processes in numbers and (not words or any(w in fault for w in words))
            }
            if not chosen:
                continue
            options = (*OPTIONS.split(), "--data", str(data), *mesh)
            whole = Run(folder / f"whole.{processes}", options, processes)
            whole.finish()
            halfway = stopped_halfway(whole, folder / f"halfway.{processes}")
            for number, (fault, tried) in enumerate(chosen.items()):
                out = folder / f"{processes}.{number}" / "run"
                out.parent.mkdir()
                survived, same, why = "no", "no", ""
                try:
                    run = tried(Trial(halfway.copy(out), whole, data))
                    survived, same = "yes", "refused"
                    if run is not None:
                        same = "no"
                        run.equals(whole)
                        same = "yes"
                except Skipped as reason:
                    survived, same, why = "skipped", "skipped", str(reason)
                except Failed as reason:
                    wrong, why = wrong + 1, str(reason)
                print(f"{processes} | {fault} | {survived} | {same} | {why}", flush=True)
                cells = table.setdefault(fault, ([], [], []))
                for cell, text in zip(
                    cells, (str(processes), survived, same), strict=True
                ):
                    cell.append(text)
    print("\n| Fault | Processes | Survived | Same to the bit |\n|---|---|---|---|")
    for fault, cells in table.items():
        row = [fault, ", ".join(cells[0])]
        row += [", ".join(dict.fromkeys(cell)) for cell in cells[1:]]
        print(f"| {' | '.join(row)} |")
    minutes = (time.monotonic() - began) / 60
    tried_now = sum(len(cells[0]) for cells in table.values())
    print(f"\n{tried_now - wrong} of {tried_now} as they should be, in {minutes:.1f} min")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
