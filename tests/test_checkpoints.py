"""States saved with Orbax, restored, and carried on; docs/checkpoints.md in tests."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import keep_master_weights, muon, orscale
from tests import everything
from tests.runs import assert_same_bits, readout, tree

ROOT = pathlib.Path(__file__).parents[1]
NUMBERS = {"w": Dims(0, 1), "late": Dims(0, 1), "stack": Dims(1, 2), "b": None}
STEPS = 6


def build(factory=orscale, rate=1e-2, **arguments):
    return factory(rate, **({"weight_dimension_numbers": NUMBERS} | arguments))


ORSCALE, UNCALIBRATED = build(), build(calibrate=False)
OPTIMIZERS = {
    **{name: build(make) for name, make in everything.OPTIMIZERS.items()},
    "bfloat16_momentum": build(mu_dtype=jnp.bfloat16),
    "master_weights": keep_master_weights(ORSCALE),  # Of bfloat16 parameters.
    "injected": optax.inject_hyperparams(orscale)(
        learning_rate=optax.linear_schedule(1e-2, 0.0, STEPS),
        weight_dimension_numbers=NUMBERS,
    ),
    "wrapped": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.apply_if_finite(
            optax.MultiSteps(ORSCALE, every_k_schedule=2).gradient_transformation(),
            max_consecutive_errors=3,
        ),
    ),
}
SHAPES = {"w": (6, 4), "late": (4, 4), "stack": (3, 4, 5), "b": (4,)}


def params(dtype=jnp.float32):
    weights = tree(0, dtype, SHAPES)
    # The last of the stack has no initial scale: c = inf.
    return weights | {"stack": weights["stack"].at[2].set(0)}


def gradients(step):
    """Gradients; those of a matrix are zero before step 4, of an expert before step 3."""
    grads = tree(step, shapes=SHAPES)
    return grads | {
        "late": grads["late"] * (step >= 4),
        "stack": grads["stack"].at[0].multiply(step >= 3),
    }


@functools.cache
def compiled(optimizer):
    return jax.jit(optimizer.update)


def advance(optimizer, run, steps):
    """The weights and the state after each of the steps."""
    seen = []
    for step in steps:
        weights, state = run
        updates, state = compiled(optimizer)(gradients(step), state, weights)
        run = optax.apply_updates(weights, updates), state
        seen.append(run)
    return seen


def start(optimizer):
    of_bfloat16 = optimizer is OPTIMIZERS["master_weights"]
    begin = params(jnp.bfloat16 if of_bfloat16 else jnp.float32)
    if optimizer is OPTIMIZERS["hyperball"]:  # It refuses matrices of zeros.
        begin = tree(0, shapes=SHAPES)
    return begin, optimizer.init(begin)


def save_and_restore(folder, run, optimizer):
    """The run, saved and restored in the structure of ``optimizer``."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", run)
        checkpointer.wait_until_finished()
        abstract = jax.eval_shape(lambda: start(optimizer))
        return checkpointer.restore(folder / "checkpoint", abstract)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_can_be_resumed_to_the_bit(name, tmp_path):
    optimizer = OPTIMIZERS[name]
    begin = start(optimizer)
    seen = advance(optimizer, begin, range(1, STEPS + 1))
    for step in (0, 3):
        run = [begin, *seen][step]
        folder = tmp_path / str(step)
        restored = save_and_restore(folder, run, optimizer)
        assert_same_bits(restored, run)
        carried_on = advance(optimizer, restored, range(step + 1, STEPS + 1))
        assert_same_bits(carried_on[-1], seen[-1])


def test_the_runs_above_pass_from_uncalibrated_to_calibrated():
    optimizer = ORSCALE
    seen = [start(optimizer), *advance(optimizer, start(optimizer), range(1, STEPS + 1))]
    c, counts = (
        [readout(state, name) for _, state in seen]
        for name in ("calibration", "anchor_count")
    )
    set_at = [
        [int(x["late"] > 0), *(x["stack"] > 0).astype(int).tolist()] for x in counts
    ]
    assert set_at == [[0, 0, 0, 0]] + 2 * [[0, 0, 1, 1]] + [[0, 1, 1, 1]] + 3 * [[1] * 4]
    assert c[-1]["stack"][2] == 0  # It has no initial scale, as its count says.


@functools.cache
def after(optimizer, steps):
    return advance(optimizer, start(optimizer), range(1, steps + 1))[-1]


@pytest.mark.extended
@pytest.mark.parametrize(
    "arguments",
    [
        {"rate": 3e-2},
        {"r_max": 1.01, "r_min": 0.99},
        {"ns_steps": 7},
        {"ns_dtype": jnp.bfloat16},
        {"mu_dtype": jnp.bfloat16},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_hyperparameters_take_over_at_the_next_step(arguments, tmp_path):
    run, changed = after(ORSCALE, 4), build(**arguments)
    restored = save_and_restore(tmp_path, run, changed)
    [(weights, state)] = advance(changed, restored, [5])
    kept = jax.tree.map(lambda x, a: x.astype(a.dtype), run, restored)
    [(expected, _)] = advance(changed, kept, [5])
    assert_same_bits(weights, expected)
    assert_same_bits(readout(state, "calibration"), readout(run[1], "calibration"))
    [(unchanged, _)] = advance(ORSCALE, run, [5])
    assert any((weights[k] != unchanged[k]).any() for k in weights)


def without_numbers(state):
    numbers = jax.tree.map(jnp.zeros_like, readout(state, "numbers"))
    return optax.tree.set(state, numbers=numbers)


@pytest.mark.extended
def test_switching_calibration_on_and_off(tmp_path):
    """On: it is anchored at the next direction, as in a run that begins there."""
    run = after(UNCALIBRATED, 4)
    restored = save_and_restore(tmp_path / "on", run, ORSCALE)
    seen = advance(ORSCALE, restored, [5, 6])
    for leaf in ("w", "late"):
        first, second = (readout(state, "raw_trust_ratio")[leaf] for _, state in seen)
        np.testing.assert_allclose(first, 1, rtol=1e-5)
        c = [readout(state, "calibration")[leaf] for _, state in seen]
        assert second != 1 and c[0] == c[1] != 1

    fresh = run[0], without_numbers(run[1])
    assert_same_bits(seen, advance(ORSCALE, fresh, [5, 6]))
    run = after(ORSCALE, 4)  # Off: c is one.
    restored = save_and_restore(tmp_path / "off", run, UNCALIBRATED)
    [(_, state)] = advance(UNCALIBRATED, restored, [5])
    assert all((c == 1).all() for c in jax.tree.leaves(readout(state, "calibration")))


@pytest.mark.extended
def test_another_anchor_goes_on_from_the_directions_that_have_entered(tmp_path):
    def c_before_and_after(old, new):
        run = after(OPTIMIZERS[old], 4)
        restored = save_and_restore(tmp_path / new, run, OPTIMIZERS[new])
        [(_, state)] = advance(OPTIMIZERS[new], restored, [5])
        return [readout(s, "calibration")["stack"] for s in (run[1], state)]

    c, lowered = c_before_and_after("orscale", "largest_anchor")
    assert (lowered <= c).all() and (lowered < c).any()
    np.testing.assert_array_equal(*c_before_and_after("largest_anchor", "orscale"))


@pytest.mark.extended
@pytest.mark.parametrize("arguments", [{"weight_decay": 0.4}, {"consistent_rms": 0.4}])
def test_hyperparameters_in_c_are_anchored_again_on_request(arguments, tmp_path):
    """λ and s are part of c: r jumps when they change, until c is set to zero."""
    run, changed = after(ORSCALE, 4), build(r_max=99.0, **arguments)
    weights, state = save_and_restore(tmp_path, run, changed)
    _, jumped = advance(changed, (weights, state), [5])[0]
    _, before = advance(build(r_max=99.0), run, [5])[0]
    ratio = readout(jumped, "raw_trust_ratio")["w"]
    assert ratio < 0.9 * readout(before, "raw_trust_ratio")["w"]
    _, anchored = advance(changed, (weights, without_numbers(state)), [5])[0]
    np.testing.assert_allclose(readout(anchored, "raw_trust_ratio")["w"], 1, rtol=1e-5)


OTHERS = {
    "muon": (build(muon), "structures do not match"),
    "schedule": (build(rate=lambda _: 1e-2), "Structure mismatch.*count"),
    "decay_schedule": (build(weight_decay=lambda _: 0.1), "Structure mismatch.*count"),
    "decay_mask": (build(weight_decay_mask="matrices"), "ismatch|do not match"),
    "routing": (
        build(weight_dimension_numbers=NUMBERS | {"stack": None}),
        r"Structure mismatch.*'mu', 'stack'",
    ),
    "adamw": (optax.adamw(1e-2), "mismatch|do not match"),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("back", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_another_structure_is_an_error(other, back, tmp_path):
    other, words = OTHERS[other]
    saved, restored = (other, ORSCALE) if back else (ORSCALE, other)
    match = "mismatch|do not match" if back else words
    with pytest.raises(ValueError, match=match):
        save_and_restore(tmp_path, after(saved, 2), restored)


# What CHANGELOG.md promises of 0.1.
LAYOUT = """
inner_states.adamw.inner_state.0.count int32 ()
inner_states.adamw.inner_state.0.mu.bias float32 (8,)
inner_states.adamw.inner_state.0.nu.bias float32 (8,)
inner_states.matrix.inner_state.0.trace.kernel float32 (3, 4, 8)
inner_states.matrix.inner_state.2.numbers.kernel float32 (7, 3)
""".strip().splitlines()


@pytest.mark.parametrize("factory", [orscale, muon])
def test_the_layout_of_0_1(factory):
    """A change of it is for a minor release, and for the changelog."""
    numbers = {"kernel": Dims(1, 2), "bias": None}
    params = {"kernel": jnp.ones((3, 4, 8)), "bias": jnp.zeros(8)}
    state = build(factory, weight_dimension_numbers=numbers).init(params)
    leaves = jax.tree.leaves_with_path(state)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    layout = [f"{name(path)} {leaf.dtype} {leaf.shape}" for path, leaf in leaves]
    without_ratio = [row for row in LAYOUT if "numbers" not in row]
    assert layout == (LAYOUT if factory is orscale else without_ratio)
