"""Stacks of small arrays on GPUs: values, and the operations of the program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orscale_jax import orscale
from orscale_jax.distributed import fusion
from orscale_jax.distributed.fusion import slices_of_stacks
from tests.runs import EXPLICIT, assert_same_bits, mesh_of, tree


@pytest.mark.extended
def test_the_same_arrays_in_order(monkeypatch):
    monkeypatch.setattr(fusion, "GPUS", ("cpu",))
    monkeypatch.setattr(fusion, "_ARRAYS", 2)
    random = np.random.default_rng(0)
    kinds = ((), "float32"), ((3,), "float32"), ((), "int8"), ((3, 4), "bfloat16")
    arrays = [jnp.asarray(random.integers(-9, 9, s), t) for s, t in kinds * 5]
    assert_same_bits(slices_of_stacks(arrays), arrays)
    assert slices_of_stacks([]) == []


def program(fn, *args, platform="cuda"):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_a_stack_holds_no_more_than_a_kernel_concatenates():
    text = program(slices_of_stacks, [jnp.ones(())] * 300)
    sizes = re.findall(r"stablehlo\.optimization_barrier .* tensor<(\d+)xf32>", text)
    assert sizes == ["127", "127", "49"]


@pytest.mark.parametrize(
    ("arrays", "platform"),
    [
        ([jnp.ones((256, 256))] * 3, "cuda"),
        ([jnp.ones((2, 2)), jnp.ones((3, 2))], "cuda"),
        ([jnp.ones((2, 2))] * 3, "cpu"),
        ([jnp.ones((2, 2))] * 3, "tpu"),
    ],
    ids=[
        "large",
        "of different shapes",
        "on a CPU",
        "on a TPU",
    ],
)
def test_what_is_left_alone(arrays, platform):
    text = program(slices_of_stacks, arrays, platform=platform)
    assert "concatenate" not in text
    assert "optimization_barrier" not in text


def test_what_is_on_a_mesh_is_left_alone():
    with jax.set_mesh(mesh_of({"data": 1}, EXPLICIT)):
        text = program(slices_of_stacks, [jnp.ones((2, 2))] * 3)
    assert "concatenate" not in text


def trees():
    shapes = {f"w{i}": (4, 6) for i in range(3)} | {f"b{i}": (5,) for i in range(3)}
    shapes["large"] = (130, 140)
    return [tree(seed, shapes=shapes) for seed in (0, 1)]


def test_a_large_matrix_has_no_stack_and_small_ones_do():
    params, grads = trees()
    optimizer = orscale(0.01)
    text = program(optimizer.update, grads, optimizer.init(params), params)
    stacked = re.findall(r"stablehlo\.concatenate .*-> tensor<(\w+)>", text)
    assert not any("130x140" in shape for shape in stacked)
    # Gradients of the matrices and of the biases, and M̃ for Newton–Schulz.
    assert stacked.count("4x4x6xf32") == 1
    assert stacked.count("3x4x6xbf16") == 1
    assert stacked.count("4x5xf32") == 1


@pytest.mark.extended
@pytest.mark.parametrize("calibrate", [True, False])
def test_updates_can_be_mapped_and_differentiated(calibrate, monkeypatch):
    monkeypatch.setattr(fusion, "GPUS", ("cpu",))
    params, grads = trees()

    def step(rate):
        optimizer = orscale(rate, calibrate=calibrate)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.tree.norm(updates)

    rates = jnp.array([0.01, 0.02])
    mapped = jax.vmap(step)(rates)
    np.testing.assert_allclose(mapped, [step(rate) for rate in rates], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(step)(0.01), mapped[0] / 0.01, rtol=1e-5)
