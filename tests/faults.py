"""Faults that a run of examples.pretrain survives: ``python -m tests.faults``.

``python -m tests.faults disk killed`` tries the cases with these words in their names.

Every case ends in a message and in a folder from which the same command carries on. What
that comes to is, to the bit, what a run comes to that nothing happened to.
"""

import contextlib
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

import numpy as np

import tests.conftest  # noqa: F401  XLA flags that compile fast.
from tests.commands import Failed, Run, check

KILLS = 10
STEPS, HALFWAY, NAN_STEP = 240, 100, 22
PAGE = 4096  # Bytes; files in memory take whole pages.
# What a full disk has left, as a share of what halfway holds; a checkpoint needs more.
ROOM = {"a quarter": 1 / 4, "a sixteenth": 1 / 16, "4 KB": 0.004, "nothing": 0}
MIXTURE = f"""
    --recipe demo-moe --optimizer orscale
    --model.width 16 --model.layers 1 --model.dense-layers 0 --model.heads 2
    --model.kv-rank 8 --model.nope-dim 8 --model.rope-dim 4 --model.value-dim 8
    --model.experts 8 --model.expert-hidden 16
    --steps {STEPS} --seq-len 16 --batch-size 8 --warmup-steps 2
    --log-every 4 --val-every 50 --val-batches 2 --checkpoint-every 9
"""
IMAGES = """
    --recipe demo-vision --optimizer orscale_vision
    --model.widths 2 2 2 2 --steps 40 --batch-size 8 --warmup-steps 2
    --log-every 4 --val-every 20 --val-batches 2 --checkpoint-every 9
"""
ANOTHER_IS_GONE = r"another process has gone|another task died"


class Skipped(Exception):
    """A case that this machine does not allow."""


def killed(whole: Run, seconds_to_start: float, folder: pathlib.Path) -> str:
    """Kills all processes at random moments all along the way."""
    run = whole.at(folder / f"killed.{whole.processes}")
    steps = []
    for kill in range(KILLS):
        with run.start() as processes:
            if kill % 3 == 2:  # While it starts.
                time.sleep(random.uniform(0, seconds_to_start))
            else:
                processes.wait_for_step((kill + random.random()) * STEPS / (KILLS + 1))
                time.sleep(random.uniform(0, 0.1))
            processes.send(signal.SIGKILL)
        steps.append(str(run.steps()))
    run.finish()
    run.equals(whole)
    return "after steps " + " ".join(steps)


def terminated(whole: Run, halfway: Run, folder: pathlib.Path) -> str:
    """Carries on from where a SIGTERM, which one process got, has stopped all."""
    (step,) = set(re.findall(r"OrScale stopped at step (\d+)", halfway.messages()))
    check(halfway.checkpoints()[-1] == halfway.steps() == int(step), "steps are lost")
    run = halfway.copy(folder / f"terminated.{whole.processes}")
    run.finish()
    run.equals(whole)
    return f"stopped at step {step} with a checkpoint"


def corrupted(whole: Run, halfway: Run, folder: pathlib.Path) -> str:
    """Flips bits of the newest checkpoint, in what the last process has written."""
    run = halfway.copy(folder / f"corrupted.{whole.processes}")
    before, newest = run.checkpoints()[-2:]
    written = run.folder / "checkpoints" / str(newest) / "state"
    files = (written / f"ocdbt.process_{whole.processes - 1}" / "d").iterdir()
    for file in files:
        content = bytearray(file.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)
    run.finish()
    check(f"checkpoint of step {newest} is damaged" in run.messages(), "no message")
    check((run.folder / f"damaged_checkpoint_{newest}").is_dir(), "nothing kept")
    run.equals(whole)
    return f"carried on from step {before} instead of {newest}"


def disk_full(
    whole: Run, halfway: Run, folder: pathlib.Path, share: float, later: int
) -> str:
    """Leaves a share of what is there, at the start or some steps later; then all."""
    disk, out = folder / "disk", folder / f"full.{whole.processes}.{share}.{later}"
    with tmpfs(disk):
        shutil.copytree(halfway.out, disk / "run")
        out.symlink_to(disk / "run")  # The logs beside it have another disk.
        run = halfway.at(out)
        used = shutil.disk_usage(disk).used
        filler = disk / "filler"
        if not later:
            fill(filler, int(share * used))
        with run.start() as processes:
            if later:
                processes.wait_for_step(run.steps() + later)
                fill(filler, int(share * used))
            processes.end_with(lambda codes: 1 in codes and 0 not in codes)
        said = run.messages()
        check("No space left on device" in said and str(out) in said, "no message")
        check("Traceback" not in said, "a traceback")
        step = run.checkpoints()[-1]
        check(step >= halfway.checkpoints()[-1], "a checkpoint is lost")
        filler.unlink()
        run.finish()
        run.equals(whole)
    return f"ended by itself, carried on from step {step}"


def read_only(whole: Run, halfway: Run, folder: pathlib.Path) -> str:
    """Makes the disk read-only before the run goes on."""
    disk, out = folder / "disk", folder / f"read_only.{whole.processes}"
    with tmpfs(disk) as mount:
        shutil.copytree(halfway.out, disk / "run")
        out.symlink_to(disk / "run")
        run = halfway.at(out)
        mount("remount,ro")
        with run.start() as processes:
            processes.end_with(lambda codes: 1 in codes and 0 not in codes)
        said = run.messages()
        check("Read-only file system" in said and str(out) in said, "no message")
        check("Traceback" not in said, "a traceback")
        mount("remount,rw")
        run.finish()
        run.equals(whole)
    return "ended by itself, carried on"


def shard_removed(whole: Run, halfway: Run, folder: pathlib.Path) -> str:
    run = halfway.copy(folder / "shard_removed")
    shard = folder / "data" / "train_1.bin"
    aside = shard.rename(folder / "aside.bin")
    with run.start() as processes:
        processes.end_with(lambda codes: codes == [2])
    check("corpus_tokens" in run.messages(), "no message")
    check(run.checkpoints() == halfway.checkpoints(), "checkpoints have changed")
    aside.rename(shard)
    run.finish()
    run.equals(whole)
    return "refused to go on, carried on once it was back"


def nan(folder: pathlib.Path) -> str:
    """Trains on images, since tokens are never NaN."""
    whole = Run(folder / "images", tuple(IMAGES.split()))
    run = whole.at(folder / "nan")
    whole.finish()
    with run.start("tests.poisoned", str(NAN_STEP)) as processes:
        processes.end_with(lambda codes: codes == [1])
    check(f"Step {NAN_STEP}: loss is nan" in run.messages(), "no message")
    step = run.checkpoints()[-1]
    check(step < NAN_STEP, "a checkpoint of NaN")
    run.finish()
    run.equals(whole)
    return f"stopped after step {NAN_STEP}, carried on from step {step}"


def one_killed(whole: Run, halfway: Run, folder: pathlib.Path, index: int) -> str:
    run = halfway.copy(folder / f"one_killed.{index}")
    with run.start() as processes:
        # Not before the first step: then the other one waits for it to start.
        processes.wait_for_step(run.steps() + 1 + random.randrange(STEPS - HALFWAY - 50))
        processes.send(signal.SIGKILL, index)
        killed_at = time.monotonic()
        processes.end_with(lambda codes: codes[1 - index] not in (0, -signal.SIGKILL))
        seconds = time.monotonic() - killed_at
    check(re.search(ANOTHER_IS_GONE, run.messages(1 - index)), "no message")
    run.finish()
    run.equals(whole)
    return f"the other ended by itself after {seconds:.0f} s"


@contextlib.contextmanager
def tmpfs(path: pathlib.Path) -> Iterator[Callable[[str], None]]:
    """A small file system in memory; gives what mounts it with other options."""

    def mount(options: str) -> int:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode

    def again(options: str) -> None:
        check(mount(options) == 0, f"no {options}")

    path.mkdir(exist_ok=True)
    if shutil.which("mount") is None or mount("size=100m"):
        raise Skipped("only root may mount a tmpfs here")
    try:
        yield again
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(file: pathlib.Path, left: int) -> None:
    """Fills the disk of a file, but for some bytes."""
    with open(file, "wb") as filler:
        while (size := shutil.disk_usage(file.parent).free - left) > 0:
            end = filler.seek(0, os.SEEK_END)
            with contextlib.suppress(OSError):  # A run is writing, too.
                os.posix_fallocate(filler.fileno(), end, size + -size % PAGE)


def write_shards(folder: pathlib.Path) -> None:
    """Tokens that depend on the ones before, so that there is something to learn."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("train_0", "train_1", "val"):
        tokens = np.cumsum(rng.integers(1, 4, 6_000)) % 256
        tokens.astype("<u2").tofile(folder / f"{name}.bin")


def all_cases(folder: pathlib.Path) -> Iterator[tuple[str, int, Callable[[], str]]]:
    """The cases: what happens to the processes, how often, and what tries it."""
    write_shards(folder / "data")
    options = (*MIXTURE.split(), "--data", str(folder / "data"))
    meshes = {1: (), 2: ("--mesh.fsdp", "2", "--mesh.expert", "2")}
    for processes, mesh in meshes.items():
        out = folder / f"whole.{processes}"
        whole = Run(out, (*options, *mesh), processes, devices=processes)
        whole.finish()
        halfway = whole.at(folder / f"halfway.{processes}")
        with halfway.start() as running:
            began = time.monotonic()
            running.wait_for_step(1)
            seconds_to_start = time.monotonic() - began
            running.wait_for_step(HALFWAY)
            running.send(signal.SIGTERM, processes - 1)
            running.end_with(lambda codes: set(codes) == {128 + signal.SIGTERM})
        runs = (whole, halfway, folder)
        who = "process" if processes == 1 else "two processes"
        kill = functools.partial(killed, whole, seconds_to_start, folder)
        yield f"{who}, killed", KILLS, kill
        yield f"{who}, SIGTERM to one", 1, functools.partial(terminated, *runs)
        yield f"{who}, checkpoint damaged", 1, functools.partial(corrupted, *runs)
        for left, share in ROOM.items():
            full = functools.partial(disk_full, *runs, share)
            yield f"{who}, disk has {left} left", 1, functools.partial(full, 0)
            yield (
                f"{who}, disk has {left} left later",
                1,
                functools.partial(full, HALFWAY // 5),
            )
        yield f"{who}, disk read-only", 1, functools.partial(read_only, *runs)
        if processes == 1:
            yield f"{who}, shard removed", 1, functools.partial(shard_removed, *runs)
            yield f"{who}, batch of NaN", 1, functools.partial(nan, folder)
        else:
            for index, which in enumerate(("first", "second")):
                one = functools.partial(one_killed, *runs, index)
                yield f"{who}, {which} killed", 1, one


def main(words: list[str]) -> int:
    """Tries the cases and gives the exit code."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    began = time.monotonic()
    survived = tried = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        for case, times, survive in all_cases(folder):
            if words and not any(word in case for word in words):
                continue
            survivors = times
            try:
                said = survive()
            except Skipped as why:
                survivors, times, said = 0, 0, f"skipped: {why}"
            except Failed as why:
                survivors, said = 0, f"FAILED: {why}"
            survived, tried = survived + survivors, tried + times
            print(f"{case:<48} {survivors:>2} of {times:<2}  {said}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{survived} of {tried} survived in {minutes:.0f} min")
    return int(survived < tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
