import types

import numpy as np
import pytest

from examples.pretrain.errors import RunError
from examples.pretrain.operation.logs import check_finite
from examples.pretrain.operation.records import Recorder, read_csv
from examples.pretrain.train import Interval
from tests.examples.pretrain import tiny


def setup_of(item, has_experts):
    """What a recorder asks of a setup."""
    task = types.SimpleNamespace(item=item, items_per_example=16, has_experts=has_experts)
    recipe = tiny.config(batch_size=4).recipe
    return types.SimpleNamespace(task=task, recipe=recipe, schedule=lambda s: s / 100)


def interval(step, *losses, seconds=0.6, **more):
    metrics = [{"loss": loss, "grad_norm": 2 * loss} | more for loss in losses]
    return Interval(step, None, metrics, seconds)


def test_metrics_have_a_row_for_every_step(tmp_path):
    recorder = Recorder(tmp_path, setup_of("images", has_experts=False), start=0)
    recorder.record(interval(3, 5.0, 4.0, 3.0), {"loss": 3.5, "accuracy": 0.25})
    recorder.record(interval(4, 2.0, seconds=1.0), {})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "optimizer,step,images,train_loss,val_loss,val_accuracy,learning_rate,grad_norm,seconds",
        "orscale,1,64,5.000000,,,0,10,0.200",
        "orscale,2,128,4.000000,,,0.01,8,0.400",
        "orscale,3,192,3.000000,3.500000,0.250000,0.02,6,0.600",
        "orscale,4,256,2.000000,,,0.03,4,1.600",
    ]
    assert not (tmp_path / "expert_loads.csv").exists()


def test_a_run_that_carries_on_continues_its_records(tmp_path):
    setup = setup_of("tokens", has_experts=True)
    recorder = Recorder(tmp_path, setup, start=0)
    loads = np.array([[0.25, 0.75], [0.5, 0.5]])
    for step in (2, 4):
        done = interval(step, 5.0, 4.0, expert_load=loads)
        recorder.record(done, {})
        recorder.record_loads(done)
    recorder = Recorder(tmp_path, setup, start=2)
    recorder.record(interval(3, 9.0), {"loss": 1.0})
    rows = read_csv(tmp_path / "metrics.csv")
    assert [(row["step"], row["seconds"]) for row in rows] == [
        ("1", "0.300"),
        ("2", "0.600"),
        ("3", "1.200"),
    ]
    assert (tmp_path / "expert_loads.csv").read_text().splitlines() == [
        "step,layer,expert,share",
        "2,0,0,0.250000",
        "2,0,1,0.750000",
        "2,1,0,0.500000",
        "2,1,1,0.500000",
    ]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_ends_the_run(bad):
    check_finite(interval(12, 3.0, 2.0), last_checkpoint=None)
    message = rf"Step 11: loss is {bad}\. .*since step 10.*--learning-rate.*--clip"
    with pytest.raises(RunError, match=message):
        check_finite(interval(12, bad, 2.0), last_checkpoint=10)
    broken = interval(12, 3.0, 2.0)
    broken.metrics[1]["grad_norm"] = bad
    with pytest.raises(RunError, match=f"Step 12: grad_norm is {bad}.* since step 0"):
        check_finite(broken, last_checkpoint=None)
