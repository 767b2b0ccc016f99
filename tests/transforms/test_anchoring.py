"""c is anchored where Q is not zero, in every path, and nothing stays zero for ever."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers,
    convert_state,
    family,
    muon,
    orscale,
    orthogonalize,
    scale_by_calibrated_trust_ratio,
    scale_by_shape,
    where_nonzero,
)
from tests import oracle
from tests.everything import OPTIMIZERS
from tests.runs import AUTO, EXPLICIT, has_ratios, mesh_of, readout, step_of

EXPERTS, RATE = 3, 0.05
# M underflows to zero in three steps without a gradient, M̃ in two.
ARGUMENTS = {"momentum": 2.0**-50, "weight_dimension_numbers": Dims(1, 2)}
WIDE = {"r_min": 1e-3, "r_max": 1e3}
PARAMS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(EXPERTS, 4, 6)), jnp.float32)
}
BUSY, IDLE = (True,) * EXPERTS, (True, False, True)


def gradient(step, busy=BUSY):
    rng = np.random.default_rng(100 + step)
    values = rng.normal(size=PARAMS["w"].shape) * np.reshape(busy, (-1, 1, 1))
    return {"w": jnp.asarray(values, jnp.float32)}


@functools.cache
def build(factory=orscale, **arguments):
    """An optimizer and its step to the next parameters and state."""
    bounds = {} if factory in (muon, family.normuon, family.hyperball) else WIDE
    optimizer = factory(RATE, **(ARGUMENTS | bounds | arguments))
    return optimizer, step_of(optimizer)


def zeroed(state, field, experts=(0, 1, 2)):
    """A state in which a field of some experts is zero."""
    array = readout(state, field)["w"]
    if len(experts) == EXPERTS:  # Also on Explicit axes.
        array = jnp.zeros_like(array)
    else:
        at = (slice(None),) * (field == "numbers")
        array = array.at[*at, jnp.array(experts)].set(0)
    return optax.tree.set(state, **{field: {"w": array}})


class Run:
    """An optimizer beside one oracle for each expert."""

    def __init__(self, optimizer, params=PARAMS, **by_hand):
        self.params, self.time = params, 0
        self.use(optimizer)
        self.state = self.optimizer.init(params)
        arguments = {"momentum": ARGUMENTS["momentum"], **WIDE, **by_hand}
        self.experts = [oracle.Matrix(w, **arguments) for w in params["w"]]

    def use(self, optimizer):
        self.optimizer, self.step = optimizer

    def go(self, *pattern, rtol=1e-4):
        """One step for each entry: which experts have a gradient."""
        for busy in pattern:
            grads = gradient(self.time, busy)
            self.params, self.state = self.step(self.params, self.state, grads)
            for expert, g in zip(self.experts, grads["w"], strict=True):
                expert.step(g, RATE)
            self.time += 1
            if has_ratios(self.state):
                c = [e.c if np.isfinite(e.c or np.inf) else 0 for e in self.experts]
                self.check("calibration", c, rtol)
                self.check("raw_trust_ratio", [e.r for e in self.experts], rtol)
        weights = [e.weight for e in self.experts]
        np.testing.assert_allclose(self.params["w"], weights, rtol=rtol, atol=rtol)

    def check(self, field, expected, rtol):
        found = readout(self.state, field)["w"]
        expected = np.asarray(expected, float)
        np.testing.assert_allclose(found, expected, rtol, err_msg=field)


# Paths to a state in which an idle expert has moved but has no c.


def again(run):
    run.state = zeroed(run.state, "numbers")


def reset_one(run):
    for field in ("trace", "numbers"):
        run.state = zeroed(run.state, field, [1])


def calibrated(run):
    run.use(build())


def converted(run):
    run.use(build())
    run.state = convert_state(run.state, run.optimizer, run.params)


PATHS = {
    "anchor all again": ({}, again),
    "one expert's momentum and c": ({}, reset_one),
    "calibrate": ({"calibrate": False}, calibrated),
    "from muon": ({}, converted),
    "injected": ({"factory": optax.inject_hyperparams(orscale)}, again),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("path", PATHS)
def test_paths_to_an_idle_expert_without_c(path):
    arguments, change = PATHS[path]
    adaptive = change is not converted
    run = Run(
        build(**arguments) if adaptive else build(muon),
        calibrate=arguments.get("calibrate", True),
        adaptive=adaptive,
    )
    run.go(BUSY, IDLE, IDLE, IDLE)
    change(run)
    for i, expert in enumerate(run.experts):
        expert.calibrate = expert.adaptive = True
        if i == 1 or change is not reset_one:
            expert.unset()
    before = run.params["w"][1]
    run.go(IDLE, IDLE)
    np.testing.assert_array_equal(run.params["w"][1], before)  # It rests.
    assert readout(run.state, "calibration")["w"][1] == 0
    run.go(BUSY, rtol=1e-4)
    np.testing.assert_allclose(readout(run.state, "trust_ratio")["w"][1], 1, rtol=1e-5)
    run.go(IDLE, BUSY)


@pytest.mark.extended
def test_the_largest_anchor_with_an_idle_expert_without_c():
    arguments = {"anchor": "largest", "anchor_steps": 3}
    run = Run(build(**arguments), **arguments)
    run.go(BUSY, IDLE, IDLE, IDLE)
    again(run)
    for expert in run.experts:
        expert.unset()
    run.go(IDLE, IDLE)
    assert readout(run.state, "calibration")["w"][1] == 0
    run.go(BUSY, BUSY, IDLE, BUSY)
    norms = [expert.first_weight_norm for expert in run.experts]
    run.check("anchor_weight_norm", norms, 1e-4)


def sharded(axis_type):
    mesh = mesh_of({"x": 3}, axis_type)
    return mesh, lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))


def fused(x):
    return jnp.concatenate(list(x), axis=1)


BLOCKS = BlockDimensionNumbers(0, 1, block_axis=1, blocks=EXPERTS)
SETTINGS = {
    "explicit": (orscale, {}, lambda: sharded(EXPLICIT)),
    "auto": (orscale, {}, lambda: sharded(AUTO)),
    "blocks": (orscale, {"weight_dimension_numbers": BLOCKS}, lambda: (None, fused)),
    "bfloat16": (orscale, {}, lambda: (None, lambda x: x.astype(jnp.bfloat16))),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_in_which_an_idle_expert_waits(name):
    factory, arguments, make = SETTINGS[name]
    mesh, place = make()
    params = jax.tree.map(place, PARAMS)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        optimizer, step = build(factory, **arguments)
        state = optimizer.init(params)
        for time, busy in enumerate([BUSY, IDLE, IDLE, IDLE, IDLE, IDLE, BUSY]):
            if time == 4:
                state = zeroed(state, "numbers")
            grads = jax.tree.map(place, gradient(time, busy))
            params, state = step(params, state, grads)
            c = np.asarray(readout(state, "calibration")["w"])
            assert (c > 0).tolist() == (list(IDLE) if time in (4, 5) else list(BUSY))
    assert 1 < c[1] < 5  # Not 1/λ.
    ratio = np.asarray(readout(state, "trust_ratio")["w"])
    np.testing.assert_allclose(ratio[1], 1, rtol=1e-5)


# What may be set to zero.

ANCHORS = [{"anchor": "first"}, {"anchor": "largest", "anchor_steps": 4}]


def reset(run, fields, experts):
    """Set fields of some experts to zero, and do the same to their oracles."""
    for field in fields if experts else ():
        run.state = zeroed(run.state, field, experts)
    for expert in (run.experts[i] for i in experts):
        if "trace" in fields:
            expert.buffer = np.zeros_like(expert.weight)
        if "numbers" in fields:
            expert.unset()


def test_readouts_do_not_change_the_run():
    """Of the seven numbers the next step reads the first three."""
    run = Run(build())
    run.go(BUSY, IDLE)
    expected = run.step(run.params, run.state, gradient(9))
    numbers = readout(run.state, "numbers")["w"].at[3:].set(0)
    state = optax.tree.set(run.state, numbers={"w": numbers})
    found = run.step(run.params, state, gradient(9))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_resets_of_the_family():
    """NorMuon's means begin anew; Hyperball's norm of zero shows."""
    optimizer, step = build(family.normuon)
    _, state = step(PARAMS, optimizer.init(PARAMS), gradient(0))
    state = zeroed(zeroed(state, "neuron_mean_square", [1]), "trace", [1])
    _, again = step(PARAMS, state, gradient(1))
    _, fresh = step(PARAMS, optimizer.init(PARAMS), gradient(1))
    found, expected = (readout(s, "neuron_mean_square")["w"] for s in (again, fresh))
    np.testing.assert_array_equal(found[1], expected[1])
    assert (found[::2] != expected[::2]).all()
    optimizer, step = build(family.hyperball)
    params, _ = step(PARAMS, zeroed(optimizer.init(PARAMS), "initial_norm"), gradient(0))
    assert jnp.isnan(params["w"]).all()


PATTERN = st.tuples(*[st.booleans()] * EXPERTS)


@settings(max_examples=20)
@given(
    st.lists(PATTERN, min_size=1, max_size=4),
    st.lists(PATTERN, min_size=2, max_size=5),
    st.sets(st.sampled_from(["trace", "numbers"])),
    st.sets(st.integers(0, EXPERTS - 1)),
    st.sampled_from(range(len(ANCHORS))),
)
def test_any_run_and_any_reset(before, after, fields, experts, anchor):
    run = Run(build(**ANCHORS[anchor]), **ANCHORS[anchor])
    run.go(*before)
    reset(run, fields, sorted(experts))
    run.go(*after)


# The stages alone.


def test_a_chain_of_ones_own():
    numbers = {"weight_dimension_numbers": ARGUMENTS["weight_dimension_numbers"]}
    direction = orthogonalize(**numbers), scale_by_shape(**numbers)
    direction = optax.chain(*direction, optax.add_decayed_weights(0.1))
    optimizer = optax.chain(
        optax.trace(ARGUMENTS["momentum"], nesterov=True),
        where_nonzero(direction, **numbers),
        scale_by_calibrated_trust_ratio(**WIDE, **numbers),
        optax.scale_by_learning_rate(RATE),
    )
    run = Run((optimizer, step_of(optimizer)))
    run.go(BUSY, IDLE, IDLE, IDLE)
    again(run)
    for expert in run.experts:
        expert.unset()
    run.go(IDLE, BUSY, IDLE)


def test_the_ratio_alone_is_anchored_by_every_d():
    """As its docstring says: it cannot tell λW from another direction."""
    ratio = scale_by_calibrated_trust_ratio(eps=0.0, weight_dimension_numbers=Dims(1, 2))
    decay = jax.tree.map(lambda w: 0.1 * w, PARAMS)
    _, state = ratio.update(decay, ratio.init(PARAMS), PARAMS)
    np.testing.assert_allclose(state.calibration["w"], 10, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_small_numbers_of_narrow_dtypes_are_updates(dtype):
    """2⁻²⁰ is subnormal in float16, and does not count as zero."""
    stage = where_nonzero(optax.identity())
    tiny = {"w": jnp.full((2, 2), 2.0**-20, dtype)}
    updates, _ = stage.update(tiny, stage.init(tiny), tiny)
    np.testing.assert_array_equal(updates["w"], tiny["w"])


# Zero matrices.


def test_a_zero_matrix_moves():
    given = {"weight_dimension_numbers": Dims(1, 2)}
    optimizer = orscale(RATE, r_min=0.0, calibrate=False, **given)
    params = {"w": PARAMS["w"].at[1].set(0)}
    updates, state = optimizer.update(gradient(0), optimizer.init(params), params)
    plain = muon(RATE, **given)
    expected, _ = plain.update(gradient(0), plain.init(params), params)
    assert readout(state, "raw_trust_ratio")["w"][1] == 1 and updates["w"][1].any()
    np.testing.assert_allclose(updates["w"][1], expected["w"][1], rtol=1e-5)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_leaves_a_zero_matrix(name):
    """Also where the matrix has become zero later, as by pruning."""
    optimizer = OPTIMIZERS[name](RATE, weight_dimension_numbers=Dims(1, 2))
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(gradient(0), state, PARAMS)
    pruned = {"w": PARAMS["w"].at[1].set(0)}
    updates, state = optimizer.update(gradient(1), state, pruned)
    assert jnp.isfinite(updates["w"]).all() and updates["w"][1].any()
