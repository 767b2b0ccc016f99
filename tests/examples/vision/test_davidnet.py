"""DavidNet against the recording of the paper's PyTorch model, and by itself."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from examples.pretrain.models.layers import count_parameters
from examples.vision.davidnet import (
    PRESETS,
    BatchNorm,
    DavidNet,
    DavidNetConfig,
    weight_dimension_numbers,
)
from orscale_jax import orscale
from tests.examples.recorded import RecordedModel, assert_close

ARRAYS = {"conv.weight": ("conv", "kernel"), "bn.weight": ("norm", "scale")}
ARRAYS |= {"bn.bias": ("norm", "bias")}


def place(name):
    """Where ours has a parameter of PyTorch: its path, and its index there."""
    if name == "head.weight":
        return ("head", "kernel"), ()
    module, array = re.fullmatch(r"(.*?)\.(\w+\.\w+)", name).groups()
    if module == "prep":
        return ("prep", *ARRAYS[array]), ()
    stage, layer = re.fullmatch(r"layer(\d)\.(.*)", module).groups()
    inner = ("first",) if layer == "0" else ("residual", int(layer[-1]))
    return ("stages", int(stage) - 1, *inner, *ARRAYS[array]), ()


@pytest.fixture(scope="module")
def recording():
    return RecordedModel("davidnet")


def inputs(recording, dtype):
    draw = np.random.default_rng([int(recording["seed"]), 9999])
    x = draw.standard_normal((4, 3, 32, 32))
    labels = draw.integers(0, 10, 4)
    np.testing.assert_array_equal(labels, recording["labels"])
    return jnp.asarray(x.transpose(0, 2, 3, 1), dtype), jnp.asarray(labels)


def initial_statistics(path, leaf):
    return jnp.full(leaf.shape, "var" in jax.tree_util.keystr(path), leaf.dtype)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_davidnet_is_the_recorded_model(recording, dtype):
    with jax.enable_x64(dtype == "float64"):
        config = DavidNetConfig(dtype=dtype, param_dtype=dtype)
        model = nnx.eval_shape(lambda: DavidNet(config, nnx.Rngs(0)))
        like = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        nnx.update(model, jax.tree.map(jnp.asarray, recording.ours(place, like, dtype)))
        statistics = nnx.state(model, nnx.BatchStat)
        nnx.update(model, jax.tree.map_with_path(initial_statistics, statistics))
        images, labels = inputs(recording, dtype)

        @nnx.jit
        def value_and_grad(model):
            def loss(model):
                logits = model(images)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
                return losses.mean(), logits

            return nnx.value_and_grad(loss, has_aux=True)(model)

        model.train()
        (loss, logits), gradients = value_and_grad(model)
        assert logits.dtype == dtype
        assert_close(logits, recording["logits"], dtype)
        assert_close(loss, recording["loss"], dtype)
        recording.assert_same_gradients(nnx.to_pure_dict(gradients), place, dtype)
        model.eval()
        logits = nnx.jit(lambda model: model(images))(model)
        assert_close(logits, recording["logits_eval"], dtype)


@functools.cache
def abstract(preset):
    return nnx.eval_shape(lambda: DavidNet(PRESETS[preset], nnx.Rngs(0)))


def parameters(preset):
    return nnx.to_pure_dict(nnx.state(abstract(preset), nnx.Param))


def test_davidnet_has_the_parameters_of_the_paper(recording):
    assert count_parameters(abstract("davidnet")) == recording["parameters"] == 6_573_120


def test_convolutions_are_matrices_and_the_first_and_the_head_take_adamw():
    params = parameters("davidnet")
    numbers = weight_dimension_numbers(abstract("davidnet"))
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(
            numbers(params), is_leaf=lambda leaf: leaf is None or isinstance(leaf, Dims)
        )
    }
    found = {path for path, leaf in flat.items() if leaf is not None}
    assert len(found) == 7 and all(".conv.kernel" in path for path in found)
    assert flat["prep.conv.kernel"] is None and flat["head.kernel"] is None
    assert flat["stages.2.residual.1.conv.kernel"] == Dims((0, 1, 2), 3)
    jax.eval_shape(orscale(1e-3, weight_dimension_numbers=numbers).init, params)


def test_evaluation_leaves_running_statistics_alone_and_training_moves_them():
    """Towards those of the batch by a tenth, the variance without bias."""
    layer = BatchNorm(3, PRESETS["tiny"])
    x = np.random.default_rng(0).normal(2, 3, (4, 5, 5, 3)).astype(np.float32)
    layer.eval()
    np.testing.assert_allclose(layer(x), x, rtol=1e-4)
    assert not layer.mean.get_value().any() and (layer.var.get_value() == 1).all()
    layer.train()
    y = layer(x)
    np.testing.assert_allclose(y.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(y.std((0, 1, 2)), 1, rtol=1e-4)
    np.testing.assert_allclose(layer.mean, 0.1 * x.mean((0, 1, 2)), rtol=1e-4)
    np.testing.assert_allclose(layer.var, 0.9 + 0.1 * x.var((0, 1, 2), ddof=1), rtol=1e-4)
