"""`learning_rate_multipliers` of the optimizers: each parameter as at its own rate."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import convert_state, family, muon, orscale, state_shardings
from orscale_jax.diagnostics import read
from tests.runs import (
    AUTO,
    EXPLICIT,
    FAMILY,
    NUMBERS,
    assert_close,
    mesh_of,
    placed,
    readout,
    run,
    tree,
)

# Powers of two, so that nothing is rounded where decay and ratio see the same weights.
PER_LAYER = np.array([1.0, 2.0, 4.0])
RULES = {"^w$": 0.5, "^b$": 2.0, "stack": PER_LAYER}
OPTIMIZERS = {"orscale": orscale, "muon": muon, **FAMILY}
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 3)


def build(make, rate, multipliers=RULES, numbers=NUMBERS, **arguments):
    return make(
        rate,
        weight_dimension_numbers=numbers,
        learning_rate_multipliers=multipliers,
        **arguments,
    )


def train(optimizer, steps=3):
    return run(optimizer, tree(0), steps, tree)[-1][0]


def times(rate, factor):
    if callable(rate):
        return lambda count: factor * rate(count)
    return factor * rate


def apart(make, rate, **arguments):
    """The parameters, each of a run in which all have its own rate."""
    at = {
        f: train(build(make, times(rate, f), None, **arguments)) for f in (0.5, 1, 2, 4)
    }
    stack = [at[factor]["stack"][layer] for layer, factor in enumerate(PER_LAYER)]
    return {"w": at[0.5]["w"], "b": at[2]["b"], "stack": jnp.stack(stack)}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("rate", [SCHEDULE, 1e-2], ids=["schedule", "number"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_parameter_is_as_at_its_own_rate(name, rate):
    make = OPTIMIZERS[name]
    found, expected = train(build(make, rate)), apart(make, rate)
    assert_close(found, expected, atol=1e-6)


@pytest.mark.extended
def test_adamw_has_its_own_rate_and_the_multiplier():
    optimizer = build(orscale, 1e-2, {"^b$": 2.0}, adam_learning_rate=SCHEDULE)
    expected = build(orscale, 1e-2, None, adam_learning_rate=times(SCHEDULE, 2.0))
    jax.tree.map(np.testing.assert_array_equal, train(optimizer), train(expected))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("make", [orscale, muon, family.hyperball])
def test_without_it_the_state_has_nothing_of_it(make):
    state = build(make, SCHEDULE, None).init(tree(0))
    assert not optax.tree.get_all_with_path(state, "learning_rate_multiplier")
    ones = build(make, SCHEDULE, {}).init(tree(0))
    extra = readout(ones, "learning_rate_multiplier")
    assert sorted(map(np.shape, jax.tree.leaves(extra))) == [(), (3,)]
    assert len(jax.tree.leaves(ones)) == len(jax.tree.leaves(state)) + 2


@pytest.mark.extended
def test_inject_hyperparams_leaves_a_mapping_alone():
    injected = optax.inject_hyperparams(orscale)
    optimizer = build(injected, SCHEDULE)
    state = optimizer.init(tree(0))
    assert "learning_rate_multipliers" not in state.hyperparams
    expected = train(build(orscale, SCHEDULE))
    # The rate is an argument here and a constant there: two programs, which round apart.
    assert_close(train(optimizer), expected, atol=1e-6)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=str)
def test_on_a_mesh(kind):
    mesh = mesh_of({"layers": 2, "x": 2}, kind)
    shapes = {"stack": (4, 8, 4), "gains": (4, 8), "b": (4,)}
    specs = {"stack": P("layers", None, "x"), "gains": P("layers", "x"), "b": P("x")}
    numbers = {"stack": NUMBERS["stack"], "gains": None, "b": None}
    factors = {"stack|gains": np.array([1.0, 2.0, 4.0, 8.0]), "b": 0.5}
    optimizer = build(orscale, 1e-2, factors, numbers)
    alone = [tree(seed, shapes=shapes) for seed in (0, 1)]
    expected, new = optimizer.update(alone[1], optimizer.init(alone[0]), alone[0])
    params, grads = (placed(values, mesh, specs) for values in alone)
    with jax.set_mesh(mesh):
        of_state = state_shardings(optimizer, params)
        state = jax.jit(optimizer.init, out_shardings=of_state)(params)
        updates, state = jax.jit(optimizer.update)(grads, state, params)
    found, wanted = (
        readout(s, "learning_rate_multiplier")["stack"] for s in (state, new)
    )
    np.testing.assert_array_equal(found, wanted)
    for name in shapes:
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-4, atol=1e-6)
        assert kind == AUTO or updates[name].sharding.spec == specs[name]
    assert kind == AUTO or found.sharding.spec == P("layers")


@pytest.mark.extended
def test_boxed_parameters():
    boxes = {"up": nn.Partitioned(jnp.ones((3, 4, 6)), names=("layers", None, "x"))}
    optimizer = build(orscale, 1.0, {"up": PER_LAYER}, {"up": NUMBERS["stack"]})
    state = optimizer.init(boxes)
    box = readout(state, "learning_rate_multiplier")["up"]
    assert isinstance(box, nn.Partitioned) and box.names == ("layers",)
    updates, _ = optimizer.update(boxes, state, boxes)
    first = updates["up"].value[:, 0, 0]
    np.testing.assert_allclose(first / first[0], PER_LAYER, rtol=1e-6)


@pytest.mark.extended
def test_the_state_shows_the_multipliers_of_the_last_step():
    old, new = build(orscale, 1e-2), build(orscale, 1e-2, {"^w$": 3.0})
    state = old.init(tree(0))
    assert readout(state, "learning_rate_multiplier")["w"] == 0.5
    updates, state = new.update(tree(1), state, tree(0))
    assert readout(state, "learning_rate_multiplier")["w"] == 3.0
    expected, _ = new.update(tree(1), new.init(tree(0)), tree(0))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


@pytest.mark.extended
def test_a_run_that_begins_to_use_them():
    before = build(orscale, SCHEDULE, None)
    [(params, state)] = run(before, tree(0), 1, tree)
    now = build(orscale, SCHEDULE)
    with pytest.raises(ValueError, match="convert_state"):
        now.update(tree(1), state, params)
    converted = convert_state(state, now, params)
    found, _ = now.update(tree(2), converted, params)
    plain, _ = before.update(tree(2), state, params)
    np.testing.assert_array_equal(found["w"], 0.5 * plain["w"])


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.extended
def test_relative_steps_are_right_per_matrix(injected):
    make = optax.inject_hyperparams(orscale) if injected else orscale
    optimizer = build(make, SCHEDULE)
    (before, _), (params, state) = run(optimizer, tree(0), 2, tree)
    given = None if injected else SCHEDULE
    found = read(state, params, NUMBERS, learning_rate=given).relative_step
    for name, axes in {"w": None, "stack": (1, 2)}.items():
        moved = np.linalg.norm(params[name] - before[name], axis=axes)
        expected = moved / np.linalg.norm(before[name], axis=axes)
        np.testing.assert_allclose(found[name], expected, rtol=1e-4)


@pytest.mark.extended
def test_a_donated_state_deletes_no_array_of_the_user():
    factors = jnp.linspace(0.5, 1, 300)
    optimizer = build(orscale, 1e-2, {"x": factors}, {"x": Dims(1, 2)})
    params = {"x": jnp.ones((300, 4, 5))}
    optimizer = optax.apply_if_finite(optimizer, 3)  # Its step may return the old state.
    state = optimizer.init(params)
    jax.jit(optimizer.update, donate_argnums=1)(params, state, params)
    assert not factors.is_deleted()
