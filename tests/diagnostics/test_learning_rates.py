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


def nested(rate):
    return optax.inject_hyperparams(lambda learning_rate: injected(0.1 * learning_rate))(
        learning_rate=rate
    )


scale = optax.inject_hyperparams(lambda learning_rate: optax.scale(learning_rate))


def behind_another(rate):
    return optax.chain(scale(learning_rate=1.0), injected(rate))


def before_another(rate):
    return optax.chain(injected(rate), scale(learning_rate=1.0))


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "build, slow, fast, given",
    [
        (orscale, 0.01, 0.1, {"slow": 0.01, "fast": 0.1}),
        (orscale, 0.01, SCHEDULE, {"slow": 0.01, "fast": SCHEDULE}),
        (orscale, SCHEDULE, SCHEDULE, {"slow": SCHEDULE, "fast": SCHEDULE}),
        (orscale, SCHEDULE, SCHEDULE, SCHEDULE),
        (orscale, 0.1, 0.1, 0.1),
        (orscale, PARTIAL, PARTIAL, PARTIAL),
        (orscale, PARTIAL, PARTIAL, {"slow": PARTIAL, "fast": PARTIAL}),
        (injected, 0.01, 0.1, {"slow": 0.01, "fast": 0.1}),
        (injected, SCHEDULE, SCHEDULE, None),
        *((build, 0.01, 0.1, None)
          for build in (injected, nested, behind_another, before_another)),
    ],
)  # fmt: skip
def test_relative_steps_are_what_the_weights_have_done(build, slow, fast, given):
    state, params, moved = after_two_steps(build, slow, fast)
    arguments = {} if given is None else {"learning_rate": given}
    found = jax.jit(functools.partial(read, **arguments))(state, params).relative_step
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, moved)


def test_without_a_rate_there_are_no_relative_steps():
    state, params, _ = after_two_steps(orscale, 0.01, 0.1)
    assert read(state, params).relative_step is None


def of_label(label):
    def build(learning_rate):
        return (injected if learning_rate == label else orscale)(learning_rate)

    return build


@pytest.mark.parametrize(
    "build, slow, fast, given, message",
    [
        (orscale, 0.01, SCHEDULE, 0.1, "some groups have a schedule and others do not"),
        (orscale, 0.01, SCHEDULE, SCHEDULE, "some groups have a schedule and others"),
        (injected, 0.01, 0.1, 0.1, "leave learning_rate out"),
        (of_label(0.1), 0.01, 0.1, None, "of some matrices, but not that of 'a.w'"),
        (orscale, 0.01, 0.1, {"slow": 0.1}, "no entry for 'b.v' in the group 'fast / ma"),
        (orscale, 0.01, 0.1, {"slow": 0.1, "fast": None}, "has no entry for 'b.v'"),
        (orscale, 0.01, 0.1, {"c": 0.1}, "pass a number, a schedule, or a mapping from"),
        (orscale, 0.01, 0.1, np.ones(2), "pass a number, a schedule, or a mapping from"),
        (orscale, 0.01, 0.1, {"slow": SCHEDULE, "fast": 1}, "has no count for it"),
    ],
)
def test_what_must_be_wrong_is_refused(build, slow, fast, given, message):
    state, params, _ = after_two_steps(build, slow, fast)
    with pytest.raises(ValueError, match=message):
        read(state, params, learning_rate=given)


def test_several_injected_beside_the_ratios():
    optimizer = optax.chain(orscale(1.0), scale(0.1), scale(0.5))
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match=r"several learning rates, none .*: pass a num"):
        read(state, PARAMS)
    assert read(state, PARAMS, learning_rate=0.05).relative_step is not None
