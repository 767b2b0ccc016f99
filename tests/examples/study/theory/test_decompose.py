"""What ratios share, what is left, and what each is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.study.theory import decompose
from orscale_jax import muon, orscale
from orscale_jax.diagnostics import read

RNG = np.random.default_rng(0)
SHAPES = {"up": (6, 4), "down": (4, 6), "experts": (3, 5, 5), "bias": (4,)}
CLASSES = {"up": "mlp", "down": "mlp", "experts": "expert", "bias": None}
NUMBERS = {
    "up": optax.contrib.MuonDimensionNumbers(),
    "down": optax.contrib.MuonDimensionNumbers(),
    "experts": optax.contrib.MuonDimensionNumbers(1, 2),
    "bias": None,
}


def normal(scale=1.0):
    return {
        name: jnp.asarray(scale * RNG.normal(size=shape), jnp.float32)
        for name, shape in SHAPES.items()
    }


def low_rank():
    """Gradients of rank 1 for one matrix, of full rank for the others."""
    grads = normal()
    return grads | {"up": jnp.outer(grads["up"][:, 0], grads["up"][0])}


def train(optimizer, first, steps=4):
    """The weights before each update and after the last, and the state."""
    params = normal()
    state = optimizer.init(params)
    history = [params]
    for index in range(steps):
        grads = first if index == 0 else normal()
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history, state


OPTIONS = {"weight_dimension_numbers": NUMBERS}


@pytest.fixture(scope="module")
def run():
    # Without momentum later directions are those of their gradients alone.
    optimizer = orscale(0.3, momentum=0.0, nesterov=False, **OPTIONS)
    history, state = train(optimizer, low_rank())
    return history, read(state, history[-1], NUMBERS, learning_rate=0.3)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(
        float
    )


def norms(params):
    return {
        "up": np.linalg.norm(params["up"]),
        "down": np.linalg.norm(params["down"]),
        "experts": np.linalg.norm(params["experts"], axis=(1, 2)),
    }


@pytest.mark.extended
def test_the_uniform_part_is_the_weighted_geometric_mean(run):
    _, reading = run
    found = decompose(reading, CLASSES)
    r, step = flat(reading.trust_ratio), flat(reading.relative_step)
    weights = step / step.sum()
    uniform = np.exp(np.sum(weights * np.log(r)))
    np.testing.assert_allclose(found.uniform, uniform, rtol=1e-5)
    np.testing.assert_allclose(flat(found.remainder), r / uniform, rtol=1e-5)
    spread = np.sqrt(np.sum(weights * np.log(r / uniform) ** 2))
    np.testing.assert_allclose(found.spread, spread, rtol=1e-4)
    assert found.matrices == 5 and isinstance(found.remainder["bias"], optax.MaskedNode)
    of_class = {"mlp": [0, 4], "expert": [1, 2, 3]}  # In the order of sorted names.
    for label, of in of_class.items():
        w = weights[of] / weights[of].sum()
        expected = np.exp(np.sum(w * np.log(r[of]))) / uniform
        np.testing.assert_allclose(found.class_remainder[label], expected, rtol=1e-5)


@pytest.mark.extended
def test_without_relative_steps_matrices_weigh_the_same(run):
    _, reading = run
    expected = np.exp(np.mean(np.log(flat(reading.trust_ratio))))
    zero = jax.tree.map(jnp.zeros_like, reading.relative_step)
    for steps in (None, zero):
        found = decompose(reading._replace(relative_step=steps))
        np.testing.assert_allclose(found.uniform, expected, rtol=1e-5)
        assert list(found.class_remainder) == ["other"]


@pytest.mark.extended
def test_a_shared_factor_is_all_uniform(run):
    _, reading = run
    found = decompose(reading)
    doubled = jax.tree.map(lambda r: 2 * r, reading.trust_ratio)
    twice = decompose(reading._replace(trust_ratio=doubled))
    np.testing.assert_allclose(twice.uniform, 2 * found.uniform, rtol=1e-6)
    np.testing.assert_allclose(flat(twice.remainder), flat(found.remainder), rtol=1e-5)


def test_factors_are_growth_before_the_update_and_the_directions(run):
    """Against norms of the weights that the run went through."""
    history, reading = run
    found = decompose(reading)
    growth = jax.tree.map(np.divide, norms(history[-2]), norms(history[0]))
    np.testing.assert_allclose(flat(found.growth_factor), flat(growth), rtol=1e-4)
    product = flat(found.growth_factor) * flat(found.direction_factor)
    np.testing.assert_allclose(product, flat(reading.raw_trust_ratio), rtol=1e-6)
    # The matrix anchored on a direction of rank 1 of 4: its growth hides nothing of it.
    assert found.direction_factor["up"] < 0.7
    assert found.direction_factor["down"] > 0.8


def test_it_is_the_same_inside_of_jit(run):
    _, reading = run
    found = jax.jit(lambda reading: decompose(reading, CLASSES))(reading)
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(decompose(reading, CLASSES)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.extended
def test_matrices_without_a_ratio_do_not_count():
    optimizer = orscale(0.1, **OPTIONS)
    grads = normal()
    grads["experts"] = grads["experts"].at[1].set(0)  # An expert without tokens.
    history, state = train(optimizer, grads, steps=1)
    found = decompose(read(state, history[-1], NUMBERS))
    assert found.matrices == 4
    for tree in (found.remainder, found.direction_factor, found.growth_factor):
        np.testing.assert_array_equal(np.isnan(tree["experts"]), [False, True, False])


@pytest.mark.extended
def test_before_the_first_update_nothing_counts():
    params = normal()
    found = decompose(read(orscale(0.1, **OPTIONS).init(params), params, NUMBERS))
    assert found.matrices == 0 and found.uniform == 1
    assert np.isnan(flat(found.remainder)).all() and np.isnan(found.spread)


@pytest.mark.extended
def test_ratios_without_calibration_have_no_factors():
    history, state = train(orscale(0.1, calibrate=False, **OPTIONS), normal(), steps=2)
    found = decompose(read(state, history[-1], NUMBERS))
    assert found.matrices == 5
    assert np.isnan(flat(found.direction_factor)).all()


def test_an_optimizer_without_ratios_is_refused():
    history, state = train(muon(0.1, **OPTIONS), normal(), steps=1)
    with pytest.raises(ValueError, match="optimizer that has trust ratios"):
        decompose(read(state, history[-1], NUMBERS))


@pytest.mark.extended
def test_classes_that_do_not_fit_are_refused(run):
    with pytest.raises(ValueError, match="classes must be a tree"):
        decompose(run[1], {"up": "mlp"})
