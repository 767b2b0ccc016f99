"""Controls are what they say: step by step, or as a limit of another optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pretrain import optimizers
from orscale_jax import muon, orscale, polar_factor

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
    optimizer = optimizers.adamw_apart(
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
    found = updates_of(optimizers.one_scale(schedule, **arguments))
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


@pytest.mark.parametrize("optimizer", [muon, orscale])
def test_twice_the_decay_of_the_matrices_alone(optimizer):
    arguments = {"weight_decay": 0.1, "adam_learning_rate": None}
    found = updates_of(optimizers.twice_the_decay(0.1, optimizer=optimizer, **arguments))
    one, two = (updates_of(optimizer(0.1, weight_decay=decay)) for decay in (0.1, 0.2))
    assert_same(found, two | {"bias": one["bias"]})
    assert np.any(one["bias"] != two["bias"])
