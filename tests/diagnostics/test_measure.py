"""Measurements of the momentum and of Q, against NumPy's SVD."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from orscale_jax import by_path, orscale, orthogonalize, polar_factor
from orscale_jax.diagnostics import measure, read, tabulate
from tests import leaves
from tests.runs import AUTO, EXPLICIT, mesh_of, placed

NAMES = ("tall", "experts", "grouped_query")
NUMBERS = {name: leaves.DIMENSIONS[name] for name in (*NAMES, "bias")}


def low_rank(seed):
    """Gradients, those of "tall" of rank 2 and those of an expert zero."""
    grads = {name: leaves.random_tree(seed)[name] for name in NUMBERS}
    u, s, v = np.linalg.svd(grads["tall"], full_matrices=False)
    grads["tall"] = jnp.asarray((u[:, :2] * s[:2]) @ v[:2])
    grads["experts"] = grads["experts"].at[1, 2].set(0)
    return grads


def states(steps=2):
    optimizer = orscale(0.1, weight_dimension_numbers=NUMBERS)
    params = {name: leaves.random_tree(0)[name] for name in NUMBERS}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(steps):
        updates, state = update(low_rank(step), state, params)
        params = optax.apply_updates(params, updates)
        yield state, params


def expected_of(matrix):
    """All measurements of one matrix, with Q from an SVD."""
    values = np.linalg.svd(matrix, compute_uv=False)
    q = np.float64(POLAR(jnp.asarray(matrix, jnp.float32)))
    short = min(q.shape)
    gram = q.T @ q if q.shape[1] == short else q @ q.T
    return {
        "momentum_stable_rank": np.sum(values**2) / values[0] ** 2 if values[0] else 0.0,
        "polar_error": np.linalg.norm(gram - np.eye(short)) / short**0.5,
    }


POLAR = functools.partial(polar_factor, steps=6)


@pytest.fixture(scope="module")
def measured():
    _, (now, params) = states()
    found = measure(now, params, NUMBERS, polar=POLAR)
    return found, optax.tree.get(now, "trace")


@pytest.mark.extended
@pytest.mark.parametrize("leaf", NAMES)
def test_measurements_are_those_of_an_svd(measured, leaf):
    found, now = measured
    for index, matrix in enumerate(leaves.matrices(leaf, now[leaf])):
        for name, value in expected_of(matrix).items():
            number = np.ravel(found[name][leaf])[index]
            assert number == pytest.approx(value, rel=1e-3, abs=2e-4), name
    assert isinstance(found[name]["bias"], optax.MaskedNode)


@pytest.mark.extended
@pytest.mark.parametrize("scale", [1e-25, 1e-9, 1e9, 1e25])
def test_the_scale_of_the_momentum_does_not_matter(scale):
    params = {"w": jnp.ones((6, 4))}
    grads = {"w": scale * jnp.eye(6, 4).at[3, 3].set(0)}
    optimizer = orscale(0.1)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    found = measure(state, params)
    assert found["momentum_stable_rank"]["w"] == pytest.approx(3)


@pytest.mark.extended
def test_nothing_is_healthy_about_nan():
    params, optimizer = {"w": jnp.eye(4)}, orscale(0.1)
    _, state = optimizer.update(
        {"w": params["w"] * jnp.nan}, optimizer.init(params), params
    )
    found = measure(state, params)
    assert np.isnan([found[name]["w"] for name in found]).all()


@pytest.mark.extended
def test_stacks_without_broadcasting_and_matrices_without_entries():
    """Which have no singular value, and no error."""
    params = {"stack": np.ones((2, 4, 3), np.float32), "empty": np.ones((1, 0, 4))}
    numbers = {name: MuonDimensionNumbers(1, 2) for name in params}
    optimizer = orscale(0.1, weight_dimension_numbers=numbers)
    _, state = optimizer.update(params, optimizer.init(params), params)
    with jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        found = measure(state, params, numbers)
    for tree in found.values():
        assert tree["stack"].shape == (2,) and tree["empty"].tolist() == [0]


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_of_sharded_matrices(kind):
    mesh = mesh_of({"a": 4, "b": 2}, kind)
    params = {"w": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}
    optimizer = orscale(0.1)
    expected = measure(
        optimizer.update(params, optimizer.init(params), params)[1], params
    )
    with jax.set_mesh(mesh):
        here = placed(params, mesh, P("a", "b"))
        _, state = jax.jit(optimizer.update)(here, optimizer.init(here), here)
        found = measure(state, here)
    for name, tree in expected.items():
        np.testing.assert_allclose(found[name]["w"], tree["w"], rtol=1e-4)


def test_of_two_momenta_none_is_taken():
    optimizer = optax.chain(orscale(1e-2), optax.trace(0.5))
    params = {"w": jnp.eye(3)}
    with pytest.raises(
        ValueError, match=r"two momenta for parameter 'w'.*pass the state"
    ):
        measure(optimizer.init(params), params)


@pytest.mark.parametrize("numbers", [None, by_path({"w": "matrix"})])
def test_parameters_of_other_optimizers_are_masked(numbers):
    ours, sgd = orscale(0.1, weight_dimension_numbers=numbers), optax.trace(0.5)
    alone = {"w": jnp.arange(12.0).reshape(4, 3)}
    others = {"conv": jnp.ones((3, 3, 4)), "sgd": jnp.eye(3), "frozen": jnp.eye(3)}
    kinds = {"w": ours, "conv": optax.adamw(0.1), "frozen": optax.set_to_zero()}
    kinds["sgd"] = optax.chain(sgd, sgd)  # Whose two momenta do not matter.
    params = alone | others
    optimizer = optax.partition(kinds, {name: name for name in params})
    _, state = optimizer.update(params, optimizer.init(params), params)
    _, own = ours.update(alone, ours.init(alone), alone)
    found, expected = measure(state, params, numbers), measure(own, alone)
    for name, tree in expected.items():
        assert found[name] == tree | dict.fromkeys(others, optax.MaskedNode())
    assert tabulate(read(state, params, numbers), measurements=found)["matrix"] == ["w"]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.chain(optax.trace(0.9), orthogonalize(), optax.scale(-0.1)),
    ],
)
def test_of_other_optimizers_with_momentum(optimizer):
    gradient = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    params = {"w": jnp.ones((4, 6))}
    _, state = optimizer.update({"w": gradient}, optimizer.init(params), params)
    found = measure(state, params)["momentum_stable_rank"]["w"]
    largest = np.linalg.norm(gradient, 2)
    np.testing.assert_allclose(found, np.sum(gradient**2) / largest**2, rtol=1e-4)


class TestErrors:
    """Inputs that are refused, and what the messages say."""

    def test_no_momentum(self):
        params = {"w": jnp.eye(3)}
        with pytest.raises(ValueError, match=r"no momentum for parameter 'w' of shape"):
            measure(optax.adam(1e-3).init(params), params)
