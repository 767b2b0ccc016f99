"""`scale_by_path`: each parameter as at its own rate, after any optimizer."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from orscale_jax import convert_state, family, muon, orscale, scale_by_path
from tests.runs import (
    AUTO,
    EXPLICIT,
    NUMBERS,
    assert_close,
    assert_same_bits,
    mesh_of,
    placed,
    run,
    tree,
)

PER_LAYER = np.array([1.0, 2.0, 4.0], np.float32)
LAYERS = PER_LAYER, PER_LAYER.reshape(1, 3, 1)
B = re.compile("^b$")
RULES = {"^w$": 0.5, B: 0.3037, "stack": PER_LAYER}
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 3)
MAKERS = {
    "orscale": lambda rate: orscale(rate, weight_dimension_numbers=NUMBERS),
    "muon": lambda rate: muon(rate, weight_dimension_numbers=NUMBERS),
    "normuon": lambda rate: family.normuon(rate, weight_dimension_numbers=NUMBERS),
    "adamw": lambda rate: optax.adamw(rate),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MAKERS)
def test_updates_are_multiplied_and_rounded_once(name, dtype):
    optimizer = MAKERS[name](SCHEDULE)
    scaled = optax.chain(optimizer, scale_by_path([*RULES.items()]))
    params, grads = tree(0, dtype), tree(1, dtype)
    plain, _ = optimizer.update(grads, optimizer.init(params), params)
    found, state = scaled.update(grads, scaled.init(params), params)
    assert state[1] == optax.EmptyState()
    factors = {"w": 0.5, "b": np.float32(0.3037), "stack": PER_LAYER[:, None, None]}
    wide = {k: factors[k] * plain[k].astype(jnp.float32) for k in plain}
    assert_same_bits(found, jax.tree.map(lambda x: x.astype(dtype), wide))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", [*MAKERS][::-1])
def test_each_parameter_is_as_at_its_own_rate(name):
    def train(rate, *after):
        return run(optax.chain(MAKERS[name](rate), *after), tree(0), 3, tree)[-1][0]

    at = {f: train(lambda count, f=f: f * SCHEDULE(count)) for f in (0.5, 1, 2, 4)}
    layers = [at[factor]["stack"][i] for i, factor in enumerate((1, 2, 4))]
    expected = {"w": at[0.5]["w"], "b": at[2]["b"], "stack": jnp.stack(layers)}
    found = train(SCHEDULE, scale_by_path(RULES | {B: 2.0}))
    assert_close(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "factors", [PER_LAYER, PER_LAYER.reshape(1, 3, 1)], ids=["first", "second"]
)
def test_layers_along_any_axis_traced_masked_and_in_boxes(factors):
    axis = factors.ndim // 2
    boxes = {"up": nn.Partitioned(jnp.ones((3, 3, 6)), names=(None, None, "x"))}
    tree = {"a": boxes, "none": None, "masked": optax.MaskedNode()}

    @jax.jit
    def scaled(factors):
        # What a masked node stands for may have the name.
        stage = scale_by_path({"up": factors, "hidden": 2.0})
        return stage.update(tree, stage.init(tree))[0]

    found = scaled(factors)["a"]["up"]
    assert found.names == boxes["up"].names
    np.testing.assert_array_equal(np.moveaxis(found.value, axis, 0)[:, 0, 0], PER_LAYER)
    assert scale_by_path(RULES).init({}) == optax.EmptyState()


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=str)
def test_on_a_mesh(kind):
    mesh = mesh_of({"layers": 2, "x": 2}, kind)
    shapes = {"stack": (4, 8, 4), "b": (4,)}
    specs = {"stack": P("layers", None, "x"), "b": P("x")}
    stage = scale_by_path({"stack": np.arange(1.0, 5), "b": 0.5})
    whole = tree(0, shapes=shapes)
    expected, _ = stage.update(whole, optax.EmptyState())
    on_mesh = placed(whole, mesh, specs)
    with jax.set_mesh(mesh):
        compiled, _ = jax.jit(stage.update)(on_mesh, optax.EmptyState())
    eager, _ = stage.update(on_mesh, optax.EmptyState())  # Without the mesh in context.
    for found in (compiled, eager):
        assert_same_bits(found, expected)
        assert all(found[name].sharding.spec == specs[name] for name in shapes)


def test_a_running_job_begins_to_use_it():
    before = MAKERS["orscale"](SCHEDULE)
    [(params, state)] = run(before, tree(0), 1, tree)
    now = optax.chain(before, scale_by_path({"w": 0.5}))
    found, _ = now.update(tree(2), convert_state(state, now, params), params)
    plain, _ = before.update(tree(2), state, params)
    assert_same_bits(found, plain | {"w": 0.5 * plain["w"]})


@pytest.mark.parametrize("value", [0, -1, np.inf, np.nan, 1e39, 1e-46, True, "2", None])
def test_numbers_are_refused_at_once(value):
    with pytest.raises(ValueError, match=r"rules\['w'\]=.*pass a positive finite number"):
        scale_by_path({"w": value})


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"w": SCHEDULE}, "optax.partition freezes parameters or gives them a schedule"),
        ({"w": jnp.bfloat16(1.1)}, "has dtype bfloat16, which rounds it"),
        ({"w": np.array([1.0, 0.0])}, r"rules\['w'\]=array"),
        ("w", "pass a mapping, or pairs, from regular expressions to positive numbers"),
        ({"(": 1.0}, r"an expression of rules='\(' is not valid"),
        ({"stak": 2.0}, "'stak' of scale_by_path matches no.*nearest are 'stack', "),
        ({"s|w": 2.0, "stack": 1.0}, "'stack' of scale_by_path decides nothing"),
        ({"stack": np.ones(4)}, r"'stack' of shape \(3, 4, 5\) has shape \(4,\): pass a"),
        ({"b": np.ones((4, 1))}, r"'b' of shape \(4,\) has shape \(4, 1\)"),
    ],
    ids=range(9),
)
def test_what_does_not_fit_is_refused_by_init(rules, message):
    with pytest.raises(ValueError, match=message):
        scale_by_path(rules).init(tree(0))
