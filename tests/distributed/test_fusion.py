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


def arrays():
    random = np.random.default_rng(0)
    kinds = [
        ((), jnp.float32),
        ((3,), jnp.float32),
        ((), jnp.int8),
        ((3, 4), jnp.bfloat16),
    ]
    return [
        jnp.asarray(random.integers(-9, 9, shape), dtype)
        for _ in range(5)
        for shape, dtype in kinds
    ]


@pytest.mark.extended
def test_the_same_arrays_in_order(monkeypatch):
    monkeypatch.setattr(fusion, "GPUS", ("cpu",))
    monkeypatch.setattr(fusion, "_ARRAYS", 2)
    found = slices_of_stacks(arrays())
    for x, same in zip(arrays(), found, strict=True):
        assert same.dtype == x.dtype
        np.testing.assert_array_equal(same, x)
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
    ids=["large", "of different shapes", "on a CPU", "on a TPU"],
)
def test_what_is_left_alone(arrays, platform):
    text = program(slices_of_stacks, arrays, platform=platform)
    assert "concatenate" not in text
    assert "optimization_barrier" not in text


def test_what_is_on_a_mesh_is_left_alone():
    with jax.set_mesh(jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Explicit,))):
        text = program(slices_of_stacks, [jnp.ones((2, 2))] * 3)
    assert "concatenate" not in text


def trees():
    random = np.random.default_rng(1)
    shapes = {f"w{i}": (4, 6) for i in range(3)} | {f"b{i}": (5,) for i in range(3)}
    shapes["large"] = (130, 140)
    return [
        {k: jnp.asarray(random.normal(size=s), jnp.float32) for k, s in shapes.items()}
        for _ in range(2)
    ]


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
    """vmap and grad of a step see through the stacks."""
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
