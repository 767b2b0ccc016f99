"""Stopped in any way and started again, a run ends as if it had never stopped."""

import fcntl
import itertools
import json
import math
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest

from examples.pretrain import train
from examples.pretrain.errors import RunError, UsageError
from examples.pretrain.operation import run as operation_run
from examples.pretrain.operation.rundir import FREE_OPTIONS, claim
from examples.pretrain.tasks import read_data
from tests.examples.pretrain import tiny

pytestmark = pytest.mark.extended

STEPS = tiny.STEPS
LAST_TO_KILL = 104
OPTIONS = tiny.OPTIONS | {"optimizer": ("orscale",)}


def run(options):
    process = tiny.start(options)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def metrics(out):
    path = out / "orscale" / "metrics.csv"
    return tiny.rows(path) if path.exists() else []


def wait_for_row(process, out, count):
    """Returns once the run has written `count` rows."""
    while len(metrics(out)) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)


def assert_same_run(out, reference):
    got, expected = (tiny.last_state(folder / "orscale") for folder in (out, reference))
    assert got.keys() == expected.keys()
    assert any("kernel" in name for name in got) and any("trace" in name for name in got)
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)
    rows, reference_rows = metrics(out), metrics(reference)
    assert [row["step"] for row in rows] == [str(step) for step in range(1, STEPS + 1)]
    for row, other in zip(rows, reference_rows, strict=True):
        assert row | {"seconds": ""} == other | {"seconds": ""}
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    name = "orscale/history.csv"
    assert (out / name).read_text() == (reference / name).read_text()


@pytest.fixture
def reference(tmp_path_factory):
    """A run that was never stopped."""
    return tiny.finished_run(tmp_path_factory.getbasetemp())[0]


@pytest.fixture
def data(tmp_path_factory):
    return tiny.finished_run(tmp_path_factory.getbasetemp())[1]


def kill_after(options, out, count, delay):
    process = tiny.start(options, hold=(LAST_TO_KILL, out / "never"))
    wait_for_row(process, out, count)
    time.sleep(delay)  # Into a step, a row or a checkpoint.
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "orscale" / "result.json").exists()


def ask_to_stop(options, out, count, signum):
    process = tiny.start(options, hold=(count + 1, out / "asked"))
    wait_for_row(process, out, count)
    process.send_signal(signum)
    (out / "asked").touch()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signum, output
    done = int(re.search(r"OrScale stopped at step (\d+)", output)[1])
    assert done == count + 1
    assert f"{signal.Signals(signum).name} received" in output
    assert "Rerun the same command to resume from here" in output
    assert "Traceback" not in output
    assert metrics(out)[-1]["step"] == str(done)  # No finished step is lost.
    assert (out / "orscale" / "checkpoints" / str(done)).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_killed_with_torn_files_and_then_asked_to_stop(data, reference, tmp_path, signum):
    options = tiny.arguments(data, tmp_path, **OPTIONS)
    draw = random.Random(signum)
    kill_after(options, tmp_path, draw.randrange(1, 60), draw.uniform(0, 0.05))
    already = len(metrics(tmp_path))
    # What a kill in the middle of a write would leave.
    with open(tmp_path / "orscale" / "metrics.csv", "a") as file:
        file.write("orscale,9")
    (tmp_path / "orscale" / "metrics.csv.tmp").write_text("half a fi")
    (tmp_path / "orscale" / "result.json.tmp").write_text("{")
    ask_to_stop(options, tmp_path, max(80, already), signum)
    assert "OrScale resumes from its checkpoint of step " in run(options)
    assert_same_run(tmp_path, reference)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_again_and_again(data, reference, tmp_path, seed):
    options = tiny.arguments(data, tmp_path, **OPTIONS)
    draw = random.Random(seed)
    for _ in range(3):
        already = len(metrics(tmp_path))
        count = draw.randrange(min(already, LAST_TO_KILL - 1), LAST_TO_KILL)
        kill_after(options, tmp_path, count, draw.uniform(0, 0.05))
    run(options)
    assert_same_run(tmp_path, reference)


def test_a_finished_run_is_only_shown(data, reference):
    def times():
        paths = (reference / "orscale").rglob("*")
        return {p: p.stat().st_mtime_ns for p in paths if "report" not in p.parts}

    before = times()
    output = run(tiny.arguments(data, reference, **OPTIONS))
    assert "OrScale is finished in" in output and "nats/byte" in output
    assert "learning rate 0.003 for" not in output
    assert times() == before


def test_a_run_says_what_it_does_and_when_it_resumes(data, tmp_path, capsys, monkeypatch):
    options = {"optimizer": ("muon",), "checkpoint_every": 2, "log_every": 1}
    arguments = tiny.arguments(data, tmp_path, **options)

    def interrupted(done, _):
        if done.step == 5:
            raise RunError("interrupted")

    with monkeypatch.context() as context:
        context.setattr(operation_run, "check_finite", interrupted)
        assert tiny.main(arguments) == 1
    said = capsys.readouterr().out
    line = "muon: learning rate 0.003 for matrices, 0.003 for the rest; weight "
    assert line + "decay 0.1 for all\n" in said and "resumes" not in said
    assert tiny.main([*arguments, "--rates", "advised"]) == 2
    assert "rates: shared there, advised now" in capsys.readouterr().err
    assert tiny.main(arguments) == 0
    said = capsys.readouterr().out
    assert "muon resumes from its checkpoint of step 4 of 6.\n" in said
    assert [row["step"] for row in tiny.rows(tmp_path / "metrics.csv")] == list("123456")


@pytest.fixture
def refused(capsys):
    """Runs a command that is refused, here, and gives its message."""

    def run_refused(options):
        assert tiny.main(options) == 2
        return capsys.readouterr().err

    return run_refused


def test_another_configuration_is_refused(data, reference, refused):
    before = (reference / "config.json").read_text()
    changes = {"learning_rate": 0.01, "seed": 3, "steps": STEPS + 1}
    message = refused(tiny.arguments(data, reference, **(OPTIONS | changes)))
    assert str(reference) in message
    assert f"steps: {STEPS} there, {STEPS + 1} now" in message
    assert "learning_rate: 0.003 there, 0.01 now" in message
    assert "seed: 0 there, 3 now" in message
    assert "width" not in message
    assert (reference / "config.json").read_text() == before


WORDS = {"router": "adamw"}


def another(name, value):
    """Another value that the option may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return WORDS.get(name, "bfloat16")
    if isinstance(value, float):
        return value / 2
    return 2 * (value or 1)


def test_every_option_that_matters_is_compared(data, tmp_path):
    options = {"data": (str(data),), "out": tmp_path}
    config = tiny.config(**options)
    corpus = read_data(config)
    with claim(config, corpus):
        pass
    for name, value in config.to_dict().items():
        if name not in FREE_OPTIONS:
            changed = tiny.config(**options, **{name: another(name, value)})
            with pytest.raises(UsageError) as error, claim(changed, corpus):
                pass
            message = str(error.value)
            assert f"  {name}: " in message and message.count(" there, ") == 1, message


def test_hyperparameters_of_other_optimizers_do_not_matter(data, tmp_path):
    options = {"data": (str(data),), "out": tmp_path}
    of_orscale = tiny.config(**options, optimizer=("orscale",), r_min=0.5)
    corpus = read_data(of_orscale)
    with claim(of_orscale, corpus):
        pass
    with claim(tiny.config(**options, optimizer=("adamw",)), corpus):
        pass
    with (
        pytest.raises(UsageError, match=r"r_min: 0\.5 there, None now") as error,
        claim(tiny.config(**options, optimizer=("uncalibrated",)), corpus),
    ):
        pass
    assert "optimizer:" not in str(error.value)


@pytest.mark.parametrize("table", ["metrics.csv", "orscale/history.csv"])
def test_a_table_that_cannot_be_continued_is_named(
    data, reference, tmp_path, capsys, table
):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    (run / "orscale" / "result.json").unlink()
    path = run / ("orscale" if "/" not in table else "") / table
    path.write_text("a,b\n1,2\n")
    assert tiny.main(tiny.arguments(data, run, **OPTIONS)) == 1
    message = capsys.readouterr().err
    assert f"A table in {run / 'orscale'} cannot be continued" in message
    assert path.name in message


def test_another_corpus_is_refused(data, reference, tmp_path, refused):
    before = sorted((reference / "orscale" / "checkpoints").rglob("*"))
    other = tiny.write_texts(tmp_path / "other", words=201)
    message = refused(tiny.arguments(other, reference, **OPTIONS))
    facts = json.loads((reference / "config.json").read_text())
    assert f"corpus_sha256: {facts['corpus_sha256']} there" in message
    assert str(other) in message
    fewer = shutil.copytree(data, tmp_path / "fewer")
    next(fewer.iterdir()).unlink()  # One that is gone is missed.
    message = refused(tiny.arguments(fewer, reference, **OPTIONS))
    assert "corpus_tokens: " in message and "corpus_sha256: " in message
    assert sorted((reference / "orscale" / "checkpoints").rglob("*")) == before


def test_a_refusal_shows_no_traceback(tmp_path):
    process = tiny.start(["--data", str(tmp_path / "missing.txt")])
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert output.startswith("error: ") and output.count("\n") == 1, output


def test_what_leaves_the_result_alone_may_change(data, reference, tmp_path):
    moved = shutil.copytree(data, tmp_path / "moved")
    options = OPTIONS | {"checkpoint_every": 50, "optimizer": ("orscale", "orscale")}
    assert tiny.main(tiny.arguments(moved, reference, **options)) == 0


def test_a_folder_in_use_or_a_file_in_its_place_is_refused(data, tmp_path, refused):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        message = refused(tiny.arguments(data, tmp_path, **OPTIONS))
    assert "another process is running" in message
    (tmp_path / "file").touch()
    message = refused(tiny.arguments(data, tmp_path / "file", **OPTIONS))
    assert "cannot be a folder" in message


def test_what_is_not_finite_is_not_saved(data, tmp_path, capsys, monkeypatch):
    def compiled_step(*_):
        steps = itertools.count(1)

        def step(state, batch):
            loss = math.nan if next(steps) == 5 else 2.0
            return state, {"loss": np.float32(loss), "grad_norm": np.float32(1)}

        return step

    monkeypatch.setattr(train, "compiled_step", compiled_step)
    options = {"optimizer": ("adamw",), "checkpoint_every": 2, "steps": 8}
    assert tiny.main(tiny.arguments(data, tmp_path, **options)) == 1
    message = capsys.readouterr().err
    assert "Step 5: loss is nan. Nothing was saved since step 4" in message
    assert message.endswith("with another --out and a lower --learning-rate or --clip.\n")
    kept = {path.name for path in (tmp_path / "adamw" / "checkpoints").iterdir()}
    assert kept == {"2", "4"}
