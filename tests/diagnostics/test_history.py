"""The file of a run: what is in it, and what is left of it after a kill."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest

from examples.report import read_rows
from orscale_jax import muon, orscale
from orscale_jax.diagnostics import History, Reading, read, tabulate
from orscale_jax.diagnostics.history import StepFile

PARAMS = {"up": jnp.ones((2, 8)), "experts": jnp.arange(24.0).reshape(2, 3, 4)}
NUMBERS = {"up": optax.contrib.MuonDimensionNumbers(0, 1)} | {
    "experts": optax.contrib.MuonDimensionNumbers(1, 2)
}
CLASSES = {"up": "mlp up", "experts": "routed expert up"}


@functools.cache
def reading(step=1, names=tuple(PARAMS), build=orscale):
    params, numbers = ({k: tree[k] for k in names} for tree in (PARAMS, NUMBERS))
    optimizer = build(1e-3, weight_dimension_numbers=numbers)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(step):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    return read(state, params, numbers, learning_rate=1e-3)


def written(path, steps=(1, 2, 3), **arguments):
    history = History(path, classes=CLASSES, scalars=["loss"], **arguments)
    for step in steps:
        history.append(step, reading(step), loss=1 / step)
    return history


def test_a_name_of_two_lines_is_written_in_one(tmp_path):
    params = {"a\nb": jnp.eye(3), "c": jnp.eye(3)}
    of_two = read(orscale(1e-3).init(params), params)
    for step in (1, 2):
        History(tmp_path / "history.csv").append(step, of_two)
    frame = read_rows(tmp_path / "history.csv")
    assert frame.matrix.tolist() == [r"a\nb", "c"] * 2


@pytest.mark.extended
def test_pandas_reads_what_was_written(tmp_path):
    history = written(tmp_path / "run" / "history.csv")
    frame = read_rows(history.path)
    first = ["step", "matrix", "class"]
    assert [*frame.columns] == [*first, *Reading._fields, "loss"]
    assert frame.step.tolist() == [1] * 3 + [2] * 3 + [3] * 3
    for step, rows in frame.groupby("step"):
        table = tabulate(reading(step), CLASSES)
        assert rows.matrix.tolist() == ["experts[0]", "experts[1]", "up"]
        assert rows["class"].tolist() == table["class"].tolist()
        for field in Reading._fields:
            np.testing.assert_allclose(rows[field], table[field], rtol=1e-6)
        assert rows.loss.tolist() == pytest.approx([1 / step] * 3)
    pandas.testing.assert_frame_equal(pandas.read_csv(history.path), frame)


def test_measurements_at_their_steps_and_what_does_not_exist_is_empty(tmp_path):
    history = History(tmp_path / "history.csv", measurements=["signal"], scalars=["loss"])
    history.append(1, reading(), {"signal": reading().growth})
    history.append(2, reading(build=muon))
    frame = read_rows(history.path)
    assert frame.signal.notna().tolist() == [True] * 3 + [False] * 3
    assert frame.loss.isna().all() and frame.trust_ratio[3:].isna().all()
    assert frame.weight_norm.notna().all()


@pytest.mark.parametrize("bytes_lost", [1, 30, 150, 300])
def test_a_torn_step_is_dropped_and_written_again(tmp_path, bytes_lost):
    path = tmp_path / "history.csv"
    whole = written(path).path.read_bytes()
    last = len(written(tmp_path / "two.csv", (1, 2)).path.read_bytes())
    assert len(whole) - bytes_lost > last  # The third step is torn, not the second.
    path.write_bytes(whole[:-bytes_lost])
    history = History(path, classes=CLASSES, scalars=["loss"])
    assert history.last_step == 2
    history.append(3, reading(3), loss=1 / 3)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_torn_first_step_gives_way_to_the_next(tmp_path, lines):
    path = tmp_path / "history.csv"
    whole = written(path, (1,)).path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[: 1 + lines]) + "1,exp")
    history = written(path, (2,))
    assert read_rows(history.path).step.tolist() == [2] * 3


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    path = tmp_path / "history.csv"
    whole = written(path).path.read_bytes()
    history = History(path, classes=CLASSES, scalars=["loss"])
    history.rewind(1)
    assert history.last_step == 1
    for step in (2, 3):
        history.append(step, reading(step), loss=1 / step)
    assert path.read_bytes() == whole
    history.rewind(0)
    assert history.last_step is None and len(path.read_text().splitlines()) == 1


class TestErrors:
    """Inputs that are refused, and what the messages say."""

    def test_other_columns(self, tmp_path):
        path = written(tmp_path / "history.csv").path
        with pytest.raises(ValueError, match="the same measurements and scalars"):
            History(path, scalars=["loss", "val_loss"])
        (tmp_path / "other.csv").write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match="has the columns a, b, and this run has st"):
            History(tmp_path / "other.csv")

    @pytest.mark.parametrize("step", [2.0, "7", True, np.float32(4), None])
    def test_a_step_is_a_whole_number(self, tmp_path, step):
        with pytest.raises(ValueError, match=r"^step=.*pass a whole number"):
            History(tmp_path / "history.csv").append(step, reading())

    @pytest.mark.parametrize("value", ["a\n7,b", None, 1j, jnp.ones(3)])
    def test_a_scalar_is_a_real_number(self, tmp_path, value):
        history = written(tmp_path / "history.csv")
        before = history.path.read_bytes()
        with pytest.raises(ValueError, match=r"^loss=.*pass a real number"):
            history.append(4, reading(), loss=value)
        assert history.path.read_bytes() == before

    @pytest.mark.parametrize(
        "columns, message",
        [
            ({"scalars": "loss"}, "pass a sequence of names"),
            ({"measurements": "signal"}, "pass a sequence of names"),
            ({"scalars": ["growth"]}, "give each column a different name"),
            ({"scalars": ["loss", "reading"]}, "none of append's arguments"),
        ],
    )
    def test_columns(self, tmp_path, columns, message):
        with pytest.raises(ValueError, match=message):
            History(tmp_path / "history.csv", **columns)

    def test_names(self, tmp_path):
        history = written(tmp_path / "history.csv")
        with pytest.raises(ValueError, match=r"\['accuracy'\] are no columns"):
            history.append(4, reading(), accuracy=1.0)
        with pytest.raises(ValueError, match=r"\['signal'\] are no columns"):
            history.append(4, reading(), {"signal": reading().growth})

    def test_steps_and_matrices(self, tmp_path):
        history = written(tmp_path / "history.csv")
        with pytest.raises(ValueError, match="step=3 is not after 3, the last one in"):
            history.append(3, reading())
        history = History(history.path, scalars=["loss"])
        with pytest.raises(ValueError, match=r"the reading has 1 matrices, and .* has 3"):
            history.append(4, reading(names=("up",)))
        params = {name: jnp.ones((2, 8)) for name in "abc"}
        with pytest.raises(ValueError, match=r"is 'a' here and '.*' there: pass another"):
            history.append(4, read(orscale(1e-3).init(params), params))


def test_numbers_are_written_with_their_digits(tmp_path):
    history = History(tmp_path / "history.csv", scalars=["tokens", "seconds", "loss"])
    given = {"tokens": 16_777_216_123, "seconds": 123456.789, "loss": jnp.float32(2.1)}
    history.append(np.int32(1), reading(), **given)
    for line in history.path.read_text().splitlines()[1:]:
        assert line.endswith(",16777216123,123456.789,2.1")


def test_a_file_with_other_columns_goes_back_to_a_step(tmp_path):
    """A file of several rows at once, whose second column is the step."""
    log = StepFile(tmp_path / "log.csv", ["optimizer", "step", "loss"])
    log.append(("orscale", str(step), f"{step / 8}") for step in range(1, 6))
    log.rewind(3)
    assert [*log.steps] == [1, 2, 3]
    log.append([("muon", "4", "0.5")])
    whole = log.path.read_text()
    assert whole.splitlines()[-2:] == ["orscale,3,0.375", "muon,4,0.5"]
    log.path.write_text(whole + "orscale,6,0.75")
    again = StepFile(log.path, log.columns)
    assert [*again.steps] == [1, 2, 3, 4] and log.path.read_text() == whole
    log.rewind(0)
    assert log.path.read_text() == "optimizer,step,loss\n"


@pytest.mark.parametrize("torn", ["", "s", "step"])
def test_a_torn_header_is_written_again(tmp_path, torn):
    path = tmp_path / "new.csv"
    path.write_text(torn)
    assert History(path).last_step is None
    assert path.read_text().startswith("step,matrix,class,trust_ratio")
