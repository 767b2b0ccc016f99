"""Steps of a model's parameters, in which every one of them has to change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax import orscale


def squares(y, seed=3):
    """A loss whose gradient differs from entry to entry."""
    return jnp.mean(jnp.square(y - jax.random.normal(jax.random.key(seed), y.shape)))


def assert_all_change(before, after):
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.isfinite(new).all()
        assert not np.array_equal(old, new)


def train(params, loss, numbers, steps=2, rate=0.02):
    """The parameters after some steps of orscale."""
    optimizer = orscale(rate, weight_dimension_numbers=numbers)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    before, state = params, jax.jit(optimizer.init)(params)
    for _ in range(steps):
        params, state = step(params, state)
    assert_all_change(before, params)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(state))
    return params
