"""Controls are what they say: step by step, or as a limit of another optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pretrain import controls
from orscale_jax import family, muon, polar_factor

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


@pytest.mark.parametrize("bound", [1.0, 2.0])
def test_orscale_on_normuon_is_normuon_times_the_ratio(bound):
    """A ratio between equal bounds is the same factor everywhere."""
    optimizer = controls.orscale_on_normuon(0.1, r_min=bound, r_max=bound)
    normuon = updates_of(family.normuon(0.1))
    expected = {n: (bound if p.ndim == 2 else 1) * normuon[n] for n, p in PARAMS.items()}
    assert_same(updates_of(optimizer), expected)


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
