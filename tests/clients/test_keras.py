"""The programs of docs/other_libraries.md: in fit, and by the stateless calls."""

import importlib.util

import jax
import numpy as np
import optax
import pytest

pytestmark = pytest.mark.client
if not importlib.util.find_spec("keras"):
    pytest.skip("make clients installs it", allow_module_level=True)

from orscale_jax import assert_same_on, muon
from tests.clients.pages import run_page
from tests.runs import AUTO, EXPLICIT, mesh_of


@pytest.fixture(scope="module")
def page():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        import keras

        keras.utils.set_random_seed(0)
        return run_page("other_libraries.md", __name__="page")


def test_both_ways_train(page):
    first, last = page["history"].history["loss"]
    assert last < first / 2
    with jax.numpy_rank_promotion("allow"):  # Keras adds biases so.
        assert stateless_loss(page) < 0.2


def stateless_loss(page):
    """The loss of a model that is trained without `fit`."""
    model, loss = page["build"](), page["loss"]
    names = names_of(model)
    params = {variable.path: variable.value for variable in model.trainable_variables}
    optimizer = muon(0.01, weight_dimension_numbers=page["numbers"])
    state = optimizer.init(params)

    def loss_fn(params, x, y):
        values = [params[name] for name in names]  # jax.jit sorts the keys.
        logits, _ = model.stateless_call(values, [], x, training=True)
        return loss(y, logits)

    @jax.jit
    def train_step(params, state, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for start in range(0, len(page["x"]), 64):
        batch = slice(start, start + 64)
        params, state = train_step(params, state, page["x"][batch], page["y"][batch])
    return loss_fn(params, page["x"], page["y"])


def names_of(model):
    return [variable.path for variable in model.trainable_variables]


def test_which_variables_are_matrices(page):
    optimizer = muon(0.01, weight_dimension_numbers=page["numbers"])
    variables = page["build"]().trainable_variables
    params = {variable.path: variable.value for variable in variables}
    rows = page["describe"](params, optimizer).rows
    matrices = {row.path for row in rows if row.rule == "matrix"}
    kernels = {name for name in params if name.endswith("kernel")}
    assert matrices == kernels - {"head/kernel"}
    assert {row.matrices for row in rows if row.rule == "matrix"} == {1}


def trained(page, steps=2):
    """A model after some steps of Keras's optimizer, and the same steps of Optax."""
    model = page["build"]()
    values = [variable.value for variable in model.trainable_variables]
    grads = [jax.random.normal(jax.random.key(0), value.shape) for value in values]
    optimizer = page["Muon"](0.01, weight_dimension_numbers=page["numbers"])
    model.compile(optimizer, page["loss"])
    optimizer.build(model.trainable_variables)
    tx = muon(0.01, weight_dimension_numbers=page["numbers"])
    params, gradients = (
        dict(zip(names_of(model), leaves, strict=True)) for leaves in (values, grads)
    )
    state = tx.init(params)
    for _ in range(steps):
        optimizer.apply(grads)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return model, [params[name] for name in names_of(model)], jax.tree.leaves(state)


def assert_close(variables, arrays):
    for variable, array in zip(variables, arrays, strict=True):
        np.testing.assert_allclose(variable.value, array, rtol=1e-5, atol=1e-6)


def test_its_steps_are_those_of_optax_and_its_weights_file_has_the_state(page, tmp_path):
    model, params, state = trained(page)
    assert_close(model.trainable_variables, params)
    assert_close(model.optimizer.state, state)
    assert model.optimizer.iterations.value == 2
    model.save_weights(tmp_path / "it.weights.h5")
    again, _, _ = trained(page, steps=0)
    again.load_weights(tmp_path / "it.weights.h5")
    assert_close(again.trainable_variables, params)
    assert_close(again.optimizer.state, state)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_its_update_on_a_mesh_is_that_of_one_device(page, kind):
    optimizer = page["Muon"](weight_dimension_numbers=page["numbers"]).make(0.01)
    mesh = mesh_of({"fsdp": 4, "tensor": 2}, kind)
    assert assert_same_on(mesh, optimizer, page["params"]).bytes_sent
