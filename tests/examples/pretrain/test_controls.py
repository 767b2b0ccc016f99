"""Controls are what they say: step by step, or as a limit of another optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pretrain import controls
from orscale_jax import muon, orscale, polar_factor
from orscale_jax.diagnostics import layer_classes

PARAMS = {
    "up": jax.random.normal(jax.random.key(0), (8, 16)),
    "down": jax.random.normal(jax.random.key(1), (16, 8)),
    "bias": jnp.ones(8),
}
GRADS = [
    jax.tree.map(lambda p, i=i: jax.random.normal(jax.random.key(i), p.shape), PARAMS)
    for i in (2, 3)
]


def updates_of(optimizer):
    """The last one of two updates."""
    state = optimizer.init(PARAMS)
    for grads in GRADS:
        updates, state = optimizer.update(grads, state, PARAMS)
    return updates


def assert_same(found, expected):
    for name in PARAMS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7)


def test_adamw_with_two_rates_is_adamw_of_either_rate():
    optimizer = controls.adamw_apart(
        optax.constant_schedule(0.1),
        adam_learning_rate=optax.constant_schedule(0.3),
        weight_dimension_numbers=None,
        weight_decay=0.1,
    )
    found = updates_of(optimizer)
    fast, slow = (updates_of(optax.adamw(rate, weight_decay=0.1)) for rate in (0.3, 0.1))
    assert_same(found, slow | {"bias": fast["bias"]})


def test_one_scale_has_one_scale_and_the_decay_of_muon_moonlight():
    schedule = optax.constant_schedule(0.1)
    arguments = {"weight_decay": 0.1, "adam_learning_rate": None}
    found = updates_of(controls.one_scale(schedule, **arguments))
    momentum, nesterov = {}, {}
    for name in ("up", "down"):
        first, second = (grads[name] for grads in GRADS)
        momentum[name] = 0.95 * first + second
        nesterov[name] = 0.95 * momentum[name] + second
    expected = {
        name: -0.1 * (0.1 * PARAMS[name] + 2.0 * polar_factor(nesterov[name]))
        for name in nesterov
    }
    np.testing.assert_allclose(found["up"], expected["up"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["down"], expected["down"], rtol=1e-4, atol=1e-6)
    reference = updates_of(muon(0.1, weight_decay=0.1))
    np.testing.assert_allclose(found["bias"], reference["bias"], rtol=1e-6)


def test_a_scale_between():
    """Two steps with the momentum of Muon+Moonlight, whose s is 0.8 for these shapes."""
    one, moonlight = (
        updates_of(muon(0.1, consistent_rms=rms, weight_decay=0.0)) for rms in (None, 0.2)
    )
    found = updates_of(controls.scale_between(0.1, weight_decay=0.0))
    scale = np.sqrt(2.0 * 0.2 * np.sqrt(16))
    expected = {n: scale * one[n] if p.ndim == 2 else one[n] for n, p in PARAMS.items()}
    assert_same(found, expected)
    np.testing.assert_allclose(moonlight["up"] / one["up"], 0.8, rtol=1e-5)
    decayed = updates_of(controls.scale_between(0.1, weight_decay=0.1))
    np.testing.assert_allclose(
        decayed["up"], found["up"] - 0.01 * PARAMS["up"], rtol=1e-4, atol=1e-6
    )


LAYERS = {
    f"layers_{i}": {"mlp": {"up": {"kernel": w}, "down": {"kernel": w.T}}}
    for i, w in enumerate(jax.random.normal(jax.random.key(4), (3, 8, 16)))
}


def test_the_optimum_of_the_model_is_a_factor_of_each_class():
    updates, plain = (
        build(0.1).update(LAYERS, build(0.1).init(LAYERS), LAYERS)[0]
        for build in (controls.model_optimum, muon)
    )
    factors = controls.MODEL_OPTIMA["dense"]
    for kind in ("up", "down"):
        np.testing.assert_allclose(
            updates["layers_1"]["mlp"][kind]["kernel"],
            factors[f"mlp {kind}"] * plain["layers_1"]["mlp"][kind]["kernel"],
            rtol=1e-5,
        )
    assert set(jax.tree.leaves(layer_classes(LAYERS))) <= factors.keys()
    assert all(0 < f < 2.5 for t in controls.MODEL_OPTIMA.values() for f in t.values())


@pytest.mark.parametrize("optimizer", [muon, orscale])
def test_twice_the_decay_of_the_matrices_alone(optimizer):
    arguments = {"weight_decay": 0.1, "adam_learning_rate": None}
    found = updates_of(controls.twice_the_decay(0.1, optimizer=optimizer, **arguments))
    one, two = (updates_of(optimizer(0.1, weight_decay=decay)) for decay in (0.1, 0.2))
    assert_same(found, two | {"bias": one["bias"]})
    assert np.any(one["bias"] != two["bias"])


def test_rounding_to_nearest_loses_small_updates():
    optimizer = controls.round_to_nearest(optax.sgd(1e-4))
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -1e-4)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["w"], 1)


def test_stochastic_rounding_is_right_on_average():
    """Each weight is at one of its two neighbours; their mean is the float32 weight."""
    optimizer = controls.round_stochastically(optax.sgd(1.0))
    params = {"w": jnp.full(10_000, -1.5, jnp.bfloat16)}
    step = 2.0**-9  # A quarter of the distance of the neighbours.
    grads = {"w": jnp.full(10_000, -step, jnp.float32)}
    state = optimizer.init(params)
    updates, after = optimizer.update(grads, state, params)
    new = optax.apply_updates(params, updates)["w"].astype(jnp.float32)
    assert set(np.unique(new).tolist()) == {-1.5, -1.5 + 2.0**-7}
    np.testing.assert_allclose(new.mean(), -1.5 + step, atol=2e-4)
    again, _ = optimizer.update(grads, state, params)
    np.testing.assert_array_equal(again["w"], updates["w"])
    later, _ = optimizer.update(grads, after, params)
    assert np.any(later["w"] != updates["w"])
