"""The router, the balancing of its loads, and products by groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.pretrain.models import experts, moonlight
from tests.examples.pretrain import tiny
from tests.examples.pretrain.recorded_models import (
    expert_layers,
    recorded,
    recorded_moonlight,
    split_tokens,
)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", ["moe", "moe_six_experts"])
def test_selected_experts_are_the_recorded_ones(name, monkeypatch):
    recording = recorded(name)
    model, _ = recorded_moonlight(name, scan=False, dtype="float32")
    selected = []
    route = moonlight.Mixture.route

    def spy(*arguments):
        experts, weights, routing = route(*arguments)
        selected.append(experts)
        return experts, weights, routing

    @nnx.jit
    def selection(model, tokens):
        model.hidden(tokens)
        return selected

    monkeypatch.setattr(moonlight.Mixture, "route", spy)
    layers = selection(model, split_tokens(recording)[0])
    for layer, found in zip(expert_layers(recording), layers, strict=True):
        expected = recording[f"selected/{layer}"]
        found = np.asarray(found).reshape(expected.shape)
        np.testing.assert_array_equal(np.sort(found), np.sort(expected))


def test_biases_move_against_the_loads_and_those_of_the_public_code_with_them():
    """DeepSeek-V3 lowers the bias of an overloaded expert; the other raises it."""
    for name in ("moe", "moe_six_experts"):
        recording = recorded(name)
        for layer in expert_layers(recording):
            bias, fraction = recording[f"bias/{layer}"], recording[f"fraction/{layer}"]
            overload = np.sign(fraction - fraction.mean())
            ours = moonlight.balanced(bias, jnp.asarray(fraction), rate=1e-2) - bias
            np.testing.assert_allclose(ours, -1e-2 * overload, atol=1e-7)
            public = recording[f"bias_after_reference/{layer}"] - bias
            np.testing.assert_allclose(
                public, 1e-2 * (overload - overload.mean()), atol=1e-7
            )


def loads_under(rule, steps=300):
    """The loads of a skewed router, first and last, while a rule moves its biases."""
    config = tiny.MOONLIGHT
    layer = moonlight.Mixture(config, nnx.Rngs(0))
    draw = np.random.default_rng(0)
    offset = draw.normal(size=config.width) / 2  # What all tokens share favours some.
    x_SxBxTxD = jnp.asarray(
        draw.normal(size=(steps, 8, 32, config.width)) + offset, jnp.float32
    )

    @jax.jit
    def fractions(x_SxBxTxD):
        def step(bias_E, x_BxTxD):
            fraction_E = layer.route(x_BxTxD, bias_E)[2].fraction
            return rule(bias_E, fraction_E), fraction_E

        return jax.lax.scan(step, jnp.zeros(config.experts), x_SxBxTxD)[1]

    found = fractions(x_SxBxTxD)
    return found[0], found[-20:].mean(0)


@pytest.mark.extended
def test_loads_become_even_under_the_rule_and_uneven_under_its_opposite():
    first, last = loads_under(functools.partial(moonlight.balanced, rate=3e-3))
    assert first.max() > 2 / 8 and first.min() < 0.7 / 8
    assert last.max() < 1.1 / 8 and last.min() > 0.9 / 8
    _, opposite = loads_under(functools.partial(moonlight.balanced, rate=-3e-3))
    assert opposite.min() == 0 and opposite.max() > first.max()


@pytest.mark.extended
@pytest.mark.parametrize(
    "sizes", [[3, 0, 9, 4], [0, 0, 0, 16], [16, 0, 0, 0], [4, 4, 4, 4]]
)
def test_products_in_blocks_are_those_of_ragged_dot(sizes, monkeypatch):
    """Also their gradients, empty groups, and groups of several blocks."""
    monkeypatch.setattr(experts, "BLOCK", 4)
    draw = np.random.default_rng(0)
    x, w, weight = (
        jnp.asarray(draw.normal(size=shape), jnp.float32)
        for shape in ((16, 5), (4, 5, 3), (16, 3))
    )

    def value_and_grad(product):
        def total(x, w):
            y = product(x, w, jnp.asarray(sizes))
            return jnp.sum(weight * y), y

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(x, w)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        value_and_grad(experts.in_blocks),
        value_and_grad(jax.lax.ragged_dot),
    )


@pytest.mark.compiled
def test_an_accelerator_takes_ragged_dot_and_a_cpu_blocks():
    arguments = jnp.ones((256, 8)), jnp.ones((4, 8, 8)), jnp.full(4, 64)
    traced = jax.jit(experts.grouped_product).trace(*arguments)
    assert "ragged_dot" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_dot" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.extended
def test_rows_of_no_local_expert_take_no_part():
    """Parts on devices with some of the experts add up to the whole."""
    draw = np.random.default_rng(0)
    x, weight, gate, up, down = (
        jnp.asarray(draw.normal(size=shape), jnp.float32)
        for shape in ((2, 5, 6), (2, 5, 2), (4, 6, 3), (4, 6, 3), (4, 3, 6))
    )
    selected = jnp.asarray(draw.integers(0, 4, (2, 5, 2)))
    routed = jax.jit(experts.routed)
    whole = routed(x, selected, weight, gate, up, down)
    parts = [
        routed(x, selected - i, weight, gate[i:j], up[i:j], down[i:j])
        for i, j in ((0, 2), (2, 4))
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-5)
    x, weight, gate, up, down = map(np.asarray, (x, weight, gate, up, down))
    by_hand = np.zeros(x.shape)
    for place in np.ndindex(2, 5, 2):
        expert, token = int(selected[place]), x[place[:2]]
        g = token @ gate[expert]
        h = g / (1 + np.exp(-g)) * (token @ up[expert])
        by_hand[place[:2]] += weight[place] * (h @ down[expert])
    np.testing.assert_allclose(whole, by_hand, rtol=1e-4, atol=1e-4)
