"""Master weights of bfloat16 parameters, against float32 training to the bit.

Those of 24 bits are compared with NumPy's rounding of float64.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax import (
    check_state,
    convert_state,
    describe,
    diagnostics,
    family,
    keep_master_weights,
    master_weights,
    orscale,
    state_shardings,
)
from tests.runs import (
    AUTO,
    EXPLICIT,
    NUMBERS,
    assert_close,
    assert_same_bits,
    mesh_of,
    placed,
    readout,
    run,
    step_of,
    tree,
)

RATE = 1e-3
SMALLEST = np.float32(2.0**-118)
gradients = functools.partial(tree, dtype=jnp.bfloat16)
OPTIMIZERS = {
    "orscale": orscale(RATE, weight_dimension_numbers=NUMBERS),
    "adamw": optax.adamw(RATE),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        orscale(RATE, weight_dimension_numbers=NUMBERS, mu_dtype="bfloat16"),
    ),
}
WITH_EACH = pytest.mark.parametrize("name", OPTIMIZERS)


def as_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def upper_halves(x):
    return (bits(x) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def moved(old, step, kept=16):
    """What one update makes of float32 weights: parameter and master weight."""
    optimizer = keep_master_weights(optax.identity(), kept)
    params = {"w": jnp.asarray(upper_halves(old))}
    state = optimizer.init(params)
    low = (bits(old) & 0xFFFF) >> (16 - kept)
    low = jnp.asarray(low.astype(f"uint{kept}"))
    state = state._replace(low_bits={"w": low})
    updates, state = jax.jit(optimizer.update)({"w": jnp.asarray(step)}, state, params)
    params = optax.apply_updates(params, updates)
    return np.asarray(params["w"]), np.asarray(master_weights(state, params)["w"])


def random_bits(rng, count):
    return rng.integers(0, 2**32, count, dtype=np.uint32)


def float32(bits):
    return np.asarray(bits).astype(np.uint32).view(np.float32)


def near_zero(rng, count):
    """Numbers of all sizes, and steps that take them almost to zero, or across it."""
    old = random_bits(rng, count)
    by = rng.integers(-(2**16), 2**16, count) >> rng.integers(0, 16, count)
    return float32(old), -float32(old.astype(np.int64) + by)


def near_powers_of_two(rng, count):
    power = rng.integers(60, 190, count) << 23
    a, b = (power + rng.integers(-2000, 2000, count) for _ in range(2))
    return float32(a), -float32(b)


def like_training(rng, count):
    old = 0.02 * rng.normal(size=count)
    steps = rng.normal(size=count) * 10.0 ** rng.uniform(-9, 1, count)
    return old.astype(np.float32), steps.astype(np.float32)


def anything(rng, count):
    return float32(random_bits(rng, count)), float32(random_bits(rng, count))


KINDS = [near_zero, near_powers_of_two, like_training, anything]


def of_24_bits(x):
    """The nearest numbers with 16 significant bits, the even ones of two."""
    x = np.asarray(x, np.float64)
    fraction, exponent = np.frexp(x)
    with np.errstate(over="ignore"):
        rounded = np.ldexp(np.rint(fraction * 2**16), exponent - 16).astype(np.float32)
    return np.where(np.isfinite(x), rounded, x).astype(np.float32)


@pytest.mark.parametrize("kept", [16, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick_first_case
def test_one_update_is_that_of_float32_weights(kind, kept):
    old, step = kind(np.random.default_rng(0), 100_000)
    if kept == 8:
        old = float32(bits(old) & 0xFFFFFF00)
    with np.errstate(all="ignore"):
        # Devices may take a subnormal step for zero.
        ordinary = np.isfinite(old) & (np.abs(old) >= SMALLEST)
        ordinary &= np.isfinite(step) & (np.abs(step) >= np.finfo(np.float32).tiny)
        old, step = old[ordinary], step[ordinary]
        new = old + step
    new = np.where(np.abs(new) < SMALLEST, np.float32(0), new)
    new = of_24_bits(new) if kept == 8 else new
    param, master = moved(old, step, kept)
    np.testing.assert_array_equal(bits(master), bits(new))
    np.testing.assert_array_equal(bits(param), bits(upper_halves(new)))


def test_which_steps_24_bits_lose():
    """None above 2^-16 of a weight, and all below 2^-17, also at powers of two."""
    rng = np.random.default_rng(0)
    old = (bits(rng.normal(size=30_000).astype(np.float32)) & 0xFFFFFF00).view("f4")
    old[:1000] = 2.0 ** rng.integers(-20, 20, 1000)
    signs = rng.choice([-1, 1], old.size).astype("f4")
    for part, moves in [(2**-16 * 1.01, True), (2**-17 * 0.99, False)]:
        _, new = moved(old, signs * np.abs(old) * np.float32(part), 8)
        assert ((new != old) == moves).all()
        assert (np.sign(new - old) == signs * moves).all()
    norm = np.float32([1.0])
    for rate in (1.4e-5, 1.6e-5):  # AdamW's steps of a norm's scale.
        assert (moved(norm, np.float32([rate]), 8)[1] != norm) == (rate > 2**-16)


@pytest.mark.parametrize(
    ("old", "step", "new"),
    [
        (np.inf, -1.0, np.inf),
        (-np.inf, 1.0, -np.inf),
        (3e38, 3e38, np.inf),
        (np.inf, -np.inf, np.nan),
        (np.nan, 1.0, np.nan),
        (1.0, np.nan, np.nan),
        (0.0, -0.0, 0.0),
        (-0.0, 0.0, 0.0),
        (-0.0, -0.0, 0.0),  # As a number: the sign of zero is not kept.
        (0.0, 1e-38, 0.0),
        (1e-38, 0.0, 0.0),
        (-1e-40, 1.0, 1.0),
        (1.0, -1.0, 0.0),
        (1 - 2.0**-24, 2.0**-24, 1.0),  # A carry into the exponent.
        (1.0, -(2.0**-24), 1 - 2.0**-24),
    ],
)
def test_special_numbers(old, step, new):
    param, master = moved(np.float32([old]), np.float32([step]))
    np.testing.assert_array_equal(master, np.float32([new]))
    np.testing.assert_array_equal(param.astype(np.float32), upper_halves(
        np.float32([new])
    ).astype(np.float32))  # fmt: skip


@pytest.mark.parametrize(
    ("old", "step", "new"),
    [
        (np.inf, -1.0, np.inf),
        (np.inf, -np.inf, np.nan),
        (np.nan, 1.0, np.nan),
        (1.0, np.nan, np.nan),
        (2.0**128 - 2.0**112, 2.0**111, np.inf),  # The largest one.
        (1.0, 2.0**-16, 1.0),  # Halfway, to the even one.
        (1 + 2.0**-15, 2.0**-16, 1 + 2.0**-14),
        (-1.0, -(2.0**-16) - 2.0**-22, -1 - 2.0**-15),
        (2 - 2.0**-15, 2.0**-15, 2.0),  # A carry into the exponent.
    ],
)
def test_special_numbers_of_24_bits(old, step, new):
    param, master = moved(np.float32([old]), np.float32([step]), 8)
    np.testing.assert_array_equal(master, np.float32([new]))
    wanted = upper_halves(np.float32([new])).astype(np.float32)
    np.testing.assert_array_equal(param.astype(np.float32), wanted)


def test_conversion_between_16_and_8_bits():
    """What 8 bits hold survives; of 16 the upper ones stay; no other state is taken."""
    inner = OPTIMIZERS["chain"]
    wide, narrow = keep_master_weights(inner), keep_master_weights(inner, bits=8)
    params, state = run(wide, gradients(0), 2, gradients)[-1]
    shorter = convert_state(state, narrow, params)
    assert_same_bits(shorter.inner_state, state.inner_state)
    for name, low in state.low_bits.items():
        np.testing.assert_array_equal(shorter.low_bits[name], np.asarray(low) >> 8)
        assert shorter.low_bits[name].dtype == jnp.uint8
    longer = convert_state(shorter, wide, params)
    assert_same_bits(convert_state(longer, narrow, params), shorter)
    found, expected = (master_weights(x, params) for x in (longer, shorter))
    assert_same_bits(found, expected)
    for given, optimizer, left in [(state, narrow, 8), (shorter, wide, 16)]:
        with pytest.raises(
            ValueError, match=f"not those of bits={left}: .*convert_state"
        ):
            optimizer.update(gradients(1), given, params)
        with pytest.raises(ValueError, match=r"(?s)low_bits of .*'b'.*convert_state"):
            check_state(given, optimizer, params)
    check_state(shorter, narrow, params)
    narrow.update(gradients(1), shorter, params)


def test_bytes_and_shardings_of_24_bits():
    mesh = mesh_of({"a": 2}, EXPLICIT)
    params = placed({"w": jnp.ones((6, 8), jnp.bfloat16)}, mesh, P("a", None))
    optimizer = keep_master_weights(optax.sgd(RATE), bits=8)
    assert describe(params, optimizer).state_bytes_per_parameter == 1
    assert state_shardings(optimizer, params).low_bits["w"].spec == P("a", None)


@pytest.mark.quick_first_case
@WITH_EACH
def test_training_is_float32_training_to_the_bit(name):
    inner = OPTIMIZERS[name]
    optimizer = keep_master_weights(inner)
    params = gradients(0)
    weights = as_float32(params)
    state, wanted = optimizer.init(params), inner.init(weights)
    # Outside of one program XLA fuses nothing across the edge of the wrapper.
    step = jax.jit(inner.update)
    optimizer = keep_master_weights(optax.GradientTransformation(inner.init, step))
    for seed in range(1, 5):
        updates, state = optimizer.update(gradients(seed), state, params)
        params = optax.apply_updates(params, updates)
        updates, wanted = step(as_float32(gradients(seed)), wanted, weights)
        weights = optax.apply_updates(weights, updates)
        assert_same_bits(master_weights(state, params), weights)
        assert_same_bits(state.inner_state, wanted)
        assert_same_bits(params, jax.tree.map(upper_halves, weights))


@pytest.mark.extended
def test_other_dtypes_are_left_to_the_inner_optimizer(enable_x64):
    kinds = {"a": jnp.float32, "b": jnp.bfloat16, "c": jnp.float64, "d": jnp.complex64}
    params = {name: jnp.ones(4, dtype) for name, dtype in kinds.items()}
    optimizer = keep_master_weights(optax.sgd(RATE))
    state = optimizer.init(params)
    masked = optax.MaskedNode()
    assert state.low_bits["b"].dtype == jnp.uint16
    assert {n: x for n, x in state.low_bits.items() if n != "b"} == dict.fromkeys(
        "acd", masked
    )
    updates, after = optimizer.update(params, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    wanted = kinds | {"b": jnp.float32}
    assert {name: update.dtype for name, update in updates.items()} == wanted
    np.testing.assert_array_equal(updates["c"], -RATE)


def test_a_state_of_abstract_parameters_and_of_keys():
    """Optax's init takes both, too."""
    params = tree(0) | {"w": tree(0, jnp.bfloat16)["w"]}
    optimizer = keep_master_weights(orscale(RATE, weight_dimension_numbers=NUMBERS))
    abstract = jax.eval_shape(lambda: params)
    assert_same_bits(optimizer.init(abstract), optimizer.init(params))
    keys, zero = {"key": jax.random.key(0)}, {"key": jnp.zeros(())}
    plain = orscale(RATE)
    keep_master_weights(optax.sgd(RATE)).init(keys)
    with pytest.raises(ValueError, match=r"'key' has dtype key<"):
        plain.update(keys, plain.init(zero), keys)
    with pytest.raises(ValueError, match=r"'key' has dtype float32"):
        plain.update(zero, plain.init(keys), keys)
    with pytest.raises(ValueError, match=r"'w' .*jax\.eval_shape\(optimizer\.init"):
        family.hyperball(RATE).init({"w": jax.ShapeDtypeStruct((4, 6), jnp.float32)})


def test_wrong_arguments_are_refused():
    optimizer = keep_master_weights(optax.sgd(RATE))
    for wrong in (24, 0, "8", 8.0, True, None):
        with pytest.raises(ValueError, match=f"bits={wrong!r} .* pass 16 or 8"):
            keep_master_weights(optax.sgd(RATE), bits=wrong)
    for dtype in ("float16", "float8_e4m3fn"):
        with pytest.raises(TypeError, match=f"'mlp.up' is {dtype}"):
            optimizer.init({"mlp": {"up": jnp.zeros(4, dtype)}})
    params = {"w": jnp.ones((3, 1), jnp.bfloat16)}
    wide = {"w": jnp.ones((3, 3), jnp.bfloat16)}
    state = optimizer.init(params)
    for given, words in [
        ((params, state), "not passing `params`"),
        ((wide, state, wide), r"'w' has shape \(3, 3\), but its low bits"),
        (
            (params, state, as_float32(params)),
            r"'w' was bfloat16 and is float32: .*optax",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer.update(*given)
    for states, count in [(state.inner_state, 0), ((state, state), 2)]:
        with pytest.raises(ValueError, match=f"{count} MasterWeightsState"):
            master_weights(states, params)


def test_missing_gradients():
    params = {"w": jnp.ones(4, jnp.bfloat16), "frozen": jnp.ones(4, jnp.bfloat16)}
    optimizer, grads = keep_master_weights(optax.sgd(RATE)), params | {"frozen": None}
    updates, after = optimizer.update(grads, optimizer.init(params), params)
    assert updates["frozen"] is None
    np.testing.assert_array_equal(after.low_bits["frozen"], 0)
    assert np.all(after.low_bits["w"] != 0)
    # A state without the parameter, as of Equinox's filtered modules.
    _, after = optimizer.update(grads, optimizer.init(grads), grads)
    assert after.low_bits["frozen"] is None


def test_masks_and_partitions():
    x = jnp.ones(4, jnp.bfloat16)
    params = {"w": x, "frozen": x}
    optimizer = keep_master_weights(optax.sgd(RATE))
    masked = optax.masked(optimizer, {"w": True, "frozen": False})
    updates, state = masked.update(params, masked.init(params), params)
    assert isinstance(state.inner_state.low_bits["frozen"], optax.MaskedNode)
    np.testing.assert_array_equal(updates["frozen"], params["frozen"])

    def partition(of_w, labels):
        return optax.partition({"trained": of_w, "frozen": optax.set_to_zero()}, labels)

    nested = {"encoder": {"w": x}, "decoder": {"w": x}}
    for whole in (
        optax.masked(optimizer, {"encoder": False, "decoder": True}),
        partition(optimizer, {"encoder": "frozen", "decoder": "trained"}),
    ):
        masters = master_weights(whole.init(nested), nested)
        assert masters["decoder"]["w"].dtype == jnp.float32
        assert masters["encoder"]["w"] is nested["encoder"]["w"]
    inner = partition(optax.sgd(RATE), {"w": "trained", "frozen": "frozen"})
    around = keep_master_weights(inner)
    updates, _ = around.update(params, around.init(params), params)
    np.testing.assert_array_equal(updates["frozen"], 0)


@pytest.mark.extended
def test_wrappers_of_optax():
    """What applies an update whole or not at all; a schedule; hyperparameters."""
    params = gradients(0)
    build = functools.partial(orscale, weight_dimension_numbers=NUMBERS)
    plain = run(keep_master_weights(build(RATE)), params, 3, gradients)
    expected = master_weights(plain[-1][1], plain[-1][0])

    def assert_same_as_plain(optimizer, steps=3, gradients=gradients):
        params_after, state = run(optimizer, params, steps, gradients)[-1]
        masters = master_weights(state, params_after)
        assert_close(masters, expected, atol=1e-7)
        assert_same_bits(params_after, jax.tree.map(upper_halves, masters))

    def twice(step):  # The mean of two gradients that are the same is the gradient.
        return gradients((step + 1) // 2)

    def injected(learning_rate):
        return keep_master_weights(build(learning_rate))

    assert_same_as_plain(optax.MultiSteps(keep_master_weights(build(RATE)), 2), 6, twice)
    inside = optax.inject_hyperparams(build)(learning_rate=RATE)
    assert_same_as_plain(keep_master_weights(inside))
    around = optax.inject_hyperparams(injected, hyperparam_dtype=jnp.float32)
    assert_same_as_plain(around(learning_rate=RATE))
    assert_same_as_plain(keep_master_weights(build(lambda _: RATE)))
    assert_same_as_plain(keep_master_weights(optax.MultiSteps(build(RATE), 2)), 6, twice)
    rejecting = keep_master_weights(optax.apply_if_finite(build(RATE), 5))
    assert_same_as_plain(rejecting)
    broken = jax.tree.map(lambda x: x * np.nan, params)
    state = rejecting.init(params)
    updates, after = rejecting.update(broken, state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert_same_bits(after.low_bits, state.low_bits)


@pytest.mark.parametrize("axes", [AUTO, EXPLICIT])
@pytest.mark.extended
def test_a_mesh_changes_no_bit(axes):
    """An optimizer with exact products: however XLA fuses them, its sums are the same."""
    specs = {"w": P(None, "b"), "stack": P(None, "a", None), "b": P("b")}
    mesh = mesh_of({"a": 2, "b": 4}, axes)
    shapes = {"w": (6, 8), "stack": (3, 4, 5), "b": (4,)}
    optimizer = keep_master_weights(optax.sgd(2.0**-10, momentum=0.5))

    def trained(place):
        drawn = [place(tree(seed, jnp.bfloat16, shapes)) for seed in range(4)]
        return run(optimizer, drawn[0], 3, lambda step: drawn[step])[-1]

    with jax.set_mesh(mesh):
        found = trained(lambda tree: placed(tree, mesh, specs))
    assert_same_bits(found, trained(lambda tree: tree))
    shardings = state_shardings(optimizer, found[0])
    for name, low in found[1].low_bits.items():
        assert shardings.low_bits[name].spec == specs[name]
        where = NamedSharding(mesh, specs[name])
        assert low.sharding.is_equivalent_to(where, low.ndim)


BOXES = {
    "linen": lambda x: nn.Partitioned(x, ("a", None)),
    "nnx": lambda x: nnx.Param(x, out_sharding=("a", None), eager_sharding=False),
}


@pytest.mark.extended
@pytest.mark.parametrize("kind", BOXES)
def test_boxes(kind):
    """The low bits and the master weights are in boxes like those of the parameters."""
    bare = {"w": tree(0, jnp.bfloat16)["w"], "b": jnp.ones(4)}  # float32 beside it.
    boxed = bare | {"w": BOXES[kind](bare["w"])}
    optimizer = keep_master_weights(orscale(RATE))
    [*_, (wanted, state)] = run(optimizer, bare, 2, lambda _: bare)
    [*_, (params, found)] = run(optimizer, boxed, 2, lambda _: boxed)
    assert jax.tree.structure(params) == jax.tree.structure(boxed)
    masters = master_weights(found, params)
    for box in (found.low_bits["w"], masters["w"]):
        assert jax.tree.structure(box) == jax.tree.structure(boxed["w"])
    leaves = [jax.tree.leaves(tree) for tree in ((params, found), (wanted, state))]
    assert_same_bits(*leaves)
    assert jax.tree.leaves(masters)[-1].dtype == jnp.float32


@pytest.mark.extended
def test_readouts_and_conversions_see_through_it():
    inner = OPTIMIZERS["orscale"]
    optimizer = keep_master_weights(inner)
    params, state = run(optimizer, gradients(0), 2, gradients)[-1]
    reading = diagnostics.read(state, params, weight_dimension_numbers=NUMBERS)
    np.testing.assert_array_equal(
        reading.trust_ratio["w"], readout(state.inner_state, "trust_ratio")["w"]
    )
    again = convert_state(state, optimizer, params)
    assert_same_bits(again, state)
    started = convert_state(state.inner_state, optimizer, params)
    assert_same_bits(started.inner_state, state.inner_state)
    np.testing.assert_array_equal(started.low_bits["w"], 0)
    without = convert_state(state, inner, master_weights(state, params))
    assert_same_bits(without, state.inner_state)


@pytest.mark.extended
def test_readouts_are_of_the_master_weights():
    """Also where several optimizers of a partition keep some."""
    wide = {"a": 2 * jnp.eye(8), "b": jnp.eye(8)}
    params = optax.tree.cast(wide, jnp.bfloat16)
    labels = {name: name for name in params}
    kept = {name: keep_master_weights(orscale(1e-5)) for name in params}
    optimizer = optax.partition(kept, labels)
    float32 = optax.partition({name: orscale(1e-5) for name in params}, labels)
    state, expected = optimizer.init(params), float32.init(wide)
    for _ in range(3):
        updates, state = optimizer.update(params, state, params)
        grads = optax.tree.cast(params, jnp.float32)
        steps, expected = float32.update(grads, expected, wide)
        params = optax.apply_updates(params, updates)
        wide = optax.apply_updates(wide, steps)
    found = diagnostics.read(state, params)
    wanted = diagnostics.read(expected, wide)
    assert wanted.growth["a"] != 1
    np.testing.assert_allclose(found.weight_norm["a"], wanted.weight_norm["a"], rtol=1e-6)
    np.testing.assert_allclose(found.growth["b"], wanted.growth["b"], rtol=1e-6)


@pytest.mark.extended
def test_derivatives_are_those_of_float32():

    def trained(rate, wrap, dtype):
        optimizer = wrap(optax.sgd(rate, momentum=0.9))
        params = {"w": jnp.arange(1.0, 5.0).astype(dtype)}
        state = optimizer.init(params)
        for _ in range(3):
            grads = optax.tree.cast(params, jnp.float32)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params["w"].astype(jnp.float32).sum()

    expected = jax.grad(trained)(0.01, lambda inner: inner, jnp.float32)
    for derivative, kept in itertools.product((jax.grad, jax.jacfwd), (16, 8)):
        wrap = functools.partial(keep_master_weights, bits=kept)
        found = derivative(trained)(0.01, wrap, jnp.bfloat16)
        np.testing.assert_allclose(found, expected, rtol=0.02)


@pytest.mark.compiled
@pytest.mark.extended
def test_bytes_of_the_step():
    """Weights and low bits are 4 bytes a parameter, and are updated where they are."""
    params = {"w": jnp.zeros((64, 32), jnp.bfloat16)}
    optimizer = keep_master_weights(orscale(RATE))
    step = step_of(optimizer, donate_argnums=(0, 1))
    program = step.lower(params, optimizer.init(params), params).compile()
    memory = program.memory_analysis()
    momentum, gradient = 4, 2
    per_parameter = memory.argument_size_in_bytes / (64 * 32)
    assert per_parameter == pytest.approx(2 + 2 + momentum + gradient, rel=0.01)
    updated = memory.alias_size_in_bytes / (64 * 32)
    assert updated == pytest.approx(2 + 2 + momentum, rel=0.01)
