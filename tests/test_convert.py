"""Runs that continue with another optimizer."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax import convert_state, muon, orscale
from tests import runs
from tests.runs import mesh_of

RATE = 1e-2
SHAPES = {"up": (8, 16), "down": (16, 8), "bias": (8,)}
tree = functools.partial(runs.tree, shapes=SHAPES)


def after(optimizer, steps, state=None, start=0):
    """The state and the last updates, at fixed parameters."""
    params = tree(0)
    update = jax.jit(optimizer.update)
    state = optimizer.init(params) if state is None else state
    updates = None
    for step in range(start, start + steps):
        updates, state = update(tree(step + 1), state, params)
    return state, updates


def assert_close(found, wanted, rtol=1e-5):
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max())


def saved_and_restored(folder, state, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", *target)


def optax_muon(consistent_rms=0.2, **kwargs):
    return optax.contrib.muon(
        RATE,
        weight_decay=0.1,
        consistent_rms=consistent_rms,
        adam_weight_decay=0.1,
        **kwargs,
    )


def our_muon(nesterov, rate=RATE, **kwargs):
    """The same algorithm as optax_muon."""
    return muon(
        rate,
        nesterov=nesterov,
        ns_coeffs="jordan",
        adam_b2=0.999,
        adam_nesterov=nesterov,
        **kwargs,
    )


WRAPPERS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "partition": lambda tx: optax.partition({"all": tx}, lambda params: "all"),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
}


@pytest.mark.extended
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("nesterov", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_optax_muon_continues_as_muon(nesterov, wrapper):
    """The next updates are the same where 0.95^t has vanished, or without Nesterov."""
    wrap = WRAPPERS[wrapper]
    old, new = wrap(optax_muon(nesterov=nesterov)), wrap(our_muon(nesterov))
    steps = 250 if nesterov else 3
    state, _ = after(old, steps)
    converted = convert_state(state, new, tree(0), momentum=0.95, nesterov=nesterov)
    for start in range(steps, steps + 3):
        state, wanted = after(old, 1, state, start)
        converted, found = after(new, 1, converted, start)
        assert_close(found, wanted, rtol=2e-5)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "old, new",
    [
        (optax_muon(consistent_rms=None), our_muon(True, scale_mode="shape_scaling")),
        (optax_muon(), our_muon(True)),
    ],
    ids=["shape_scaling", "consistent_rms"],
)
def test_the_next_update_of_a_young_run_is_the_same(old, new):
    for steps in (1, 2, 10):
        state, _ = after(old, steps)
        converted = convert_state(state, new, tree(0), momentum=0.95)
        _, wanted = after(old, 1, state, steps)
        _, found = after(new, 1, converted, steps)
        assert_close(found, wanted, rtol=2e-5)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("steps", [1, 40])
def test_there_and_back(steps):
    state, _ = after(optax_muon(), steps)
    ours = convert_state(state, orscale(RATE), tree(0), momentum=0.95)
    back = convert_state(ours, optax_muon(), tree(0), momentum=0.95)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_close(back, state, rtol=1e-6)


@pytest.mark.extended
def test_from_adamw():
    """AdamW's parameters keep moments and count; c is anchored at the next direction."""
    adamw = optax.adamw(RATE, b2=0.95, weight_decay=0.1)
    state, _ = after(adamw, 5)
    converted = convert_state(state, orscale(RATE), tree(0), momentum=0.95)
    [(_, momentum)] = optax.tree.get_all_with_path(converted, "trace")
    assert_close(momentum["up"], state[0].mu["up"] / (1 - 0.95))
    assert not optax.tree.get(converted, "calibration")["up"]
    converted, found = after(orscale(RATE), 1, converted, 5)
    _, wanted = after(adamw, 1, state, 5)
    assert_close(found["bias"], wanted["bias"])
    assert optax.tree.get(converted, "raw_trust_ratio")["up"] == pytest.approx(1)


@pytest.mark.extended
def test_between_our_optimizers_and_to_schedules():
    state, _ = after(orscale(RATE), 3)
    scheduled = orscale(optax.constant_schedule(RATE))
    converted = convert_state(state, scheduled, tree(0))
    counts = [c for _, c in optax.tree.get_all_with_path(converted, "count")]
    assert [int(count) for count in counts] == [3] * len(counts) and len(counts) == 3
    _, found = after(scheduled, 1, converted, 3)
    _, wanted = after(orscale(RATE), 1, state, 3)
    assert_close(found, wanted, rtol=1e-7)
    as_muon = convert_state(state, muon(RATE), tree(0))
    assert_close(
        *(optax.tree.get_all_with_path(s, "trace")[0][1] for s in (as_muon, state)), 0
    )


@pytest.mark.extended
def test_more_parameters():
    params = tree(0) | {"new": jnp.ones((4, 4))}
    state, _ = after(orscale(RATE), 2)
    with pytest.raises(ValueError, match=r"'new' is not in the old state.*allow_new"):
        convert_state(state, orscale(RATE), params)
    grown = convert_state(state, orscale(RATE), params, allow_new=True)
    c, before = (optax.tree.get(s, "calibration") for s in (grown, state))
    assert c["new"] == 0 and c["up"] == before["up"] > 0


@pytest.mark.extended
def test_a_restored_tree_of_dictionaries(tmp_path):
    state, _ = after(optax_muon(), 2)
    restored = saved_and_restored(tmp_path, state)
    converted, expected = (
        convert_state(s, orscale(RATE), tree(0), momentum=0.95) for s in (restored, state)
    )
    assert_close(converted, expected, rtol=0)


def as_restored(node):
    """What Orbax restores without a target: types are lost, names of fields are not."""
    if isinstance(node, optax.EmptyState | optax.MaskedNode):
        return None
    if hasattr(node, "_fields"):
        node = node._asdict()
    if isinstance(node, dict):
        return {key: as_restored(child) for key, child in node.items()}
    return [as_restored(child) for child in node] if isinstance(node, tuple) else node


NAMES = st.sampled_from(
    ["w", "mu", "nu", "trace", "count", "inner_state", "calibration", "0", "bounds"]
)
TREES = st.dictionaries(
    NAMES,
    st.sampled_from([(2, 3), (3,)]) | st.dictionaries(NAMES, st.just((2, 3)), min_size=1),
    min_size=1,
    max_size=4,
)


@pytest.mark.extended
@hypothesis.given(TREES, st.sampled_from(["typed", "restored", "one array"]))
@hypothesis.settings(max_examples=25, deadline=None)
def test_names_do_not_matter(shapes, kind):
    """Whatever the parameters are called: each array of a state is its own again."""
    shapes = (2, 3) if kind == "one array" else shapes
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    optimizer = optax.chain(optax.clip(1.0), orscale(optax.constant_schedule(RATE)))
    state = optimizer.init(params)
    leaves = jax.tree.leaves_with_path(state)
    marks = iter(range(2, 99))
    marked = [
        x if "bounds" in str(path[:-1]) + str(path[-1:] * (x.shape == (2,)))
        else jnp.full_like(x, 7 if x.dtype == jnp.int32 else next(marks))
        for path, x in leaves
    ]  # fmt: skip
    state = jax.tree.unflatten(jax.tree.structure(state), marked)
    given = as_restored(state) if kind == "restored" else state
    converted = convert_state(given, optimizer, params)
    for found, wanted in zip(jax.tree.leaves(converted), marked, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_donated_step_keeps_the_old_state():
    old = orscale(RATE).init(tree(0))
    converted = convert_state(old, orscale(RATE), tree(0))
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(converted)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(converted))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(old))


def test_two_arrays_of_one_name():
    """The one at the same place, or none of them."""
    twice = optax.chain(optax.trace(0.5), orscale(RATE))
    first, rest = twice.init(tree(0))
    state = (jax.tree.map(lambda x: x + 1, first), rest)
    found = convert_state(state, twice, tree(0))
    for (_, kept), (_, wanted) in zip(
        *(optax.tree.get_all_with_path(s, "trace") for s in (found, state)), strict=True
    ):
        assert_close(kept, wanted, rtol=0)
    with pytest.raises(ValueError, match=r"trace of 'down' several times, at '0.trace'"):
        convert_state(state, muon(RATE), tree(0))
    convert_state(state[1], muon(RATE), tree(0))


def test_fewer_parameters():
    state, _ = after(orscale(RATE), 1)
    few = {name: tree(0)[name] for name in ("up", "bias")}
    found = convert_state(state, orscale(RATE), few)
    for field in ("trace", "calibration", "mu"):
        wanted = optax.tree.get_all_with_path(state, field)[0][1]
        [(_, kept)] = optax.tree.get_all_with_path(found, field)
        for name in jax.tree.leaves(kept) and few:
            assert_close(kept[name], wanted[name], rtol=0)


@pytest.mark.extended
def test_old_checkpoints_whose_flags_are_booleans(tmp_path):
    """Booleans of old checkpoints: Orbax casts them, and update takes them, too."""
    state, _ = after(orscale(RATE), 2)
    flags = jax.tree.map(lambda x: x != 0, optax.tree.get(state, "started"))
    old = optax.tree.set(state, started=flags)
    restored = saved_and_restored(tmp_path, old, state)
    types = [[x.dtype for x in jax.tree.leaves(s)] for s in (restored, state)]
    assert types[0] == types[1]
    _, wanted = after(orscale(RATE), 1, state, 2)
    for found in (restored, old):
        assert_close(after(orscale(RATE), 1, found, 2)[1], wanted, rtol=0)


def test_in_jit_on_a_mesh_and_in_boxes():
    where = NamedSharding(mesh_of({"fsdp": 8}), P("fsdp"))
    state, _ = after(optax_muon(), 2)
    params = jax.tree.map(nnx.Param, tree(0))
    convert = functools.partial(convert_state, optimizer=orscale(RATE), momentum=0.95)
    found = jax.jit(lambda s, p: convert(s, params=p))(
        jax.tree.map(lambda x: jax.device_put(x, where) if x.size % 8 == 0 else x, state),
        params,
    )
    assert jax.tree.structure(found) == jax.tree.structure(orscale(RATE).init(params))
    assert_close(found, convert(state, params=tree(0)), rtol=1e-6)


def with_other_count(state, label="adam"):
    adam = state.inner_states[label]
    inner = optax.tree.set(adam.inner_state, count=jnp.asarray(7))
    return state._replace(
        inner_states=state.inner_states | {label: adam._replace(inner_state=inner)}
    )


@pytest.mark.parametrize(
    "old",
    [
        optax.rmsprop(RATE), optax.rmsprop(RATE, momentum=0.9), optax.adan(RATE),
        optax.adafactor(RATE), optax.sm3(RATE), optax.contrib.ademamix(RATE),
        optax.contrib.prodigy(RATE),
    ],
)  # fmt: skip
def test_states_of_other_optimizers_are_refused(old):
    """Their moments are no sum or average of gradients."""
    for new in (muon(RATE), optax.adamw(RATE)):
        with pytest.raises(
            ValueError, match=r"'up'\nare in the old state without a first"
        ):
            convert_state(old.init(tree(0)), new, tree(0))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"momentum": None}, "'down' is an average.*pass momentum="),
        ({"momentum": 1.0}, "momentum=1.0 is not valid"),
        ({"nesterov": "yes"}, "nesterov='yes' is not valid"),
        (
            {"params": {"other": jnp.ones((8, 16))}},
            "nothing of these parameters.*lost.*'other'",
        ),
        ({"params": tree(0) | {"up": jnp.ones((8, 8))}}, "of 'up' has shape .8, 16"),
        ({"optimizer": optax.adamw(RATE)}, r"'down'\n  'up'\nare given to AdamW"),
        (
            {"state": with_other_count, "optimizer": orscale(lambda _: RATE)},
            r"differ: .*7 at 'inner_states\.adam\..*count'.* the run's step",
        ),
        ({"optimizer": optax.flatten(optax.adamw(RATE))}, r"'0.mu' of shape .*flatten"),
    ],
)
def test_what_cannot_be_converted(change, words):
    state, _ = after(optax_muon(), 2)
    if "state" in change:
        change = change | {"state": change["state"](state)}
    given = {"optimizer": orscale(RATE), "params": tree(0), "momentum": 0.95}
    with pytest.raises(ValueError, match=words):
        convert_state(**{"state": state, **given, **change})


@pytest.mark.extended
def test_counts_that_differ_on_purpose():
    """A state that only changes its dtypes keeps them, as after AdamW was reset."""
    ours = functools.partial(orscale, optax.constant_schedule(RATE))
    state = with_other_count(after(ours(), 2)[0], "adamw")
    found = convert_state(state, ours(mu_dtype="bfloat16"), tree(0))
    counts = [count for _, count in optax.tree.get_all_with_path(found, "count")]
    assert sorted(counts) == [2, 7, 7]


def test_moments_keep_their_age_and_schedules_start_at_the_runs_step():
    """Whatever else counts, and also under jit, where counts cannot be compared."""
    window = optax.contrib.reduce_on_plateau(patience=100, accumulation_size=10)
    for old in (
        optax.chain(window, orscale(RATE)),
        optax.chain(orscale(RATE), window),
        optax.chain(optax.apply_every(3), orscale(RATE)),
        optax.chain(orscale(RATE), optax.ema(0.9)),
    ):
        state = old.init(tree(0))
        for _ in range(5):
            _, state = old.update(tree(1), state, tree(0), value=1.0)
        later = optax.scale_by_schedule(lambda _: 1.0)
        for new in (
            optax.chain(orscale(optax.constant_schedule(RATE)), later),
            optax.chain(muon(RATE), later),
            optax.chain(optax.clip(1.0), orscale(RATE)),
        ):
            for convert in (convert_state, jax.jit(convert_state, static_argnums=1)):
                found = convert(state, new, tree(0))
                counts = optax.tree.get_all_with_path(found, "count")
                assert {int(count) for _, count in counts} == {5}


def test_moments_have_a_count_of_their_own():
    """That of the matrices' momentum does not matter, which is another one here."""
    state = with_other_count(after(optax_muon(), 2)[0])
    found = convert_state(state, orscale(RATE), tree(0), momentum=0.95)
    [(_, count)] = optax.tree.get_all_with_path(found, "count")
    assert count == 7


NEW_STAGES = {
    "ema": optax.ema(0.9),
    "reduce_on_plateau": optax.contrib.reduce_on_plateau(
        patience=1, accumulation_size=2, cooldown=0
    ),
    "apply_every": optax.apply_every(2),
    # It has second moments of matrices, whose momentum is kept, too.
    "adam": optax.scale_by_adam(),
}


@pytest.mark.parametrize("name", NEW_STAGES)
@pytest.mark.quick_first_case
def test_a_new_stage_with_sums_of_its_own_begins_with_them(name):
    state, params = after(orscale(RATE), 3)
    new = optax.chain(orscale(RATE), NEW_STAGES[name])
    found = convert_state(state, new, params)
    if name != "adam":
        jax.tree.map(np.testing.assert_array_equal, found[1], new.init(params)[1])
    assert_close(found[0], state, rtol=0)


@pytest.mark.parametrize("stage", [None, optax.lookahead], ids=["chain", "lookahead"])
@pytest.mark.quick_first_case
def test_into_lookahead_and_back(stage):
    state, params = after(orscale(RATE), 3)
    new = optax.lookahead(orscale(RATE), 5, 0.5)
    both = optax.LookaheadParams.init_synced(params)
    found = convert_state(state, new, both)
    assert_close(found.fast_state, state, rtol=0)
    if stage is not None:
        assert_close(convert_state(found, new, both), found, rtol=0)
    assert_close(convert_state(found, orscale(RATE), params), state, rtol=0)


def test_the_schedule_of_new_accumulation_starts_at_the_runs_step():
    state, params = after(orscale(RATE), 3)
    new = optax.MultiSteps(orscale(RATE), lambda step: jnp.where(step < 10, 1, 4))
    found = convert_state(state, new, params)
    assert (int(found.gradient_step), int(found.mini_step)) == (3, 0)


def named_chain(name):
    """A stage that is called as an argument of a wrapper is: its count goes on."""
    schedule = optax.scale_by_schedule(optax.constant_schedule(RATE))
    return lambda rate: optax.named_chain((name, schedule), ("last", orscale(rate)))


WITH_WRAPPERS = {
    "schedule_free": (
        lambda rate, **kw: optax.contrib.schedule_free(orscale(rate), rate, **kw),
        {"b1": 0.5},
    ),
    "reduce_on_plateau": (
        lambda rate, **kw: optax.chain(
            orscale(rate), optax.contrib.reduce_on_plateau(**kw)
        ),
        {"patience": 3},
    ),
    "apply_if_finite": (lambda rate: optax.apply_if_finite(orscale(rate), 5), {}),
    "inject_hyperparams": (optax.inject_hyperparams(orscale), {"r_max": 2.0}),
    **{n: (named_chain(n), {}) for n in ("b1", "bounds", "hyperparams", "ns_coeffs")},
}


@pytest.mark.parametrize("name", WITH_WRAPPERS)
@pytest.mark.extended
def test_what_wrappers_know_goes_on_and_their_arguments_do_not(name):
    build, argument = WITH_WRAPPERS[name]
    params, old, new = tree(0), build(RATE), build(RATE, **argument)
    state, extra = old.init(params), {"value": 1.0} if "plateau" in name else {}
    bad = jax.tree.map(lambda x: x * (np.nan if "finite" in name else 1), tree(1))
    for grads in (tree(1), tree(1), bad):
        _, state = old.update(grads, state, params, **extra)
    assert_close(convert_state(state, old, params), state, rtol=0)
    found, fresh = convert_state(state, new, params), new.init(params)
    if name == "schedule_free":
        assert found.b1 == 0.5 and found.weight_sum == state.weight_sum > 0
    if name == "reduce_on_plateau":
        assert found[1].plateau_count == state[1].plateau_count > 0
    if name == "inject_hyperparams":
        assert found.hyperparams == fresh.hyperparams != state.hyperparams
        assert float(optax.tree.get(found, "bounds")[1]) == 2


def test_frozen_parameters_of_which_nothing_is_kept():
    labels = {"up": "trained", "down": "frozen", "bias": "trained"}
    groups = {"trained": orscale(RATE), "frozen": optax.set_to_zero()}
    optimizer, params = optax.partition(groups, labels), tree(0)
    _, state = optimizer.update(tree(1), optimizer.init(params), params)
    assert_close(convert_state(state, optimizer, params), state, rtol=0)
    with pytest.raises(ValueError, match="'down' is not in the old state"):
        convert_state(state, orscale(RATE), params)
    nothing = orscale(RATE).init({})
    assert_close(convert_state(nothing, orscale(RATE), {}), nothing)
