"""Runs that continue with another optimizer."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers,
    convert_state,
    family,
    muon,
    orscale,
    polar_factor,
    state_shardings,
)
from tests import runs
from tests.runs import mesh_of, readout

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


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "nesterov, old, new",
    [
        (
            *(True, optax_muon(consistent_rms=None)),
            our_muon(True, scale_mode="shape_scaling"),
        ),
        (True, optax_muon(), our_muon(True)),
        (False, optax_muon(nesterov=False), our_muon(False)),
    ],
    ids=["shape_scaling", "consistent_rms", "without nesterov"],
)
def test_the_next_update_of_a_young_run_is_the_same(nesterov, old, new):
    for steps in (1, 2, 10):
        state, _ = after(old, steps)
        given = {"momentum": 0.95, "nesterov": nesterov}
        converted = convert_state(state, new, tree(0), **given)
        _, wanted = after(old, 1, state, steps)
        _, found = after(new, 1, converted, steps)
        assert_close(found, wanted, rtol=5e-5)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("steps", [1, 40])
def test_there_and_back(steps):
    state, _ = after(optax_muon(), steps)
    ours = convert_state(state, orscale(RATE), tree(0), momentum=0.95)
    back = convert_state(ours, optax_muon(), tree(0), momentum=0.95)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_close(back, state, rtol=1e-6)


# States of sums and of averages of gradients, with and without Nesterov's momentum.
MOMENTA = {
    "trace": optax.trace(0.95, nesterov=True), "sgd": optax.sgd(RATE, 0.95),
    "muon": muon(RATE), "Optax's muon": optax_muon(nesterov=False),
    "lion": optax.lion(RATE, b2=0.95), "adamw": optax.adamw(RATE, b1=0.95),
}  # fmt: skip


def momentum_of(state):
    """The sum or the average of the gradients of "up"."""
    arrays = itertools.chain(
        *(optax.tree.get_all_with_path(state, name) for name in ("trace", "mu"))
    )
    return next(x["up"] for _, x in arrays if hasattr(x["up"], "shape"))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("old", MOMENTA)
def test_a_momentum_becomes_that_of_the_new_optimizer(old):
    """Of one decay rate, sums and averages of the same gradients differ by a factor."""
    state, _ = after(MOMENTA[old], 2)
    for new, optimizer in MOMENTA.items():
        # The average of Optax's muon without Nesterov's momentum; others have none.
        given = {"momentum": 0.95, "nesterov": "Optax's muon" not in (old, new)}
        found = convert_state(state, optimizer, tree(0), allow_new=True, **given)
        wanted = momentum_of(after(optimizer, 2)[0])
        if new == "adamw" != old:  # It has no second moment, and starts over.
            wanted = 0 * wanted
        assert_close(momentum_of(found), wanted)


def test_a_momentum_is_not_lost_in_an_average_of_anything():
    state, _ = after(optax.sgd(RATE, 0.95), 2)
    with pytest.raises(ValueError, match=r"(?s)'up'.*optax.ema.*optax.trace.*allow_new"):
        convert_state(state, optax.ema(0.95), tree(0))
    convert_state(state, optax.trace(0.95), tree(0))
    convert_state(state, optax.ema(0.95), tree(0), allow_new=True)


@pytest.mark.extended
def test_from_adamw():
    """AdamW's parameters keep moments and count; c is anchored at the next direction."""
    adamw = optax.adamw(RATE, b2=0.95, weight_decay=0.1)
    state, _ = after(adamw, 5)
    converted = convert_state(state, orscale(RATE), tree(0), momentum=0.95)
    [(_, momentum)] = optax.tree.get_all_with_path(converted, "trace")
    assert_close(momentum["up"], state[0].mu["up"] / (1 - 0.95))
    assert not readout(converted, "calibration")["up"]
    converted, found = after(orscale(RATE), 1, converted, 5)
    _, wanted = after(adamw, 1, state, 5)
    assert_close(found["bias"], wanted["bias"])
    assert readout(converted, "raw_trust_ratio")["up"] == pytest.approx(1)


@pytest.mark.extended
@pytest.mark.parametrize(
    "saved",
    [
        lambda old: old.opt_state, nnx.state,
        lambda old: nnx.to_pure_dict(nnx.state(old)),
        lambda old: {"step": 2, "opt_state": nnx.as_pure(old.opt_state)},
    ],
    ids=["opt_state", "nnx.state", "pure", "train state"],
)  # fmt: skip
def test_a_tree_that_was_restored_without_a_target(saved, tmp_path):
    """Of dictionaries and lists, with or without NNX's variables around the arrays."""
    model = nnx.Dict({name: nnx.Param(x) for name, x in tree(0).items()})
    old = nnx.Optimizer(model, optax_muon(), wrt=nnx.Param)
    for step in (1, 2):
        old.update(model, nnx.State({k: nnx.Param(x) for k, x in tree(step).items()}))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved(old))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
    found, expected = (
        convert_state(state, orscale(RATE), nnx.state(model), momentum=0.95)
        for state in (restored, old)
    )
    assert_close(found, expected, rtol=0)
    assert optax.tree.get(found, "trace")["up"].get_value().any()


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
    "w mu nu trace count inner_state calibration 0 bounds value opt_state".split()
)
TREES = st.dictionaries(
    NAMES,
    st.sampled_from([(2, 3), (3,)]) | st.dictionaries(NAMES, st.just((2, 3)), min_size=1),
    min_size=1,
    max_size=4,
)


@pytest.mark.extended
@hypothesis.given(TREES, st.sampled_from(["typed", "restored", "variables", "one array"]))
@hypothesis.settings(max_examples=25, deadline=None)
def test_names_do_not_matter(shapes, kind):
    """Whatever the parameters are called: each array of a state is its own again."""
    shapes = (2, 3) if kind == "one array" else shapes
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    optimizer = optax.chain(optax.clip(1.0), orscale(optax.constant_schedule(RATE)))
    state = optimizer.init(params)
    leaves = jax.tree.leaves_with_path(state)
    marks = iter(range(2, 999))
    marked = [
        x if "bounds" in str(path[:-1]) + str(path[-1:] * (x.shape == (2,)))
        else jnp.full_like(x, 7 if x.dtype == jnp.int32 else next(marks))
        for path, x in leaves
    ]  # fmt: skip
    state = jax.tree.unflatten(jax.tree.structure(state), marked)
    given = state if kind in ("typed", "one array") else as_restored(state)
    if kind == "variables":  # Of NNX, restored without a target.
        given = {"opt_state": jax.tree.map(lambda x: {"value": x}, given), "step": 1}
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


def test_more_or_fewer_parameters():
    state, _ = after(orscale(RATE), 1)
    few = {name: tree(0)[name] for name in ("up", "bias")}
    found = convert_state(state, orscale(RATE), few)
    for field in ("trace", "numbers", "mu"):
        wanted = optax.tree.get_all_with_path(state, field)[0][1]
        [(_, kept)] = optax.tree.get_all_with_path(found, field)
        for name in jax.tree.leaves(kept) and few:
            assert_close(kept[name], wanted[name], rtol=0)
    more = tree(0) | {"new": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match=r"'new' is not in the old state.*allow_new"):
        convert_state(state, orscale(RATE), more)
    grown = convert_state(state, orscale(RATE), more, allow_new=True)
    c, before = (readout(s, "calibration") for s in (grown, state))
    assert c["new"] == 0 and c["up"] == before["up"] > 0


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
        optax.contrib.prodigy(RATE), optax.novograd(RATE),
    ],
)  # fmt: skip
def test_states_of_other_optimizers_are_refused(old):
    """Their moments are no sum or average of gradients."""
    for new in (muon(RATE), optax.adamw(RATE)):
        with pytest.raises(
            ValueError,
            match=r"'up'\nare in the old state without a first.*Start over with optim",
        ):
            convert_state(old.init(tree(0)), new, tree(0))


ONE_RATE = orscale(lambda _: RATE)  # It needs the run's step.


@pytest.mark.parametrize(
    "change, words, remedy",
    [
        ({"momentum": None}, "'down' is an average.*pass momentum=", {"momentum": 0.9}),
        ({"momentum": 1.0}, "momentum=1.0 is not valid", {"momentum": 0.9}),
        ({"nesterov": "yes"}, "nesterov='yes' is not valid", {"nesterov": True}),
        (
            {"params": {"other": jnp.ones((8, 16))}},
            "nothing of these parameters: pass the parameters under.*'other'",
            {"params": tree(0)},
        ),
        (
            {"state": jax.tree.leaves},
            "restore the state into the structure .* names of its fields are lost",
            {"state": lambda state: state},
        ),
        (
            {"params": tree(0) | {"up": jnp.ones((8, 8))}},
            r"of 'up' has shape \(8, 16\) .*pass allow_new=True",
            {"allow_new": True},
        ),
        (
            {"params": tree(0) | {"new": jnp.ones((4, 4))}},
            "'new' is not in the old state.*allow_new=True",
            {"allow_new": True},
        ),
        (
            {"optimizer": optax.adamw(RATE)},
            r"'down'\n  'up'\nare given to AdamW.*as after Muon.* allow_new=True",
            {"allow_new": True},
        ),
        (
            {"state": lambda state: optax.EmptyState(), "optimizer": ONE_RATE},
            "'bias'\n  'down'\n  'up'\nare not in the old state.*allow_new=True",
            {"allow_new": True},
        ),
        (
            {"state": lambda state: with_other_count(state), "optimizer": ONE_RATE},
            r"differ: .*7 at 'inner_states\.adam\..*count'.* the run's step.*filtering=",
            {
                "state": lambda state: optax.tree.set(
                    with_other_count(state),
                    lambda path, _: "adam" in str(path),
                    count=jnp.asarray(2),
                )
            },
        ),
        (
            {"optimizer": optax.flatten(optax.trace(0.95))},
            r"'trace' of shape .*flatten does: convert to the optimizer inside",
            {"optimizer": optax.trace(0.95)},
        ),
        (
            {"optimizer": optax.flatten(optax.adamw(RATE))},
            r"'0.mu' of shape .*start over with optimizer.init\(params\)",
            {"state": lambda _: optax.flatten(optax.adamw(RATE)).init(tree(0))},
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_and_what_then_can(change, words, remedy):
    state, _ = after(optax_muon(), 2)
    given = {"optimizer": orscale(RATE), "params": tree(0), "momentum": 0.95}

    def convert(**changes):
        changes["state"] = changes.get("state", lambda state: state)(state)
        return convert_state(**{**given, **changes})

    with pytest.raises(ValueError, match="(?s)" + words):
        convert(**change)
    found = convert(**{**change, **remedy})
    optimizer = (change | remedy).get("optimizer", given["optimizer"])
    params = (change | remedy).get("params", given["params"])
    updates, _ = jax.eval_shape(optimizer.update, params, found, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("options", [{}, {"mu_dtype": "int8"}], ids=["", "int8"])
@pytest.mark.parametrize("length", [12, 7], ids=["grown", "shrunk"])
@pytest.mark.extended
def test_a_vocabulary_of_another_length(options, length):
    """What both have is kept: the next step of its rows is as if nothing had changed."""
    names = {"embed": (10, 8), "up": (8, 10), "other": (8, 8)}
    optimizer = orscale(RATE, **options)
    params, grads = (runs.tree(seed, shapes=names) for seed in (0, 1))
    _, state = optimizer.update(grads, optimizer.init(params), params)
    wanted, _ = optimizer.update(grads, state, params)
    both = min(10, length)

    def resized(tree, fill):
        rows, columns = (
            jnp.full(shape, fill).at[part].set(tree[name][part])
            for name, shape, part in (
                ("embed", (length, 8), np.s_[:both]), ("up", (8, length), np.s_[:, :both])
            )
        )  # fmt: skip
        return tree | {"embed": rows, "up": columns}

    new_params = resized(params, 0.1)
    found = convert_state(state, optimizer, new_params, allow_new=True)
    mu, nu = (optax.tree.get(found, field)["embed"] for field in ("mu", "nu"))
    assert not mu[both:].any() and not nu[both:].any() and mu[:both].all()
    c, before = (readout(s, "calibration") for s in (found, state))
    assert c["up"] == 0 and c["other"] == before["other"] > 0  # The matrix is another.
    updates, after = optimizer.update(resized(grads, 0.3), found, new_params)
    np.testing.assert_array_equal(updates["embed"][:both], wanted["embed"][:both])
    np.testing.assert_array_equal(updates["other"], wanted["other"])
    assert jnp.isfinite(updates["up"]).all()
    assert readout(after, "trust_ratio")["up"] == pytest.approx(1)


@pytest.mark.parametrize("options", [{}, {"mu_dtype": "int8"}], ids=["", "int8"])
def test_a_longer_vocabulary_on_a_mesh(options):
    """The axis that grows is sharded, on Explicit axes."""
    optimizer, mesh = orscale(RATE, **options), mesh_of({"x": 8}, AxisType.Explicit)
    old, new = (
        runs.tree(0, shapes={"embed": (length, 8), "up": (8, 2 * length)})
        for length in (8, 16)
    )
    _, _, state = runs.first_update(optimizer, old, old)
    wanted = convert_state(state, optimizer, new, allow_new=True)
    with jax.set_mesh(mesh):
        old, new = (runs.placed(tree, mesh, P("x")) for tree in (old, new))
        state = jax.device_put(state, state_shardings(optimizer, old))
        found = convert_state(state, optimizer, new, allow_new=True)
    assert optax.tree.get(found, "mu")["embed"].sharding.spec[0] == "x"
    assert_close(found, wanted, rtol=0)


def test_a_run_of_sgd_continues():
    """Without momentum all begins, with it AdamW does; schedules go on."""
    schedule = optax.constant_schedule(RATE)
    for momentum in (None, 0.9):
        state, _ = after(optax.sgd(schedule, momentum), 3)
        found = convert_state(state, orscale(schedule), tree(0), allow_new=True)
        trace, mu = (optax.tree.get(found, field) for field in ("trace", "mu"))
        if momentum is None:
            assert not trace["up"].any()
        else:
            assert_close(trace["up"], optax.tree.get(state, "trace")["up"], rtol=0)
        assert not mu["bias"].any()
        adam = found.inner_states["adamw"].inner_state[0]
        assert adam.count == 0  # The bias correction begins with the moments.
        counts = [int(n) for _, n in optax.tree.get_all_with_path(found, "count")]
        assert sorted(counts) == [0, 3, 3]


@pytest.mark.extended
def test_counts_that_differ_on_purpose():
    """A state that only changes its dtypes keeps them, as after AdamW was reset."""
    ours = functools.partial(orscale, optax.constant_schedule(RATE))
    state = with_other_count(after(ours(), 2)[0], "adamw")
    found = convert_state(state, ours(mu_dtype="bfloat16"), tree(0))
    counts = [count for _, count in optax.tree.get_all_with_path(found, "count")]
    assert sorted(counts) == [2, 7, 7]


@pytest.mark.extended
def test_moments_keep_their_age_and_schedules_start_at_the_runs_step():
    """Whatever else counts, and also under jit, where counts cannot be compared."""
    window = optax.contrib.reduce_on_plateau(patience=100, accumulation_size=10)
    for old in (
        optax.chain(window, orscale(RATE)),
        optax.chain(optax.apply_every(3), orscale(RATE)),
        optax.chain(orscale(RATE), optax.ema(0.9)),
    ):
        state = old.init(tree(0))
        for _ in range(5):
            _, state = old.update(tree(1), state, tree(0), value=1.0)
        later = optax.scale_by_schedule(lambda _: 1.0)
        for new in (
            optax.chain(orscale(optax.constant_schedule(RATE)), later),
            optax.chain(optax.clip(1.0), muon(RATE)),
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


def test_what_is_new_begins_with_a_state_of_its_own():
    state, params = after(orscale(RATE), 3)
    plateau = optax.contrib.reduce_on_plateau(patience=1, accumulation_size=2, cooldown=0)
    for stage in (optax.ema(0.9), plateau, optax.apply_every(2), optax.scale_by_adam()):
        new = optax.chain(orscale(RATE), stage)
        found = convert_state(state, new, params)
        if new.init(params)[1]._fields != ("count", "mu", "nu"):  # Adam's moments.
            jax.tree.map(np.testing.assert_array_equal, found[1], new.init(params)[1])
        assert_close(found[0], state, rtol=0)
    new = optax.lookahead(orscale(RATE), 5, 0.5)
    both = optax.LookaheadParams.init_synced(params)
    found = convert_state(state, new, both)
    assert_close(found.fast_state, state, rtol=0)
    assert_close(convert_state(found, new, both), found, rtol=0)
    assert_close(convert_state(found, orscale(RATE), params), state, rtol=0)
    # The schedule of accumulation starts at the run's step.
    new = optax.MultiSteps(orscale(RATE), lambda step: jnp.where(step < 10, 1, 4))
    found = convert_state(state, new, params)
    assert (int(found.gradient_step), int(found.mini_step)) == (3, 0)


def named_chain(name):
    """A stage that is called as an argument of a wrapper is: its count goes on."""
    schedule = optax.scale_by_schedule(optax.constant_schedule(RATE))
    return lambda rate: optax.named_chain((name, schedule), ("last", orscale(rate)))


@pytest.mark.extended
def test_what_wrappers_know_goes_on_and_their_arguments_do_not():
    params = tree(0)

    def converted(build, factor=1.0, arguments=None, **extra):
        """A state after some steps, and that of the same wrapper with other arguments."""
        optimizer, new = build(), build(**(arguments or {}))
        state = optimizer.init(params)
        for grads in (tree(1), tree(1), jax.tree.map(lambda x: x * factor, tree(1))):
            _, state = optimizer.update(grads, state, params, **extra)
        assert_close(convert_state(state, optimizer, params), state, rtol=0)
        return state, convert_state(state, new, params), new.init(params)

    free = functools.partial(optax.contrib.schedule_free, orscale(RATE), RATE)
    state, found, _ = converted(free, arguments={"b1": 0.5})
    assert found.b1 == 0.5 and found.weight_sum == state.weight_sum > 0

    def plateau(**arguments):
        return optax.chain(orscale(RATE), optax.contrib.reduce_on_plateau(**arguments))

    state, found, _ = converted(plateau, arguments={"patience": 3}, value=1.0)
    assert found[1].plateau_count == state[1].plateau_count > 0
    injected = functools.partial(optax.inject_hyperparams(orscale), RATE)
    state, found, fresh = converted(injected, arguments={"r_max": 2.0})
    assert found.hyperparams == fresh.hyperparams != state.hyperparams
    converted(lambda: optax.apply_if_finite(orscale(RATE), 5), np.nan)
    # A stage that is called as an argument of a wrapper is: its count goes on.
    for name in ("b1", "hyperparams", "ns_coeffs"):
        converted(functools.partial(named_chain(name), RATE))


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


# Other matrices in the same parameters.

# Of a leaf (4, 6): one matrix, three heads of two columns, a fused projection to 4 and 2.
WHOLE, HEADS = Dims(0, 1), BlockDimensionNumbers(block_axis=1, blocks=3)
CUT = BlockDimensionNumbers(block_axis=1, blocks=(4, 2))
EXPERTS, FLAT = Dims(1, 2), Dims((0, 1), 2)  # Of a leaf (3, 4, 6).
KINDS = [
    ((WHOLE, FLAT), (HEADS, EXPERTS)),
    ((HEADS, EXPERTS), (WHOLE, FLAT)),
    ((WHOLE, EXPERTS), (CUT, FLAT)),
    ((CUT, FLAT), (HEADS, EXPERTS)),
]


leaves = functools.partial(
    runs.tree, shapes={"w": (4, 6), "stack": (3, 4, 6), "bias": (5,)}
)


def build(make, w, stack, **options):
    numbers = {"w": w, "stack": stack, "bias": None}
    return make(0.01, weight_dimension_numbers=numbers, **options)


def trained(optimizer):
    return runs.run(optimizer, leaves(0), 2, leaves)[-1]


def matrices(numbers, w):
    """The matrices of a leaf, each as NumPy's slice of it and its shape (m, n)."""
    columns = {HEADS: (2, 2, 2), CUT: (4, 2), WHOLE: (6,)}
    if numbers in columns:
        ends = np.cumsum(columns[numbers])
        return [np.s_[:, b - a : b] for a, b in zip(columns[numbers], ends, strict=True)]
    return [np.s_[:]] if numbers == FLAT else [np.s_[i] for i in range(3)]


@pytest.mark.quick_first_case
@pytest.mark.parametrize(("before", "after"), KINDS)
def test_the_momentum_goes_on_in_the_new_matrices(before, after):
    params, state = trained(build(muon, *before))
    optimizer = build(muon, *after)
    converted = convert_state(state, optimizer, params)
    grads = leaves(9)
    updates, _ = optimizer.update(grads, converted, params)
    trace = optax.tree.get(state, "trace")
    for name, numbers in zip(("w", "stack"), after, strict=True):
        lookahead = 0.95 * (0.95 * trace[name] + grads[name]) + grads[name]
        for part in matrices(numbers, params[name]):
            m = lookahead[part].reshape(-1, lookahead[part].shape[-1])
            direction = 0.2 * max(m.shape) ** 0.5 * polar_factor(m)
            expected = 0.1 * params[name][part] + direction.reshape(lookahead[part].shape)
            np.testing.assert_allclose(
                updates[name][part], -0.01 * expected, rtol=1e-4, atol=1e-7
            )


@pytest.mark.parametrize(("before", "after"), KINDS)
@pytest.mark.parametrize("make", [orscale, family.normuon])
@pytest.mark.parametrize("options", [{}, {"mu_dtype": "int8"}], ids=["", "int8"])
@pytest.mark.extended
def test_what_is_known_of_each_matrix_begins_anew(make, options, before, after):
    params, state = trained(build(make, *before, **options))
    optimizer = build(make, *after, **options)
    converted = convert_state(state, optimizer, params)
    heads = {WHOLE: (), HEADS: (3,), CUT: (2,)}[after[0]]
    if make is orscale:
        assert readout(converted, "trust_ratio")["w"].shape == heads
    for of_adamw in ("mu", "nu"):
        found, kept = (
            optax.tree.get_all_with_path(x, of_adamw)[-1][1]["bias"]
            for x in (converted, state)
        )
        np.testing.assert_array_equal(found, kept)
    updates, state = optimizer.update(leaves(9), converted, params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    if make is orscale:
        for ratio in jax.tree.leaves(readout(state, "trust_ratio")):
            np.testing.assert_allclose(ratio, 1, rtol=1e-5)


@pytest.mark.extended
def test_a_state_with_a_field_for_a_state():
    """Of optax.contrib.sam, which is no nnx.Optimizer: all of it goes on."""
    params = {"w": jnp.eye(4, 8)}
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.5))
    optimizer = optax.contrib.sam(
        orscale(RATE), adversary, sync_period=2, reset_state=False
    )
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update({"w": jnp.ones((4, 8))}, state, params)
        params = optax.apply_updates(params, updates)
    converted = convert_state(state, optimizer, params)
    jax.tree.map(np.testing.assert_array_equal, converted, state)


@pytest.mark.parametrize("old", [0, 1])
def test_numbers_of_as_many_other_matrices_start_over(old):
    """Halves of columns and columns in turn; every second column is ten times as long."""
    halves = [
        BlockDimensionNumbers(0, 1, block_axis=1, blocks=2, stride=x) for x in (8, 1)
    ]
    params = {"w": tree(0)["up"] * jnp.array([[1.0, 10.0] * 8])}
    of = [orscale(RATE, weight_dimension_numbers={"w": numbers}) for numbers in halves]
    state = runs.run(of[old], params, 1, lambda _: params)[-1][1]
    for new in (0, 1):
        converted = jax.jit(convert_state, static_argnums=1)(state, of[new], params)
        _, after = of[new].update(params, converted, params)
        kept = readout(converted, "calibration")["w"]
        wanted = readout(state, "calibration")["w"] * (new == old)
        np.testing.assert_array_equal(kept, wanted)
        ratios = readout(after, "raw_trust_ratio")["w"]
        np.testing.assert_allclose(ratios, 1, rtol=0.1)
