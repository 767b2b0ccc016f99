"""Learning rates of groups: relative steps against W before and after the update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orscale_jax import orscale
from orscale_jax.diagnostics import read

PARAMS = {"a": {"w": jnp.eye(3)}, "b": {"w": 2.0 * jnp.eye(4), "v": jnp.eye(2, 4)}}
LABELS = {"a": "slow", "b": "fast"}
SCHEDULE = optax.linear_schedule(0.02, 0.5, 2)


@functools.cache
def after_two_steps(build, slow, fast):
    """State, parameters, and the relative steps that the weights have taken."""
    groups = {"slow": build(slow), "fast": build(fast)}
    optimizer, params = optax.partition(groups, LABELS), PARAMS
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(PARAMS, state, params)
        before, params = params, optax.apply_updates(params, updates)
    moved = jax.tree.map(
        lambda u, w: np.linalg.norm(u) / np.linalg.norm(w), updates, before
    )
    return state, params, moved


injected = optax.inject_hyperparams(orscale)
# Such a schedule is a tree, whose leaves are its arguments.
PARTIAL = jax.tree_util.Partial(lambda start, step: start * (1 + step), 0.01)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "build, slow, fast, given",
    [
        (orscale, 0.01, 0.1, {"a": 0.01, "b": {"w": 0.1, "v": 0.1}}),
        (orscale, 0.01, 0.1, {"a": 0.01, "b": 0.1}),
        (orscale, SCHEDULE, SCHEDULE, SCHEDULE),
        (orscale, 0.1, 0.1, 0.1),
        (orscale, PARTIAL, PARTIAL, PARTIAL),
    ],
)  # fmt: skip
def test_relative_steps_are_what_the_weights_have_done(build, slow, fast, given):
    state, params, moved = after_two_steps(build, slow, fast)
    reading = jax.jit(functools.partial(read, learning_rate=given))(state, params)
    found = reading.relative_step
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, moved)


def test_without_a_rate_there_are_no_relative_steps():
    state, params, _ = after_two_steps(orscale, 0.01, 0.1)
    assert read(state, params).relative_step is None


@pytest.mark.parametrize(
    "given, message",
    [
        ({"c": 0.1}, "or a tree like the parameters"),
        (np.ones(2), "pass a number for each parameter"),
        (SCHEDULE, "has no count for it"),
    ],
)
def test_what_must_be_wrong_is_refused(given, message):
    state, params, _ = after_two_steps(orscale, 0.01, 0.1)
    with pytest.raises(ValueError, match=message):
        read(state, params, learning_rate=given)


def test_an_injected_rate():
    """Also beside a parameter that is called like it; of two rates, none is taken."""
    optimizer, params = injected(0.1), {"learning_rate": jnp.eye(3)}
    _, state = optimizer.update(params, optimizer.init(params), params)
    wanted = read(state, params, learning_rate=0.1).relative_step["learning_rate"]
    assert read(state, params).relative_step["learning_rate"] == wanted > 0
    state, params, _ = after_two_steps(injected, 0.01, 0.1)
    assert read(state, params).relative_step is None
