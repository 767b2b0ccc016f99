"""What docs/troubleshooting.md promises of Optax's wrappers around our optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orscale_jax import family, muon, orscale
from tests.runs import NUMBERS, assert_close, assert_same_bits, step_of, tree

RATE, LIMIT = 1e-2, 50.0


def make(build, **arguments):
    return build(
        optax.linear_schedule(RATE, 0.0, 10),
        weight_dimension_numbers=NUMBERS,
        **arguments,
    )


@pytest.mark.quick_first_case
@pytest.mark.parametrize("spike", [1e3, np.nan])
@pytest.mark.parametrize("build", [orscale, muon, family.normuon, family.hyperball])
def test_a_skipped_step_leaves_no_trace(build, spike):
    """Also of a first step, which would set c."""
    inner = make(build)
    optimizer = optax.conditionally_mask(
        inner, lambda step, *, norm, **_: norm <= LIMIT, forward_extra_args=True
    )

    @jax.jit
    def step(params, state, grads):
        norm = optax.tree.norm(grads)
        updates, state = optimizer.update(grads, state, params, norm=norm)
        return optax.apply_updates(params, updates), state

    params, state = tree(0), optimizer.init(tree(0))
    plain = tree(0), inner.init(tree(0))
    for number in range(4):
        if number in (0, 2):
            bad = jax.tree.map(lambda g: spike * g, tree(9))
            after, skipped = step(params, state, bad)
            assert_same_bits((after, skipped.inner_state), (params, state.inner_state))
            state = skipped
        params, state = step(params, state, tree(number + 1))
        plain = step_of(inner)(*plain, tree(number + 1))
        assert_close((params, state.inner_state), plain, atol=1e-7)
    assert state.step == 6


@pytest.mark.extended
def test_the_step_of_a_matrix_is_bounded():
    optimizer = make(muon, weight_decay=0.0, momentum=0.5)
    params, state = tree(0), make(muon).init(tree(0))
    for seed, scale in enumerate((1e-6, 1.0, 1e6)):
        grads = jax.tree.map(lambda g, scale=scale: scale * g, tree(seed))
        updates, state = optimizer.update(grads, state, params)
        for name in ("w", "stack"):
            rms = np.sqrt(np.mean(np.square(updates[name])))
            assert rms < 0.2 * RATE * 1.15  # Newton–Schulz is not exact.


@pytest.mark.parametrize("b2, bound", [(0.95, 1.16), (0.999, 7.3)])
def test_the_step_of_an_entry_of_adamw_is_bounded(b2, bound):
    """The worst gradients: g grows so that m is parallel to v in Cauchy–Schwarz."""
    b1, steps = 0.9, 10_000 if b2 > 0.99 else 500
    limit = (1 - b1) / np.sqrt((1 - b2) * (1 - b1**2 / b2))
    assert round(limit, 2 if b2 < 0.99 else 1) == bound
    worst = jnp.float32((b1 / b2) ** np.arange(60)[::-1])
    grads = jnp.concatenate([jnp.full(steps, worst[0]), worst])
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=0.0)

    def step(state, gradient):
        update, state = adam.update(gradient, state)
        return state, jnp.abs(update)

    _, updates = jax.lax.scan(step, adam.init(jnp.float32(0)), grads)
    assert 0.8 * limit < updates[steps:].max() <= limit * (1 + 1e-3)


@pytest.mark.parametrize("name", ["learning_rate", "adam_learning_rate"])
def test_a_negative_rate_is_told_how_to_ascend(name):
    rates = {"learning_rate": 0.1, name: -0.1}
    with pytest.raises(ValueError, match=rf"{name}=-0\.1 .* optax\.scale\(-1\)"):
        orscale(**rates)


@pytest.mark.parametrize("decay", [0.1, jnp.float32(0.1), lambda count: 0.0])
def test_a_decay_of_adamw_that_the_mask_excludes_is_refused(decay):
    with pytest.raises(ValueError, match=r"adam_weight_decay=.* has no effect"):
        muon(0.1, weight_decay_mask="matrices", adam_weight_decay=decay)
    muon(0.1, weight_decay_mask="matrices", adam_weight_decay=0.0)
