import types

import jax
import pytest

from examples.pretrain.operation.logs import Throughput, peak_flops, throughput
from examples.pretrain.recipes import DEMOS
from examples.pretrain.tasks import make_task
from tests.examples.pretrain import tiny

D, V, T = 16, 256, 16
WEIGHTS = V * D + 12 * D**2 + 3 * D  # Of one block; the head is the embedding.
FLOPS = 6 * WEIGHTS * T + 12 * D * T**2


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, 0),
        ({"model.fused_qkv": True, "loss_chunks": 4}, 0),
        ({"model.tied": False}, 0),  # The embedding is looked up, the head multiplied.
        ({"model.layers": 2}, 6 * (12 * D**2 + 2 * D) * T + 12 * D * T**2),
    ],
)
def test_operations_of_a_decoder(changes, more):
    """6·N·T + 12·L·D·T²."""
    assert make_task(tiny.config(**changes)).flops_per_example == FLOPS + more


def test_operations_of_a_mixture_are_those_of_a_tokens_experts():
    """A block with an MLP and two with 2 of 16 experts and a shared one."""
    config = DEMOS["demo-moe"]
    T, D = 128, 128
    queries, latent, keys_and_values = D * 4 * 48, D * (32 + 16), 32 * 4 * (32 + 32)
    attention = queries + latent + keys_and_values + 4 * 32 * D
    norms = 2 * D + 32
    mlp, experts, router = 3 * D * 384, 3 * (3 * D * 128), D * 16
    weights = 3 * (attention + norms) + mlp + 2 * (experts + router) + D + 256 * D
    scores_and_values = 3 * T**2 * 4 * (48 + 32)
    expected = 6 * weights * T + 6 * scores_and_values
    assert make_task(config).flops_per_example == expected


def test_utilization_is_a_share_of_the_peak_of_all_devices(monkeypatch):
    task = make_task(tiny.config())
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [device] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    found = throughput(task, examples=1000, seconds=0.5)
    assert found.items_per_second == 1000 * T / 0.5
    assert found.utilization == pytest.approx(1000 * FLOPS / 0.5 / (4 * 989e12))
    assert str(Throughput(12_345.6, "tokens", 0.4567)) == "12,346 tokens/s  45.7% MFU"


def test_without_a_known_peak_or_operations_there_is_no_utilization(monkeypatch):
    found = throughput(make_task(tiny.config()), examples=10, seconds=2.0)
    assert found == Throughput(10 * T / 2, "tokens", None)
    assert str(found) == "80 tokens/s"
    device = types.SimpleNamespace(device_kind="TPU v4")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    found = throughput(make_task(DEMOS["demo-vision"]), examples=10, seconds=2.0)
    assert found == Throughput(5.0, "images", None)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peaks_of_devices(kind, peak):
    assert peak_flops(kind) == peak
