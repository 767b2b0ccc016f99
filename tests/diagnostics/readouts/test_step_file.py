"""A file that grows by steps, whatever is left of it after a kill."""

import pytest

from orscale_jax.diagnostics.readouts.step_file import StepFile


@pytest.fixture
def log(tmp_path):
    log = StepFile(tmp_path / "log.csv", ["optimizer", "step", "loss"])
    log.append(("orscale", str(step), f"{step / 8}") for step in range(1, 6))
    return log


def test_a_file_goes_back_to_a_step(log):
    log.rewind(3)
    assert log.steps == [1, 2, 3]
    log.append([("muon", "4", "0.5")])
    assert log.steps == [1, 2, 3, 4]
    assert log.path.read_text().splitlines() == [
        "optimizer,step,loss",
        "orscale,1,0.125",
        "orscale,2,0.25",
        "orscale,3,0.375",
        "muon,4,0.5",
    ]
    log.rewind(0)
    assert log.path.read_text() == "optimizer,step,loss\n"


@pytest.mark.parametrize("torn", ["o", "orscale,6", "orscale,6,0.7", "orscale,6,0.75"])
def test_a_torn_line_goes(log, torn):
    whole = log.path.read_text()
    log.path.write_text(whole + torn)
    again = StepFile(log.path, log.columns)
    assert again.steps == [1, 2, 3, 4, 5] and log.path.read_text() == whole


def test_a_torn_step_goes(tmp_path):
    path = tmp_path / "loads.csv"
    rows = [(str(step), str(expert)) for step in (5, 10) for expert in range(3)]
    StepFile(path, ["step", "expert"]).append(rows[:-1])
    assert StepFile(path, ["step", "expert"]).steps == [5]


@pytest.mark.parametrize("torn", ["", "s", "step"])
def test_a_torn_header_is_written_again(tmp_path, torn):
    path = tmp_path / "new.csv"
    path.write_text(torn)
    assert StepFile(path, ["step"]).steps == []
    assert path.read_text() == "step\n"


def test_other_columns_are_refused(log):
    with pytest.raises(ValueError, match="has the columns optimizer, step, loss, and th"):
        StepFile(log.path, ["step", "loss"])
