"""Reductions that GPUs finish together: values, and the operations of the program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orscale_jax import orscale
from orscale_jax.distributed import fusion
from tests.leaves import KINDS
from tests.runs import assert_close, run, tree

SHAPES = {(8, 12): (0, 1), (4, 12): (0, 1), (3, 4, 12): (1, 2), (5,): (0,)}


def arrays_of(dtype):
    random = np.random.default_rng(0)
    # Integers: their sums are exact in any order.
    shapes = [shape for shape in SHAPES for _ in range(3)]
    return [jnp.asarray(random.integers(-9, 9, shape), dtype) for shape in shapes]


@pytest.fixture(autouse=True)
def small_counts_as_large(monkeypatch):
    monkeypatch.setattr(fusion, "_IN_ONE_KERNEL", 12)


@pytest.mark.extended
@pytest.mark.parametrize("fn", [jnp.sum, jnp.max], ids=["sum", "max"])
def test_arrays_of_several_shapes_and_dtypes(fn, monkeypatch):
    monkeypatch.setattr(fusion, "GPUS", ("cpu",))
    arrays = [*arrays_of(jnp.float32), *arrays_of(jnp.int32)]
    axes = [SHAPES[x.shape] for x in arrays]
    found = fusion.reduce_all(fn, arrays, axes)
    for x, along, value in zip(arrays, axes, found, strict=True):
        expected = getattr(np, fn.__name__)(np.asarray(x), axis=along)
        np.testing.assert_array_equal(value, expected)
        assert value.dtype == x.dtype


def program(arrays, platform):
    def step(arrays):
        axes = [SHAPES[x.shape] for x in arrays]
        return fusion.reduce_all(jnp.sum, arrays, axes)

    return jax.jit(step).trace(arrays).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "count"), [("cuda", 9 + 4), ("cpu", 12)])
def test_a_gpu_finishes_arrays_of_one_shape_together(platform, count):
    text = program(arrays_of(jnp.float32), platform)
    assert len(re.findall(r"stablehlo\.reduce\(", text)) == count


def params_and_grads():
    names = [name for name in KINDS for _ in range(2)]
    kinds = {f"{name}{i}": KINDS[name] for i, name in enumerate(names)}
    shapes = {name: shape for name, (shape, _, _) in kinds.items()}
    numbers = {name: dims for name, (_, dims, _) in kinds.items()}
    return tree(0, shapes=shapes), tree(1, shapes=shapes), numbers


@pytest.mark.extended
def test_a_step_is_the_same(monkeypatch):
    """On every kind of leaf, one of which has no first update."""
    params, grads, numbers = params_and_grads()
    optimizer = orscale(0.01, weight_dimension_numbers=numbers)

    def gradients(step):
        scaled = jax.tree.map(lambda g: g * 0.5**step, grads)
        return scaled | {"tall0": (step > 1) * scaled["tall0"]}

    expected = run(optimizer, params, 3, gradients)[-1]
    monkeypatch.setattr(fusion, "GPUS", ("cpu",))
    assert_close(run(optimizer, params, 3, gradients)[-1], expected, rtol=1e-6, atol=1e-6)


def test_a_gpu_reduces_few_times_for_many_leaves():
    """Three a leaf, the maximum of M̃ and the norms of D and of W; three sums a stack."""
    params = {f"w{i}": jnp.ones((8, 12)) for i in range(20)}
    optimizer = orscale(0.01)
    traced = jax.jit(optimizer.update).trace(params, optimizer.init(params), params)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    scalars = re.findall(r"stablehlo\.reduce\(.*-> tensor<f32>", text)
    assert not scalars
    vectors = re.findall(r"stablehlo\.reduce\(.*-> tensor<(\d+)xf32>", text)
    assert vectors.count("8") == 20 * 3
    assert len(vectors) == 20 * 3 + 3
