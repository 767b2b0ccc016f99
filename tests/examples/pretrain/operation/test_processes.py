"""Several processes: one command, the same result, and an end for all."""

import json
import os
import shutil
import sys
import threading

import jax
import numpy as np
import pytest

from examples.pretrain.operation import processes
from examples.pretrain.operation.processes import (
    join_cluster,
    leaving_in_time,
    others_are_gone,
)
from tests import commands
from tests.examples.pretrain import tiny


@pytest.mark.slow
def test_two_processes_come_to_what_one_device_comes_to(tmp_path):
    """A mixture on 2 processes × 4 devices, data 2 × expert 4, after 10 steps."""
    data = tiny.write_texts(tmp_path / "texts")
    options = {"optimizer": ("orscale",), "steps": 10, "batch_size": 8}
    arguments = tiny.arguments(data, tmp_path, "demo-moe", **options)
    one = commands.Run(tmp_path / "one", tuple(arguments))
    mesh = ("--mesh.data", "2", "--mesh.expert", "4")
    two = commands.Run(tmp_path / "two", (*arguments, *mesh), processes=2, devices=4)
    results = []
    for run in (one, two):
        run.finish()
        losses = [
            float(row["train_loss"]) for row in tiny.rows(run.folder / "metrics.csv")
        ]
        results.append((losses, tiny.last_state(run.folder)))
    (losses, state), (expected_losses, expected_state) = results
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert state.keys() == expected_state.keys()
    for name, expected in expected_state.items():
        largest = np.abs(expected).max()
        atol = 1e-5 * largest
        np.testing.assert_allclose(state[name], expected, atol=atol, err_msg=name)
    result = json.loads((two.folder / "result.json").read_text())
    assert result["devices"] == "8 × cpu"
    assert two.messages(1).count("tokens/s") == 0  # The first one speaks for all.
    # One process carries on from the middle of what two have done.
    alone = commands.Run(tmp_path / "two", tuple(arguments))
    (alone.folder / "result.json").unlink()
    shutil.rmtree(alone.folder / "checkpoints" / "10")
    alone.finish()
    for name, value in tiny.last_state(alone.folder).items():
        atol = 1e-5 * np.abs(expected_state[name]).max()
        np.testing.assert_allclose(value, expected_state[name], atol=atol, err_msg=name)


@pytest.fixture
def timers(monkeypatch):
    """Those that end the process, instead of ending it."""
    started = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: started.append(timer))
    return started


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.fixture
def in_cluster(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)


@pytest.mark.usefixtures("in_cluster")
@pytest.mark.parametrize(("error", "code"), [(SystemExit(143), 143), (ValueError(), 1)])
def test_a_process_that_fails_waits_for_the_others_for_seconds(
    error, code, timers, ended
):
    with pytest.raises(type(error)), leaving_in_time():
        raise error
    [timer] = timers
    timer.function()
    assert timer.interval == processes.PATIENCE and ended == [code]


def test_the_others_have_to_start_in_time(monkeypatch, timers, ended, capsys):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: timers[0].function())
    join_cluster()
    [timer] = timers
    assert timer.interval == processes.JOINING and ended == [1]
    assert "not all processes have come within 240 s" in capsys.readouterr().err
    assert timer.finished.is_set()  # Cancelled: those that came may take their time.


@pytest.mark.usefixtures("in_cluster")
def test_a_process_that_succeeds_waits_for_the_others(timers):
    with pytest.raises(SystemExit), leaving_in_time():
        sys.exit(0)
    assert timers == []


def test_a_single_process_ends_as_it_always_does(timers):
    with pytest.raises(ValueError, match="as always"), leaving_in_time():
        raise ValueError("as always")
    assert timers == []


def test_whose_fault_an_error_is(monkeypatch):
    of_jax, of_python = jax.errors.JaxRuntimeError("Gloo"), ValueError("here")
    assert not others_are_gone(of_jax) and not others_are_gone(of_python)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert others_are_gone(of_jax) and not others_are_gone(of_python)
