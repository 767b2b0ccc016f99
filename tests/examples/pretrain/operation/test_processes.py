"""Clusters, signals and files that fail: one message, the same result, an end for all."""

import errno
import functools
import io
import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import types

import jax
import numpy as np
import pytest

from examples.pretrain.errors import AGAIN, RunError, UsageError
from examples.pretrain.operation import logs, processes, run, rundir
from examples.pretrain.operation.processes import (
    Stopped,
    StopSignal,
    join_cluster,
    leaving_in_time,
    others_are_gone,
    why_not_written,
    writing,
)
from examples.pretrain.output import Output
from orscale_jax.diagnostics.history import StepFile
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
    for either in (one, two):
        either.finish()
        rows = tiny.rows(either.folder / "metrics.csv")
        losses = [float(row["train_loss"]) for row in rows]
        results.append((losses, tiny.last_state(either.folder)))
    (losses, state), (expected_losses, expected_state) = results
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert state.keys() == expected_state.keys()

    def assert_same(found):
        for name, expected in expected_state.items():
            atol = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(found[name], expected, atol=atol, err_msg=name)

    assert_same(state)
    result = json.loads((two.folder / "result.json").read_text())
    assert result["devices"] == "8 × cpu"
    assert two.messages(1).count("tokens/s") == 0  # The first one speaks for all.
    # One process carries on from the middle of what two have done.
    alone = commands.Run(tmp_path / "two", tuple(arguments))
    (alone.folder / "result.json").unlink()
    shutil.rmtree(alone.folder / "checkpoints" / "10")
    alone.finish()
    assert_same(tiny.last_state(alone.folder))


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
    assert others_are_gone(ValueError("Gloo: connection closed by peer"))


# Processes that are not alike


@pytest.fixture
def claim_in_all(monkeypatch):
    """Claims a run in threads that stand for processes; what each of them raises."""

    def claim_in_all(*runs):
        there = threading.Barrier(len(runs), timeout=60)
        given = [np.zeros(0)] * len(runs)

        def gather(x):
            given[int(threading.current_thread().name)] = x
            there.wait()
            gathered = np.stack(given)
            there.wait()
            return gathered

        def claim_one(config, facts):
            try:
                data = types.SimpleNamespace(unit="byte", facts=facts)
                with rundir.claim(config, data):
                    raised.append("")
            except UsageError as error:
                raised.append(str(error))

        raised = []
        monkeypatch.setattr(jax, "process_count", lambda: len(runs))
        monkeypatch.setattr(rundir.multihost_utils, "process_allgather", gather)
        monkeypatch.setattr(
            rundir, "is_first", lambda: threading.current_thread().name == "0"
        )
        threads = [
            threading.Thread(target=claim_one, args=run, name=str(index))
            for index, run in enumerate(runs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised

    return claim_in_all


def test_all_processes_have_to_be_started_alike(tmp_path, claim_in_all):
    """All of them end, with the same message, and nothing is written."""
    config, facts = tiny.config(out=tmp_path / "run", data=("a",)), {"sha256": "ab"}
    others = {
        "learning_rate": (tiny.config(out=config.out, learning_rate=0.01), facts),
        "checkpoint_every": (tiny.config(out=config.out, checkpoint_every=3), facts),
        "optimizer": (tiny.config(out=config.out, optimizer=("adamw",)), facts),
        "out": (tiny.config(out=tmp_path / "there"), facts),
        "sha256": (config, {"sha256": "cd and longer"}),
    }
    for name, other in others.items():
        raised = claim_in_all((config, facts), (config, facts), other)
        assert len(raised) == 3 and len(set(raised)) == 1
        assert "process 2 was started in another way" in raised[0]
        assert f"  {name}: " in raised[0] and raised[0].count(" in process 0") == 1
    assert not config.out.exists()
    elsewhere = tiny.config(out=config.out, data=("b",))
    assert claim_in_all((config, facts), (elsewhere, facts)) == ["", ""]


# Signals


def send(signum):
    os.kill(os.getpid(), signum)


SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@pytest.mark.parametrize("signum", SIGNALS)
def test_the_first_signal_is_answered_at_once_and_a_second_one_acts_as_ever(
    signum, capfd
):
    before = [signal.getsignal(s) for s in SIGNALS]
    with StopSignal() as stop:
        stop.check("Not yet")
        send(signum)
        said = capfd.readouterr().err
        assert f"{signum.name} received: the run stops with a checkpoint" in said
        assert stop.noted and stop.requested(step=1)
        with pytest.raises(Stopped, match="After 1") as stopped:
            stop.check("After 1")
        assert stopped.value.signum == signum
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        send(signal.SIGHUP)  # A closed terminal may send two.
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert not capfd.readouterr().err
    assert [signal.getsignal(s) for s in SIGNALS] == before


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As nohup does.
    with StopSignal() as stop:
        send(signal.SIGHUP)
        assert not stop.noted
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", SIGNALS[:2])
def test_of_several_processes_jax_is_told(signum, monkeypatch, capfd):
    """By a SIGTERM. All of them stop once JAX says so, and none before."""
    told = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        processes.multihost_utils, "reached_preemption_sync_point", lambda _: bool(told)
    )
    before = signal.signal(signal.SIGTERM, lambda *_: told.append(signal.SIGTERM))
    with StopSignal() as stop:
        assert not stop.requested(1)
        send(signum)
        assert told == [signal.SIGTERM] and not stop.noted
        assert stop.requested(2) and stop.noted
    signal.signal(signal.SIGTERM, before)
    assert f"{signum.name} received" in capfd.readouterr().err


# What is printed


def test_names_are_printed_as_they_are():
    printed = io.StringIO()
    output = Output(file=printed, width=100)
    output.print("b[bold]c [/red] :smile:")
    output.rule("runs/[/red]")
    assert "b[bold]c [/red] :smile:" in printed.getvalue()
    assert "runs/[/red]" in printed.getvalue()


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_when_nobody_reads_the_output_the_run_goes_on(code, capfd, monkeypatch):
    class Closed(io.StringIO):
        def write(self, _):
            raise OSError(code, os.strerror(code))

    given_up = []
    monkeypatch.setattr(os, "dup2", lambda _, descriptor: given_up.append(descriptor))
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(fileno=lambda: 1))
    output = Output(file=Closed())
    for _ in range(2):
        output.print("Step 1")
    assert set(given_up) == {1}
    assert capfd.readouterr().err.count("The run goes on without it") == 1


@pytest.mark.extended
def test_a_signal_during_a_measurement(tmp_path, monkeypatch, capfd):
    """The measurement is completed, and the run stops after the step that follows."""
    measure = logs.diagnostics.measure

    def interrupted(*given, **options):
        send(signal.SIGTERM)
        return measure(*given, **options)

    monkeypatch.setattr(logs.diagnostics, "measure", interrupted)
    options = {"optimizer": ("muon",), "measure_every": 3, "steps": 9}
    data, out = tiny.write_texts(tmp_path / "texts"), tmp_path / "run"
    code = tiny.main(tiny.arguments(data, out, **options))
    assert code == 128 + signal.SIGTERM
    received, stopped = capfd.readouterr().err.strip().splitlines()
    assert received.startswith("SIGTERM received")
    assert stopped.startswith("muon stopped at step 4.")
    folder = out / "muon"
    assert {row["step"] for row in tiny.rows(folder / "history.csv")} == {"3"}
    assert (folder / "checkpoints" / "4").is_dir()


# Files that cannot be written

CODES = ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "EFBIG"]
FULL = pathlib.Path("/dev/full")  # Linux's file that never takes a byte.
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def plain(error):
    raise error


def caused(error):
    raise RuntimeError("saving failed") from error


def in_context(error):
    try:
        raise error
    finally:
        raise ValueError("while cleaning up")


def in_a_group(error):
    raise ExceptionGroup("threads", [KeyError("x"), ExceptionGroup("one", [error])])


def quoted(error):
    """A cause quoted as by TensorStore, in the middle of a long text."""
    raise ValueError(f"UNKNOWN: Failed [os_error_code='{error.errno}'] [spec='{{}}']")


@pytest.mark.parametrize("how", [plain, caused, in_context, in_a_group, quoted])
def test_the_cause_is_found(how):
    for code in (getattr(errno, name) for name in CODES):
        with pytest.raises(RunError) as caught, writing("runs/a"):
            how(OSError(code, os.strerror(code)))
        first = f"runs/a cannot be written to: {os.strerror(code)}."
        assert str(caught.value).splitlines() == [first, AGAIN]


def test_the_file_is_named():
    error = PermissionError(errno.EACCES, "denied", "runs/a/metrics.csv")
    assert why_not_written(error) == "Permission denied: runs/a/metrics.csv"


@pytest.mark.parametrize(
    "error", [KeyError("a bug"), FileNotFoundError(errno.ENOENT, "gone"), RunError("so")]
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, writing("runs/a"):
        raise error
    assert caught.value is error


def test_the_command_ends_with_one_message(tmp_path, monkeypatch, capsys):
    def make_trainer(*_, **__):
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(run, "make_trainer", make_trainer)
    data, out = tiny.write_texts(tmp_path / "texts"), tmp_path / "run"
    assert tiny.main(tiny.arguments(data, out)) == 1
    assert capsys.readouterr().err == (
        f"error: {out} cannot be written to: No space left on device.\n"
        "Rerun the same command to resume from the last checkpoint.\n"
    )


@needs_full
def test_a_row_that_has_no_room_is_an_error(tmp_path):
    (tmp_path / "metrics.csv").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left"):
        StepFile(tmp_path / "metrics.csv", ["step"])


@pytest.mark.extended
def test_each_file_of_a_run_in_turn_has_no_room(tmp_path, capsys, monkeypatch):
    """The command says so, and carries on once there is room."""
    data, out = tiny.write_texts(tmp_path / "texts"), tmp_path / "run"
    options = tiny.arguments(data, out, optimizer=("orscale",))
    fsync = os.fsync

    def full(name, descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(out / name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    names = "config.json.tmp orscale/history.csv orscale/audit.csv.tmp "
    names += "orscale/metrics.csv orscale/result.json.tmp metrics.csv.tmp"
    for name in names.split():
        monkeypatch.setattr(os, "fsync", functools.partial(full, name))
        assert tiny.main(options) == 1, name
        error = capsys.readouterr().err
        assert error.startswith(f"error: {out} cannot be written to: No space"), error
    monkeypatch.undo()
    assert tiny.main(options) == 0
    assert len(tiny.rows(out / "orscale" / "metrics.csv")) == tiny.TINY["steps"]
