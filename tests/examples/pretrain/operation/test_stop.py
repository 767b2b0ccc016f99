"""The first signal is noted and answered at once; a second one acts as ever."""

import os
import signal

import pytest

from examples.pretrain.operation import run
from examples.pretrain.operation.processes import Stopped, StopSignal
from tests.examples.pretrain import tiny


def send(signum):
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_answered_at_once(signum, capfd):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
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
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert not capfd.readouterr().err
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.extended
def test_a_signal_during_a_measurement(tmp_path, monkeypatch, capfd):
    """The measurement is completed, and the run stops after the step that follows."""
    batches_to_measure = run._to_measure

    def interrupted(step, trainer, config):
        batches = batches_to_measure(step, trainer, config)
        if batches:
            send(signal.SIGTERM)
        return batches

    monkeypatch.setattr(run, "_to_measure", interrupted)
    options = {"optimizer": ("muon_moonlight",), "measure_every": 3, "steps": 9}
    data, out = tiny.write_texts(tmp_path / "texts"), tmp_path / "run"
    code = tiny.main(tiny.arguments(data, out, **options))
    assert code == 128 + signal.SIGTERM
    received, stopped = capfd.readouterr().err.strip().splitlines()
    assert received.startswith("SIGTERM received")
    assert stopped.startswith("Muon+Moonlight stopped at step 4.")
    folder = out / "muon_moonlight"
    assert {row["step"] for row in tiny.rows(folder / "history.csv")} == {"3"}
    assert (folder / "checkpoints" / "4").is_dir()
