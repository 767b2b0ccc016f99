import pytest

from examples.pretrain.records import CsvLog, read_csv


@pytest.fixture
def log(tmp_path):
    log = CsvLog(tmp_path / "log.csv", ["step", "loss"])
    log.rewind(0)
    log.append({"step": step, "loss": f"{step / 8}"} for step in range(1, 6))
    return log


def test_a_log_goes_back_to_a_step(log, tmp_path):
    assert [row["step"] for row in log.rewind(3)] == ["1", "2", "3"]
    log.append([{"step": 4, "loss": "0.5"}])
    text = (tmp_path / "log.csv").read_text()
    assert text == "step,loss\n1,0.125\n2,0.25\n3,0.375\n4,0.5\n"


@pytest.mark.parametrize("torn", ["6", "6,", "6,0.7", "6,0.75"])
def test_a_torn_line_goes(log, tmp_path, torn):
    path = tmp_path / "log.csv"
    whole = path.read_text()
    with open(path, "a") as file:
        file.write(torn)
    assert len(read_csv(path)) == 5
    log.rewind(6)
    assert path.read_text() == whole


def test_a_new_log_has_a_header(tmp_path):
    assert CsvLog(tmp_path / "new.csv", ["step"]).rewind(7) == []
    assert (tmp_path / "new.csv").read_text() == "step\n"
