"""The folder of a run: where it may lie, and what is lost or foreign in it."""

import shutil

import pytest

from examples.pretrain.operation.rundir import write_atomically
from tests.examples.pretrain import tiny

OPTIONS = {"optimizer": ("orscale",), "measure_every": 2, "checkpoint_every": 2}
STEPS = tiny.TINY["steps"]


@pytest.fixture
def data(tmp_path):
    return tiny.write_texts(tmp_path / "texts")


@pytest.fixture
def command(tmp_path, data):
    """A finished run, and the command that has made it."""
    out = tmp_path / "run"
    options = tiny.arguments(data, out, **OPTIONS)
    assert tiny.main(options) == 0
    return out, options


def metrics(out):
    rows = tiny.rows(out / "orscale" / "metrics.csv")
    return {int(row["step"]): row | {"seconds": ""} for row in rows}


@pytest.mark.parametrize("name", ["lr[3]", "a*", "what?", "lr[3]/run"])
def test_a_folder_that_orbax_takes_for_a_pattern_is_refused(data, tmp_path, name, capsys):
    out = tmp_path / name
    assert tiny.main(tiny.arguments(data, out)) == 2
    assert f"--out {out}: Orbax takes" in capsys.readouterr().err
    assert not out.exists()


def test_the_folder_of_the_command_counts(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "[a]").mkdir()
    monkeypatch.chdir(tmp_path / "[a]")
    assert tiny.main(tiny.arguments(data, "run")) == 2
    assert "[a]/run for a pattern" in capsys.readouterr().err


@pytest.mark.extended
def test_a_lost_configuration_is_not_guessed(command, capsys):
    out, options = command
    (out / "config.json").rename(out / "aside")
    assert tiny.main(options) == 2
    message = capsys.readouterr().err
    assert f"{out} holds orscale, but no config.json" in message
    assert "Put it back" in message and not (out / "config.json").exists()
    (out / "aside").rename(out / "config.json")
    assert tiny.main(options) == 0


@pytest.mark.extended
@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_result_is_written_again(command, content):
    out, options = command
    path, before = out / "orscale" / "result.json", metrics(out)
    whole = path.read_text()
    path.write_text(content)
    assert tiny.main(options) == 0
    assert path.read_text() == whole and metrics(out) == before


@pytest.mark.extended
def test_lost_rows_are_said(command, capsys):
    """Those at the end of a table, in its middle, and a whole table."""
    out, options = command
    folder, before = out / "orscale", metrics(out)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join([lines[0], lines[1], lines[3]]))
    (folder / "history.csv").unlink()
    assert tiny.main(options) == 0
    said = capsys.readouterr().out
    assert "metrics.csv lacks 2 of 4 steps before the checkpoint" in said
    assert "the first of them step 2." in said
    # Readings are due every three steps, and measurements every two.
    assert "history.csv lacks 3 of 3 steps before the checkpoint" in said
    assert metrics(out) == {step: before[step] for step in (1, 3, 5, 6)}
    # The table at the end leaves out what has not come to its end.
    (folder / "metrics.csv").write_text(lines[0] + lines[1])
    assert tiny.main(options) == 0
    assert "metrics.csv lacks the last step" in capsys.readouterr().out


@pytest.mark.extended
def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_anew(command, capsys):
    out, options = command
    before = metrics(out)
    shutil.rmtree(out / "orscale" / "checkpoints")
    (out / "orscale" / "result.json").unlink()
    assert tiny.main(options) == 0
    said = capsys.readouterr().out
    assert "has no checkpoint any more: OrScale begins anew." in said
    assert metrics(out) == before


# Links, in a folder that another user has prepared.


def test_an_atomic_write_follows_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for link in ("file", "file.tmp"):
        (tmp_path / link).symlink_to(outside)
    write_atomically(tmp_path / "file", "new")
    assert outside.read_text() == "mine"
    assert (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.extended
@pytest.mark.parametrize("name", [".lock", "orscale/metrics.csv", "orscale/history.csv"])
def test_a_link_in_place_of_a_file_is_refused(command, tmp_path, name, capsys):
    out, options = command
    outside = tmp_path / "outside"
    outside.touch()
    (out / "orscale" / "result.json").unlink()
    (out / name).unlink()
    (out / name).symlink_to(outside)
    assert tiny.main(options) == 1
    assert str(out / name) in capsys.readouterr().err
    assert outside.read_text() == ""
    (out / name).unlink()
    assert tiny.main(options) == 0


@pytest.mark.extended
def test_a_table_is_written_over_no_link(command, tmp_path):
    out, options = command
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in ("audit.csv", "result.json"):
        (out / "orscale" / name).unlink()
        (out / "orscale" / name).symlink_to(outside)
    assert tiny.main(options) == 0
    assert outside.read_text() == "mine"
