"""A training step: what it keeps of its state, and gradients in turn."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pretrain.meshes import MeshConfig, in_effect, make_mesh
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.recipes import DEMOS
from examples.pretrain.setup import learning_rates, set_up
from examples.pretrain.step import compiled_step, gradient_of, in_turn, make_train_step
from examples.pretrain.tasks import make_task
from examples.vision.davidnet import DavidNetConfig
from tests.examples.pretrain import tiny

TINY = tiny.config(
    batch_size=8, **{"model.width": 8, "model.heads": 1, "model.fused_qkv": True}
)
MIXTURE = tiny.config("demo-moe", batch_size=8)
IMAGES = dataclasses.replace(
    DEMOS["demo-vision"], model=DavidNetConfig(widths=(2, 2, 2, 2), residual=())
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def setup_of(config, mesh, optimizer="orscale"):
    return set_up(make_task(config), config.recipe_of(optimizer), mesh)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def assert_keeps_its_state(setup, accumulation=1):
    with in_effect(setup.mesh):
        step = make_train_step(setup, accumulation)
        state, metrics = jax.eval_shape(step, setup.abstract, setup.task.batch(8))
    assert shapes(state) == shapes(setup.abstract)
    for name in ("loss", "grad_norm"):
        assert metrics[name].shape == () and metrics[name].dtype == jnp.float32


@pytest.mark.quick_first_case
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_keeps_the_shapes_of_its_state(optimizer, mesh):
    assert_keeps_its_state(setup_of(TINY, mesh, optimizer))


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    ("config", "param_dtype", "compute_dtype"),
    [
        (TINY, "float32", "bfloat16"),
        (TINY, "bfloat16", "float32"),
        (TINY, "bfloat16", "bfloat16"),
        (MIXTURE, "bfloat16", "bfloat16"),
        (IMAGES, "float32", "bfloat16"),
    ],
)
def test_a_step_keeps_the_dtypes_of_its_state(config, param_dtype, compute_dtype, mesh):
    dtypes = {"param_dtype": param_dtype, "compute_dtype": compute_dtype}
    recipe = dataclasses.replace(config.recipe, **dtypes)
    setup = setup_of(dataclasses.replace(config, recipe=recipe), mesh)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(setup.abstract["params"])}
    assert dtypes == {param_dtype}
    assert_keeps_its_state(setup, accumulation=2 if config is TINY else 1)


@pytest.mark.compiled
@pytest.mark.extended
def test_a_compiled_step_stays_on_its_device_and_reuses_its_state(mesh):
    setup = setup_of(TINY, mesh)
    with in_effect(mesh):
        step = compiled_step(setup, 1, setup.task.batch(8))
        state = setup.initial_state()
    text = step.as_text()
    assert not re.search(r"callback|\b(infeed|outfeed|send|recv)\(|S\(5\)", text)
    # What is only given, such as trust ratios, is no argument of the program.
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
    size = sum(leaf.nbytes for leaf in arrays)
    assert step.memory_analysis().alias_size_in_bytes >= size
    batch = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 17)), jnp.int32)
    after, metrics = step(state, batch)
    assert all(leaf.is_deleted() for leaf in arrays)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((after, metrics)))
    step(after, batch)  # It takes what it gives.


def test_warmup_then_cosine_to_zero():
    recipe = tiny.config(steps=100, warmup_steps=10, learning_rate=1.0).recipe
    rates = np.asarray(jax.vmap(learning_rates(recipe))(jnp.arange(101)))
    assert rates[0] == pytest.approx(0.1)
    assert np.all(np.diff(rates[:11]) > 0) and np.all(np.diff(rates[10:]) < 0)
    np.testing.assert_allclose(rates[[10, 55, 100]], [1, 0.5, 0], atol=1e-6)
    no_warmup = learning_rates(dataclasses.replace(recipe, warmup_steps=0))
    assert no_warmup(0) == 1


# Gradients in turn


@pytest.mark.extended
def test_gradients_in_turn_are_that_of_the_whole_batch(mesh):
    setup = setup_of(TINY, mesh)
    batch = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 17)), jnp.int32)
    with in_effect(mesh):
        state = setup.initial_state()
        arguments = state["params"], state["variables"], batch
        whole, in_parts = (jax.jit(gradient_of(setup, n))(*arguments) for n in (1, 4))
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole[0]))
    for found, wanted in zip(*map(jax.tree.leaves, (in_parts, whole)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * scale)


def test_parts_of_a_batch_follow_one_another(mesh):
    """Row b is in part b % count; running statistics go from part to part."""

    def gradient(params, variables, batch):
        statistics = {"mean": 0.9 * variables["mean"] + 0.1 * batch.mean()}
        grads = {"kernel": params["kernel"] * batch.mean().astype("bfloat16")}
        return grads, statistics, {"loss": batch.max()}

    params = {"kernel": jnp.ones(2, "bfloat16")}
    batch = jnp.asarray([1.0, 10.0, 100.0, 3.0, 20.0, 300.0])
    where = {"kernel": jax.P()}
    with in_effect(mesh):
        mean_gradient = jax.jit(in_turn(gradient, 3, where))
        grads, variables, metrics = mean_gradient(params, {"mean": 0.0}, batch)
    assert grads["kernel"].dtype == jnp.bfloat16
    means = np.array([2.0, 15.0, 200.0])
    np.testing.assert_allclose(grads["kernel"].astype("float32"), means.mean(), rtol=4e-3)
    assert metrics["loss"] == pytest.approx(np.mean([3.0, 20.0, 300.0]))
    expected = 0.1 * means @ [0.81, 0.9, 1.0]
    assert variables["mean"] == pytest.approx(expected)


def test_sums_of_bfloat16_gradients_are_float32(mesh):
    """In bfloat16, 256 + 1 is 256."""

    def gradient(params, variables, batch):
        return {"kernel": batch.sum().astype("bfloat16")}, variables, {}

    batch = jnp.asarray([256.0, *[1.0] * 255])
    with in_effect(mesh):
        mean_gradient = jax.jit(in_turn(gradient, 256, {"kernel": jax.P()}))
        grads, _, _ = mean_gradient({"kernel": 0.0}, {}, batch)
    assert grads["kernel"] == jnp.asarray((256 + 255) / 256, "bfloat16")


def test_routing_biases_move_after_a_step_against_the_loads():
    task = make_task(MIXTURE)
    loads = jnp.asarray([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]])
    variables = {"routing_bias": jnp.ones((2, 4))}
    after = task.after_step(variables, {"expert_load": loads})
    expected = 1 + MIXTURE.recipe.balance_rate * np.array([[-1, 0, 0, 1], [0, 0, 0, 0]])
    np.testing.assert_allclose(after["routing_bias"], expected, rtol=1e-6)
