"""Whatever cannot be written, one message names the folder and the cause."""

import errno
import io
import os
import pathlib
import warnings

import pytest
from rich.console import Console

from examples.pretrain.errors import AGAIN, RunError
from examples.pretrain.operation import run
from examples.pretrain.operation.processes import (
    why_not_written,
    without_cache,
    writing,
)
from examples.pretrain.operation.records import TensorBoard
from orscale_jax.diagnostics.history import StepFile
from tests.examples.pretrain import tiny

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
@pytest.mark.parametrize("code", CODES)
def test_the_cause_is_found(code, how):
    code = getattr(errno, code)
    with pytest.raises(RunError) as caught, writing("runs/a"):
        how(OSError(code, os.strerror(code)))
    first, again = str(caught.value).splitlines()
    assert first == f"runs/a cannot be written to: {os.strerror(code)}."
    assert again == AGAIN


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


@pytest.mark.parametrize("code", ["ENOSPC", "EACCES"])
def test_the_command_ends_with_one_message(code, tmp_path, monkeypatch, capsys):
    def make_trainer(*_, **__):
        raise OSError(getattr(errno, code), "")

    monkeypatch.setattr(run, "make_trainer", make_trainer)
    data, out = tiny.write_texts(tmp_path / "texts"), tmp_path / "run"
    assert tiny.main(tiny.arguments(data, out)) == 1
    assert capsys.readouterr().err == (
        f"error: {out} cannot be written to: {os.strerror(getattr(errno, code))}.\n"
        "Rerun the same command to resume from the last checkpoint.\n"
    )


@needs_full
def test_a_row_that_has_no_room_is_an_error(tmp_path):
    (tmp_path / "metrics.csv").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left"):
        StepFile(tmp_path / "metrics.csv", ["step"])


@needs_full
def test_a_scalar_for_tensorboard_that_has_no_room_is_an_error(tmp_path, monkeypatch):
    """And nothing waits for the thread that could not write it."""
    with TensorBoard(tmp_path) as board:
        pass
    with FULL.open("wb", buffering=0) as full:
        monkeypatch.setattr(board._writer._py_recordio_writer, "_writer", full)
        with pytest.raises(OSError, match="No space left"):
            board.write(1, {"loss": 2.5})


@pytest.mark.extended
@needs_full
def test_each_file_of_a_run_in_turn_has_no_room(tmp_path, capsys):
    """The command says so, and carries on once there is room."""
    data, out = tiny.write_texts(tmp_path / "texts"), tmp_path / "run"
    options = tiny.arguments(data, out, optimizer=("orscale",))
    mine = out / "orscale"
    mine.mkdir(parents=True)
    for file in (
        out / "config.json.tmp",
        mine / "history.csv",
        mine / "audit.csv",
        mine / "metrics.csv",
        mine / "result.json.tmp",
        out / "summary.csv.tmp",
        out / "losses.png",
        mine / "report" / "report.html",
    ):
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        file.symlink_to(FULL)
        assert tiny.main(options) == 1, file
        error = capsys.readouterr().err
        assert error.startswith(f"error: {out} cannot be written to: No space"), error
        file.unlink()
    assert tiny.main(options) == 0
    assert len(tiny.rows(mine / "metrics.csv")) == tiny.TINY["steps"]


def test_a_cache_that_cannot_be_written_is_named_once():
    said = io.StringIO()
    cause = "OSError: [Errno 28] No space left on device"
    with warnings.catch_warnings(), without_cache(Console(file=said, width=999)):
        warnings.simplefilter("always")
        for name in ("jit_step", "jit_init"):
            text = (
                f"Error writing persistent compilation cache entry for '{name}': {cause}"
            )
            warnings.warn(text, stacklevel=1)
    assert said.getvalue().count(cause) == 1
    assert said.getvalue().startswith("The compilation cache in /")


def test_other_warnings_are_shown():
    quiet = Console(file=io.StringIO())
    with pytest.warns(UserWarning, match="another"), without_cache(quiet):
        warnings.warn("another", stacklevel=1)
