"""What a run writes down of its steps, and what it tells of its speed."""

import types

import jax
import numpy as np
import pytest

from examples.pretrain.errors import RunError
from examples.pretrain.operation.logs import Recorder, check_finite, throughput
from examples.pretrain.operation.peaks import peak_flops
from examples.pretrain.operation.rundir import read_csv
from examples.pretrain.recipes import DEMOS
from examples.pretrain.tasks import make_task
from examples.pretrain.train import Interval
from tests.examples.pretrain import tiny


def setup_of(item):
    """What a recorder asks of a setup."""
    task = types.SimpleNamespace(item=item, items_per_example=16)
    recipe = tiny.config(batch_size=4).recipe
    return types.SimpleNamespace(task=task, recipe=recipe, schedule=lambda s: s / 100)


def interval(step, *losses, seconds=0.6):
    metrics = [{"loss": loss, "grad_norm": 2 * loss} for loss in losses]
    return Interval(step, None, metrics, seconds)


def test_metrics_have_a_row_for_every_step(tmp_path):
    recorder = Recorder(tmp_path, setup_of("images"), start=0)
    recorder.record(interval(3, 5.0, 4.0, 3.0), {"loss": 3.5, "accuracy": 0.25})
    recorder.record(interval(4, 2.0, seconds=1.0), {})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "optimizer,step,images,train_loss,val_loss,val_accuracy,learning_rate,grad_norm,seconds",
        "orscale,1,64,5.000000,,,0,10,0.200",
        "orscale,2,128,4.000000,,,0.01,8,0.400",
        "orscale,3,192,3.000000,3.500000,0.250000,0.02,6,0.600",
        "orscale,4,256,2.000000,,,0.03,4,1.600",
    ]


def test_a_run_that_carries_on_continues_its_records(tmp_path):
    setup = setup_of("tokens")
    recorder = Recorder(tmp_path, setup, start=0)
    for step in (2, 4):
        recorder.record(interval(step, 5.0, 4.0), {})
    recorder = Recorder(tmp_path, setup, start=2)
    recorder.record(interval(3, 9.0), {"loss": 1.0})
    rows = read_csv(tmp_path / "metrics.csv")
    seconds = {row["step"]: row["seconds"] for row in rows}
    assert seconds == {"1": "0.300", "2": "0.600", "3": "1.200"}


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


D, V, T = 16, 256, 16
WEIGHTS = V * D + 12 * D**2 + 3 * D  # Of one block; the head is the embedding.
FLOPS = 6 * WEIGHTS * T + 12 * D * T**2


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, 0),
        ({"model.fused_qkv": True, "loss_chunks": 4}, 0),
        ({"model.layers": 2}, 6 * (12 * D**2 + 2 * D) * T + 12 * D * T**2),
    ],
)
def test_operations_of_a_decoder(changes, more):
    """6·N·T + 12·L·D·T²."""
    assert make_task(tiny.config(**changes)).flops_per_example == FLOPS + more


def test_operations_of_a_mixture_are_those_of_a_tokens_experts():
    """A block with an MLP and two with 2 of 16 experts and a shared one."""
    T, D = 128, 128
    queries, latent, keys_and_values = D * 4 * 48, D * (32 + 16), 32 * 4 * (32 + 32)
    attention = queries + latent + keys_and_values + 4 * 32 * D
    norms = 2 * D + 32
    mlp, experts, router = 3 * D * 384, 3 * (3 * D * 128), D * 16
    weights = 3 * (attention + norms) + mlp + 2 * (experts + router) + D + 256 * D
    scores_and_values = 3 * T**2 * 4 * (48 + 32)
    expected = 6 * weights * T + 6 * scores_and_values
    assert make_task(DEMOS["demo-moe"]).flops_per_example == expected


def test_utilization_is_a_share_of_the_peak_of_all_devices(monkeypatch):
    task = make_task(tiny.config())
    # On what has no known peak, and where operations are not counted.
    assert throughput(task, 10, 2.0) == (10 * T / 2, "80 tokens/s")
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [device] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    share = 10**9 * FLOPS / 0.5 / (4 * 989e12)
    assert share > 0.001
    rate, shown = throughput(task, 10**9, 0.5)
    assert rate == 10**9 * T / 0.5
    assert shown == f"{rate:,.0f} tokens/s  {100 * share:.1f}% MFU"
    images = throughput(make_task(DEMOS["demo-vision"]), 10, 2.0)
    assert images == (5.0, "5 images/s")


def test_peaks_of_devices():
    for kind, peak in {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "TPU v5 lite": 197e12,
        "TPU v5": 459e12,
        "TPU v6 lite": 918e12,
        "cpu": None,
    }.items():
        assert peak_flops(kind) == peak
