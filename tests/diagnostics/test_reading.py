"""What ``read`` finds, against the oracle in float64 on saved weights and momenta."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import orscale
from orscale_jax.diagnostics import read, summarize
from orscale_jax.transforms.trust_ratio import R_MAX, R_MIN
from tests import leaves, oracle
from tests.everything import OPTIMIZERS
from tests.runs import AUTO, EXPLICIT, has_ratios, mesh_of, placed

RATE = 0.1


def check(steps, names):
    """Compare readings with the oracle on what was saved; the share at r_max."""
    matrices, clipped = {}, []
    for (before, momentum, grads), (after, reading) in steps:
        for name in names:
            trees = (before, momentum, grads, after)
            saved = zip(*(leaves.matrices(name, t[name]) for t in trees), strict=True)
            for index, (weight, trace, gradient, new) in enumerate(saved):
                own = matrices.setdefault((name, index), oracle.Matrix(weight))
                own.weight, own.buffer = np.float64(weight), np.float64(trace)
                own.look(gradient)
                norm, d = np.linalg.norm(new), np.linalg.norm(own.direction)
                expected = {
                    "trust_ratio": own.clipped, "raw_trust_ratio": own.r,
                    "calibration": own.c, "weight_norm": norm, "direction_norm": d,
                    "relative_step": RATE * own.clipped * d / np.linalg.norm(weight),
                    "growth": norm / own.first_weight_norm, "at_r_min": own.r <= R_MIN,
                    "at_r_max": own.r >= R_MAX, "started": True, "anchored": True,
                }  # fmt: skip
                for field, value in expected.items():
                    found = np.ravel(getattr(reading, field)[name])[index]
                    assert found == pytest.approx(value, rel=1e-5), (name, field)
                clipped.append(own.r >= R_MAX)
    return np.mean(clipped)


def stepped(optimizer, params, numbers, count):
    """Steps as :func:`check` takes them."""

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, read(state, params, numbers, learning_rate=RATE)

    state = jax.jit(optimizer.init)(params)
    for index in range(count):
        # The first are the same, so that later directions differ, and ratios fall.
        grads = {name: leaves.random_tree(index // 4)[name] for name in params}
        grads = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), grads, params)
        saved = params, optax.tree.get(state, "trace"), grads
        params, state, reading = step(params, state, grads)
        yield saved, (params, reading)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("names", [("tall", "layers", "fused"), (*leaves.KINDS,)])
def test_readouts_are_those_of_saved_weights_and_momenta(names):
    tree = leaves.random_tree(0, 0.005)
    params = {name: tree[name] for name in (*names, "bias")}
    numbers = {name: leaves.DIMENSIONS[name] for name in params}
    optimizer = orscale(RATE, weight_dimension_numbers=numbers)
    assert check(stepped(optimizer, params, numbers, 8), names) > 0.1


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_on_8_devices(kind):
    specs = dict.fromkeys(("tall", "layers", "fused"), P("b", "a"))
    specs |= {"experts": P("a", None, "b"), "grouped_query": P("a", "b"), "bias": P("b")}
    mesh, whole = mesh_of({"a": 2, "b": 4}, kind), leaves.random_tree(0, 0.005)
    with jax.set_mesh(mesh):
        params = placed({name: whole[name] for name in specs}, mesh, specs)
        numbers = {name: leaves.DIMENSIONS[name] for name in specs}
        optimizer = orscale(RATE, weight_dimension_numbers=numbers)
        optimizer.init(params)  # It sees how they are sharded.
        assert check(stepped(optimizer, params, numbers, 6), [*specs][:-1]) > 0


@pytest.mark.extended
def test_other_parameters_are_masked():
    params = {"kernel": jnp.eye(3), "bias": jnp.ones(3), "embed": jnp.ones((4, 3))}
    reading = read(orscale(1e-3).init(params), params, learning_rate=1e-3)
    for tree in reading:
        chex.assert_trees_all_equal_structs(
            tree, {"kernel": 0.0, "bias": optax.MaskedNode(), "embed": optax.MaskedNode()}
        )


class TestBeforeAndWithout:
    """States before the first step, and matrices without update, scale or anchor."""

    def test_before_the_first_step(self):
        params = {"w": 3 * jnp.eye(2)}
        reading = read(orscale(0.1).init(params), params, learning_rate=0.1)
        expected = {
            "trust_ratio": 1, "raw_trust_ratio": 1, "calibration": 0,
            "weight_norm": 3 * 2**0.5, "direction_norm": 0, "relative_step": 0,
            "growth": 1, "at_r_min": 0, "at_r_max": 0, "started": 0, "anchored": 0,
        }  # fmt: skip
        found = {name: tree["w"] for name, tree in reading._asdict().items()}
        chex.assert_trees_all_close(found, expected, rtol=1e-6)

    def states(self, optimizer, weight, gradients):
        params = {"w": jnp.asarray(weight)}
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update({"w": gradient}, state, params)
            params = optax.apply_updates(params, updates)
            yield read(state, params, Dims(-2, -1), learning_rate=0.1), params

    @pytest.mark.extended
    def test_an_expert_without_tokens(self):
        experts, one = np.stack([np.eye(4), np.eye(4)]), np.eye(4)
        grads = [np.stack([one, 0 * one]), np.stack([one, 0 * one]), np.stack([one, one])]
        optimizer = orscale(0.1, weight_dimension_numbers=Dims(-2, -1))
        readings = [r for r, _ in self.states(optimizer, experts, grads)]
        found = [(r.started["w"].tolist(), r.anchored["w"].tolist()) for r in readings]
        assert found == [([True, False],) * 2] * 2 + [([True, True],) * 2]
        assert [float(r.growth["w"][1]) for r in readings[:2]] == [1, 1]
        assert [float(r.relative_step["w"][1]) for r in readings[:2]] == [0, 0]
        # W₀ is the weight at the first direction, of which it is a step away now.
        assert readings[2].growth["w"][1] == pytest.approx(
            1 - 0.1 * (0.1 + 0.4), rel=1e-2
        )

    def test_a_matrix_that_starts_from_zero(self):
        grads = [np.eye(3)] * 3
        optimizer = orscale(0.1, weight_decay=0.0)
        seen = list(self.states(optimizer, np.zeros((3, 3)), grads))
        assert [bool(r.anchored["w"]) for r, _ in seen] == [False] * 3
        assert all(np.isinf(r.calibration["w"]) for r, _ in seen)
        # W₀ is the first that is not zero, after one step; each step is as large.
        growth = [float(r.growth["w"]) for r, _ in seen]
        np.testing.assert_allclose(growth, [1, 2, 3], rtol=1e-5)

    @pytest.mark.extended
    def test_relative_steps_of_a_matrix_that_starts_from_zero(self):
        """Infinite at first, left out of the statistics, and 0 at a rate of 0."""
        params, rate = {"w": jnp.eye(3), "z": jnp.zeros((3, 3))}, lambda t: 0.1 * t
        grads, optimizer = {"w": jnp.eye(3), "z": jnp.eye(3)}, orscale(rate)
        state = optimizer.init(params)
        steps, means = [], []
        with jax.debug_nans(True):
            for _ in range(3):
                updates, state = optimizer.update(grads, state, params)
                params = optax.apply_updates(params, updates)
                found = read(state, params, learning_rate=rate)
                steps.append(float(found.relative_step["z"]))
                means.append(summarize(found)["optimizer/relative_step/mean"])
                own = float(found.relative_step["w"])
                if not np.isfinite(steps[-1]):
                    assert means[-1] == own
        assert steps[:2] == [0, np.inf] and 0 < steps[2] < 10
        assert np.isfinite(means).all()

    @pytest.mark.extended
    def test_without_calibration(self):
        optimizer = orscale(0.1, calibrate=False)
        _, (second, params) = self.states(optimizer, np.eye(4), [np.eye(4)] * 2)
        assert not second.anchored["w"] and second.calibration["w"] == 1
        grown = np.linalg.norm(params["w"]) / 2
        assert second.growth["w"] == pytest.approx(grown, rel=1e-5)

    def test_a_direction_that_is_not_finite(self):
        grads = [np.eye(3), np.full((3, 3), np.nan)]
        _, (reading, _) = self.states(orscale(0.1), np.eye(3), grads)
        assert np.isnan(reading.raw_trust_ratio["w"])
        assert np.isnan(reading.weight_norm["w"])
        assert not reading.at_r_max["w"] and not reading.at_r_min["w"]

    @pytest.mark.quick_first_case
    @pytest.mark.parametrize("scale, bound", [(1e-3, "at_r_max"), (1e2, "at_r_min")])
    def test_at_a_bound(self, scale, bound):
        optimizer = orscale(0.0, calibrate=False, r_min=0.5, r_max=1.5, weight_decay=0)
        flags = {"at_r_max": 1e2, "at_r_min": 1e-3}
        [(reading, _)] = self.states(optimizer, flags[bound] * np.eye(3), [np.eye(3)])
        found = {name: bool(getattr(reading, name)["w"]) for name in flags}
        assert found == {name: name == bound for name in flags}


def gradients(params, step):
    return jax.tree.map(lambda p: jnp.roll(p, step) + 0.1, params)


def trained(optimizer, params, steps=3):
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(gradients(params, step), state, params)
        before, params = params, optax.apply_updates(params, updates)
    return state, before, params


TREE = {"w": jnp.arange(12.0).reshape(4, 3) / 10, "b": jnp.ones(3)}


class TestOptimizers:
    """Muon and the relatives, as far as a quantity exists."""

    @pytest.mark.quick_first_case
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_relative_step_is_what_the_weights_have_done(self, name):
        # Without decay also those that decouple it have no other update than r̂D.
        decay = {} if name == "hyperball" else {"weight_decay": 0.0}
        optimizer = OPTIMIZERS[name](0.1, **decay)
        state, before, params = trained(optimizer, TREE)
        reading = read(state, params, learning_rate=0.1)
        norms = [np.linalg.norm(np.float64(tree["w"])) for tree in (before, params)]
        assert reading.weight_norm["w"] == pytest.approx(norms[1], rel=1e-5)
        if has_ratios(state):
            moved = np.linalg.norm(np.float64(params["w"]) - np.float64(before["w"]))
            found = reading.relative_step["w"]
            assert found == pytest.approx(moved / norms[0], rel=1e-4)
            first = np.linalg.norm(np.float64(TREE["w"]))
            assert reading.growth["w"] == pytest.approx(norms[1] / first, rel=1e-5)
        else:
            fields = {
                name for name, tree in reading._asdict().items() if tree is not None
            }
            expected = {"growth"} if name == "hyperball" else set()
            assert fields == {"weight_norm", "started"} | expected


class TestWrappers:
    """The state inside of Optax's and Flax's wrappers."""

    def expected(self):
        state, _, params = trained(orscale(0.1), TREE)
        return read(state, params, learning_rate=0.1)

    @pytest.mark.extended
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda o: optax.chain(optax.clip_by_global_norm(1e9), o),
            lambda o: optax.MultiSteps(o, 1).gradient_transformation(),
            lambda o: optax.partition({"all": o}, lambda tree: "all"),
        ],
    )
    def test_of_optax(self, wrap):
        state, _, params = trained(wrap(orscale(0.1)), TREE)
        found = read(state, params, learning_rate=0.1)
        chex.assert_trees_all_close(found, self.expected(), rtol=1e-6)

    def test_train_state(self):
        train_state = TrainState.create(apply_fn=None, params=TREE, tx=orscale(0.1))
        for step in range(3):
            grads = gradients(train_state.params, step)
            train_state = train_state.apply_gradients(grads=grads)
        found = read(train_state, train_state.params, learning_rate=0.1)
        chex.assert_trees_all_close(found, self.expected(), rtol=1e-6)


@pytest.mark.extended
@pytest.mark.compiled
def test_nothing_is_sent_to_the_host_and_nothing_compiled_again():
    optimizer = orscale(optax.linear_schedule(0.1, 0.0, 9))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, read(state, params, learning_rate=0.1)

    params, state = TREE, optimizer.init(TREE)
    text = step.lower(params, state).compile().as_text()
    assert not [
        word for word in ("outfeed", "infeed", "send(", "callback") if word in text
    ]
    for _ in range(3):
        params, state, _ = step(params, state)


@pytest.mark.compiled
def test_a_donated_step_deletes_no_reading():
    optimizer, params = orscale(0.1), jax.tree.map(jnp.array, TREE)
    state = optimizer.init(params)
    assert "copy" not in str(jax.make_jaxpr(read)(state, params))
    update = jax.jit(optimizer.update, donate_argnums=1)
    reading, inside = read(state, params), jax.jit(read)(state, params)
    _, after = update(params, state, params)
    assert optax.tree.get(state, "numbers")["w"].is_deleted() and after
    chex.assert_trees_all_close(jax.device_get(reading), inside, rtol=1e-6)


def test_a_rate_in_the_state_is_not_fetched(monkeypatch):
    """Outside of jit, that would wait for the step."""
    state, _, params = trained(optax.inject_hyperparams(orscale)(0.1), TREE)
    expected = read(state, params, learning_rate=0.1)
    monkeypatch.setattr(jax, "device_get", None)
    assert read(state, params).relative_step == expected.relative_step


W = {"w": jnp.ones((3, 4))}


@pytest.mark.parametrize(
    "optimizer, trained_on, params, message",
    [
        (optax.adam(1e-3), TREE, TREE, "pass the state of an optimizer of ors"),
        *((orscale(1e-3), tree, tree, "has no matrices: there is nothing to read")
          for tree in ({}, {"b": jnp.ones(3)}, jnp.ones(3))),
        (orscale(1e-3), W | {"v": jnp.ones((3, 4))}, W, "does not have, such as 'v'"),
    ],
)  # fmt: skip
def test_another_optimizer_and_other_parameters(optimizer, trained_on, params, message):
    with pytest.raises(ValueError, match=message):
        read(optimizer.init(trained_on), params)


def test_other_dimension_numbers():
    params = {"w": jnp.ones((3, 4, 5))}
    state = orscale(1e-3, weight_dimension_numbers=Dims(1, 2)).init(params)
    with pytest.raises(ValueError, match=r"'w' of shape \(3, 4, 5\) is ambiguous"):
        read(state, params)
    match = r"is matrices of batch shape \(5,\), but in the state matrices of batch sh"
    with pytest.raises(ValueError, match=match):
        read(state, params, Dims(0, 1))


@pytest.mark.parametrize(
    "rate, message",
    [
        *((rate, r"^learning_rate=.*a number")
          for rate in ("0.1", True, -1.0, np.nan, -np.inf, 1j)),
        (optax.constant_schedule(1e-3), "the state has no count"),
    ],
)  # fmt: skip
def test_no_rate(rate, message):
    with pytest.raises(ValueError, match=message):
        read(orscale(1e-3).init(TREE), TREE, learning_rate=rate)
