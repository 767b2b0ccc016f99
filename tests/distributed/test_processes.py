"""A run on two processes, against one device; carried on in one process."""

import functools
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from examples.benchmarks import hlo_cost
from tests import processes
from tests.processes import COMPARED, END, SAVED
from tests.runs import assert_close

ROOT = pathlib.Path(__file__).parents[2]


def run_on_processes(folder, kind):
    """Run until all have exited, one has failed, or the time is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "error", "-m", "tests.processes", folder]
    logs = [folder / f"log.{index}" for index in range(processes.PROCESSES)]
    started, codes = [], [None]
    try:
        for index, log in enumerate(logs):
            arguments = map(str, [*command, port, index, kind.name])
            with log.open("w") as file:
                process = subprocess.Popen(
                    [*arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
                )
            started.append(process)
        deadline = time.monotonic() + processes.TIMEOUT
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.1)
            codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
    output = [f"process {i}:\n{log.read_text()}" for i, log in enumerate(logs)]
    assert not any(codes) and None not in codes, "\n".join([str(codes), *output])


@functools.cache
def on_one_device():
    """The measurements after each step of an uninterrupted run."""
    shardings = processes.placed("1")
    program, run = processes.compiled(shardings), processes.start(shardings)
    seen = [fetched(run)]
    for step in range(1, END + 1):
        run = processes.advance(program, run, [step])
        seen.append(fetched(run))
    return seen


def fetched(run):
    return jax.tree.map(np.array, processes.measured(run))


def received_by_a_device(folder, layout):
    """Bytes of a step from the other process, on the device that receives most."""
    text, other = [(folder / f"{layout}.{index}").read_text() for index in range(2)]
    assert text == other
    process_of = {device: device // processes.DEVICES for device in range(8)}
    return max(hlo_cost.crossings(text, process_of).received.values())


def of_matrices():
    """The bytes of all matrices."""
    return sum(
        4 * np.prod(processes.SHAPES[name])
        for name, numbers in processes.NUMBERS.items()
        if numbers is not None
    )


@pytest.mark.compiled
@pytest.mark.extended
@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)]
)
def test_a_run_on_two_processes_goes_on_in_one(kind, tmp_path):
    """One test, because the run on the processes takes most of its time."""
    run_on_processes(tmp_path, kind)
    programs = [path.read_text() for path in tmp_path.glob("program.*")]
    assert len(programs) == 2 and programs[0] == programs[1]
    # There and back, two shapes together; the experts stay where they are.
    assert programs[0].count(" all-to-all(") == 2
    audited = {path.read_text() for path in tmp_path.glob("audited.*")}
    assert len(audited) == 1 and "all_to_all" in audited.pop()
    seen = {step: dict(np.load(tmp_path / f"{step}.npz")) for step in (SAVED, COMPARED)}
    for step, found in seen.items():
        assert_close(found, on_one_device()[step])

    for layout in ("within", "across"):
        assert_close(dict(np.load(tmp_path / f"{layout}.npz")), on_one_device()[COMPARED])
    # Sums of norms alone; and of each device's shards there and back, at most all.
    assert received_by_a_device(tmp_path, "within") < 500
    assert received_by_a_device(tmp_path, "across") < of_matrices() * 2 / 8

    saved = {k: c for k, c in seen[SAVED].items() if k.startswith("calibration")}
    assert [name for name, c in saved.items() if (c == 0).all()] == ["calibration/late"]
    for layout in ("2x2", "4", "1"):
        shardings = processes.placed(layout, kind)
        run = processes.restore(tmp_path / "checkpoint", shardings)
        abstract = processes.abstract_run(shardings)
        for leaf, expected in zip(*map(jax.tree.leaves, (run, abstract)), strict=True):
            assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
        for name, value in seen[SAVED].items():
            np.testing.assert_array_equal(processes.measured(run)[name], value, name)
        program = processes.compiled(shardings)
        run = processes.advance(program, run, range(SAVED + 1, END + 1))
        assert_close(fetched(run), on_one_device()[END])
        for name, c in saved.items():
            if name != "calibration/late":
                np.testing.assert_array_equal(processes.measured(run)[name], c, name)
