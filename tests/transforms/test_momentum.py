"""The momentum of 8 bits, against float64 NumPy, written from the page alone."""

import functools
import math
import operator

import haliax as hax
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    BlockDimensionNumbers as Blocks,
    convert_state,
    describe,
    diagnostics,
    muon,
    orscale,
)
from orscale_jax.transforms import momentum as int8_blocks
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.transforms.momentum import momentum_stage
from orscale_jax.trees.boxes import unbox
from tests import leaves
from tests.runs import (
    FAMILY,
    NUMBERS,
    assert_same_bits,
    numbers_of,
    readout,
    run,
    step_of,
    tree,
)

SMALLEST = 2.0**-119
encode = jax.jit(int8_blocks.encode, static_argnums=1)
decode = jax.jit(int8_blocks.decode, static_argnums=2)


def rounded(x, axis):
    """Encoded and decoded in float32."""
    return np.asarray(decode(*encode(jnp.asarray(x), axis), jnp.float32))


def oracle(x, axis):
    """Codes, scales and steps of every entry, one block at a time, in float64."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, 0)
    codes, steps, scales = np.zeros(x.shape, int), np.zeros(x.shape), []
    for start in range(0, max(1, len(x)), 32):
        block = x[start : start + 32]
        largest = np.abs(block).max(axis=0, initial=0)
        scale = largest.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        scale[scale < SMALLEST] = 0
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.rint(127 * block / scale)
        codes[start : start + 32] = np.where(scale > 0, found, 0)
        steps[start : start + 32] = scale / 127
        scales.append(scale)
    return (np.moveaxis(array, 0, axis) for array in (codes, np.array(scales), steps))


ENTRIES = st.sampled_from([0.0, 1e-30, -1e-37, 1e-42, 3.0, -1e30])


@st.composite
def arrays(draw):
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=70))
    scale = draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.normal(size=shape) * scale * np.exp(3 * rng.normal(size=shape[-1:]))
    with np.errstate(under="ignore"):
        x = np.clip(x, -1e38, 1e38).astype(np.float32)
    for place in draw(st.lists(st.integers(0, max(0, x.size - 1)), max_size=4)):
        if x.size:
            x.flat[place] = draw(ENTRIES)
    return x, draw(st.integers(0, len(shape) - 1))


@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(arrays())
def test_every_entry_is_within_half_a_step(case):
    x, axis = case
    codes, scales = encode(jnp.asarray(x), axis)
    wanted_codes, wanted_scales, steps = oracle(x, axis)
    np.testing.assert_array_equal(np.asarray(scales, np.float64), wanted_scales)
    off = np.abs(np.asarray(codes, int) - wanted_codes)
    assert off.max(initial=0) <= 1 and off.sum() <= 0.01 * off.size + 1  # Ties.
    found = np.asarray(decode(codes, scales, jnp.float32), np.float64)
    exact = np.where(steps > 0, np.asarray(x, np.float64), 0)
    assert (np.abs(found - exact) <= 0.5 * steps * (1 + 1e-5)).all()
    assert (np.sign(found) * np.sign(exact) >= 0).all()
    again = encode(jnp.asarray(found, jnp.float32), axis)
    assert (again[0] == codes).all() and (again[1] == scales).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.float32(3.4e38)])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bad):
    x = np.ones((70, 3), np.float32)
    x[40, 1] = bad
    codes, scales = encode(x, 0)
    wanted = np.zeros((70, 3), bool)
    wanted[32:64, 1] = True
    found = np.asarray(decode(codes, scales, jnp.float32))
    np.testing.assert_array_equal(np.isnan(found), wanted)
    assert (found[~wanted] == 1).all()
    assert not np.asarray(codes)[wanted].any()
    for array, again in zip((codes, scales), encode(found, 0), strict=True):
        np.testing.assert_array_equal(array.astype("f4"), again.astype("f4"))


@pytest.mark.parametrize("shape", [(64, 100), (48, 100), (4, 96, 128)])
def test_no_maximum_loses_nan(shape):
    """XLA's does on CPUs, in arrays of such shapes."""
    x = np.ones(shape, np.float32)
    x[..., 40, 5] = np.nan
    _, scales = encode(x, x.ndim - 2)
    wanted = np.zeros(scales.shape, bool)
    wanted[..., 1, 5] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(scales, "f4")), wanted)


def test_float64_is_rounded_to_the_same_scales(enable_x64):
    x = np.random.default_rng(0).normal(size=(64, 5))
    codes, scales = encode(jnp.asarray(x), 0)
    assert codes.dtype == jnp.int8 and scales.dtype == jnp.bfloat16
    found = decode(codes, scales, jnp.float64)
    assert found.dtype == jnp.float64
    wanted, _, steps = oracle(x, 0)
    np.testing.assert_array_equal(codes, wanted)
    assert (np.abs(found - x) <= 0.5 * steps + 1e-15).all()


def blocks_of(name, shape, dims):
    matrices = Matrices.of({name: dims}, {name: jnp.zeros(shape)}, only=True)
    return int8_blocks.block_axis(matrices.of_leaves[0], shape)


@pytest.mark.extended
def test_blocks_lie_along_the_longest_axis_that_is_not_the_last():
    for shape, axes in {
        (4096, 11008): 0, (32, 11008): 0, (31, 11008): 1, (64, 8): 0, (8, 64): 1,
        (3, 5): 1, (1, 40): 1, (40, 1): 0,
    }.items():  # fmt: skip
        dims = Dims(0, 1)
        assert blocks_of("w", shape, dims) == axes, shape
    assert blocks_of("query", (4096, 32, 128), Dims(0, (1, 2))) == 0
    assert blocks_of("out", (32, 128, 4096), Dims((0, 1), 2)) == 1
    assert blocks_of("conv", (3, 3, 64, 128), Dims((0, 1, 2), 3)) == 2
    assert blocks_of("experts", (99, 64, 128), Dims(1, 2)) == 1


@pytest.mark.parametrize("name", leaves.KINDS)
def test_no_block_has_entries_of_two_matrices(name):
    """Matrices of other sizes elsewhere in the leaf change nothing in the others."""
    shape, dims, matrices = leaves.KINDS[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    axis = blocks_of(name, shape, dims)
    alone = matrices(rounded(x, axis))
    places = matrices(np.arange(x.size).reshape(shape))
    for chosen, place in enumerate(places):
        larger = 1e3 * x
        larger.flat[place.ravel()] = x.flat[place.ravel()]
        found = matrices(rounded(larger, axis))
        np.testing.assert_array_equal(found[chosen], alone[chosen])


# Steps.

MU = 0.75
MATRICES = {name: leaves.DIMENSIONS[name] for name in leaves.FEW if name != "bias"}


def stage(nesterov, dims=MATRICES, params=None):
    if params is None:
        params = gradients(0)
    return momentum_stage(MU, nesterov, "int8", Matrices.of(dims, params))


def gradients(seed):
    grads = leaves.random_tree(seed)
    return {name: grads[name] for name in MATRICES}


def axis_of(state, name):
    shapes = (tree[name].shape for tree in state)
    return int8_blocks.axis_of(*shapes)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_against_float64_numpy(nesterov):
    """M̃ is computed from M before it is rounded; the next M from what was rounded."""
    optimizer = stage(nesterov)
    state, kept = optimizer.init(gradients(0)), dict.fromkeys(MATRICES, 0.0)
    for step in range(5):
        found, state = jax.jit(optimizer.update)(gradients(step), state)
        for name, grad in gradients(step).items():
            new = MU * kept[name] + np.asarray(grad, np.float64)
            wanted = MU * new + np.asarray(grad, np.float64) if nesterov else new
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-5)
            codes, scales, steps = oracle(new, axis_of(state, name))
            # In float32 an entry may fall on the other side of a half.
            assert np.abs(np.asarray(state.trace[name], int) - codes).max() <= 1
            np.testing.assert_array_equal(np.asarray(state.trace_scale[name]), scales)
            kept[name] = np.asarray(state.trace[name], np.float64) * steps


@pytest.mark.extended
def test_zeros_stay_zeros_and_nan_stays_nan():
    params = {"w": jnp.zeros((70, 3))}
    optimizer = stage(True, {"w": Dims(0, 1)}, params)
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(params, state)
        assert not any(leaf.any() for leaf in jax.tree.leaves((updates, state)))
    bad = {"w": params["w"].at[40, 1].set(jnp.nan)}
    updates, state = optimizer.update(bad, state)
    assert np.isnan(updates["w"]).sum() == 1
    for _ in range(2):
        updates, state = optimizer.update(params, state)
        assert np.isnan(updates["w"][32:64, 1]).all()
        assert np.isnan(updates["w"]).sum() == 32


OPTIMIZERS = {"orscale": orscale, "muon": muon} | FAMILY


@pytest.mark.extended
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_it(name):
    """The first step has no rounded momentum yet, so it is that of float32."""
    build = functools.partial(OPTIMIZERS[name], 1e-2, weight_dimension_numbers=NUMBERS)
    found, wanted = (
        run(build(mu_dtype=dtype), tree(0), 3, tree) for dtype in ("int8", "float32")
    )
    [(_, momentum)] = optax.tree.get_all_with_path(found[-1][1], "trace")
    assert momentum["w"].dtype == jnp.int8 and momentum["w"].any()
    (first, _), (first_wanted, _) = found[0], wanted[0]
    np.testing.assert_allclose(first["w"], first_wanted["w"], rtol=1e-5, atol=1e-6)
    (last, _), (last_wanted, _) = found[-1], wanted[-1]
    errors = {key: leaves.relative_error(last[key], last_wanted[key]) for key in NUMBERS}
    assert errors["b"] == 0
    assert all(0 < errors[key] < 5e-3 for key in ("w", "stack"))


@pytest.mark.parametrize("mu_dtype", ["float32", "bfloat16", "int8"])
def test_the_first_moment_of_complex_parameters_stays_complex(mu_dtype):
    params, *grads = ({"b": tree(s)["b"] + 1j * tree(s + 9)["b"]} for s in range(3))
    given = {"weight_decay": 0.1, "b2": 0.95}
    ours, wanted = muon(0.1, mu_dtype=mu_dtype), optax.adamw(0.1, **given)
    states = [optimizer.init(params) for optimizer in (ours, wanted)]
    assert readout(states[0], "mu")["b"].dtype == jnp.complex64
    for grad in grads:
        found, states[0] = ours.update(grad, states[0], params)
        expected, states[1] = wanted.update(grad, states[1], params)
    np.testing.assert_allclose(found["b"], expected["b"], rtol=1e-5)


def test_names_of_the_dtype():
    for dtype in (jnp.int8, np.int8, "int8", np.dtype("i1")):
        state = muon(1.0, mu_dtype=dtype).init({"w": jnp.ones((3, 4))})
        assert readout(state, "trace")["w"].dtype == jnp.int8
    for dtype in ("int4", "uint8", "int16", jnp.float8_e4m3fn, "i8"):
        with pytest.raises(ValueError, match=r'mu_dtype=.*bfloat16, "int8" or None'):
            orscale(1.0, mu_dtype=dtype)


def test_states_of_other_dtypes_are_refused():
    params = tree(0)
    build = functools.partial(orscale, 1e-2, weight_dimension_numbers=NUMBERS)
    for one, other in [("int8", "float32"), ("float32", "int8")]:
        state = build(mu_dtype=one).init(params)
        with pytest.raises(ValueError, match=r"(?s)does not fit.*convert_state"):
            build(mu_dtype=other).update(tree(1), state, params)


SHAPES = {"wide": (512, 768), "tall": (768, 512), "stack": (3, 256, 512)}


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("build", [orscale, muon])
def test_bytes_of_the_compiled_step(build):
    """The state is 1.0625 bytes an entry; nothing else of M is kept from step to step."""
    params = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in SHAPES.items()}
    numbers = numbers_of(SHAPES)

    def memory(mu_dtype):
        optimizer = build(1e-3, mu_dtype=mu_dtype, weight_dimension_numbers=numbers)
        step = step_of(optimizer, donate_argnums=(0, 1))
        state = jax.eval_shape(optimizer.init, params)
        return step.lower(params, state, params).compile().memory_analysis()

    entries = sum(math.prod(shape) for shape in SHAPES.values())
    wide, narrow = memory("float32"), memory("int8")
    for size in ("argument", "output", "alias"):  # The alias is what donation saves.
        sizes = (getattr(m, f"{size}_size_in_bytes") for m in (wide, narrow))
        saved = functools.reduce(operator.sub, sizes)
        assert saved == pytest.approx((4 - 1.0625) * entries, rel=0.01), size


def momentum_of(state):
    return readout(state, "trace"), readout(state, "trace_scale")


def decoded(state):
    return jax.tree.map(
        lambda *both: int8_blocks.decode(*both, jnp.float32), *momentum_of(state)
    )


@pytest.mark.extended
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: optax.chain(x)])
def test_conversion_to_floats_and_back(wrap):
    params = tree(0)
    build = functools.partial(orscale, 1e-2, weight_dimension_numbers=NUMBERS)
    narrow, wide = (wrap(build(mu_dtype=dtype)) for dtype in ("int8", "float32"))
    _, state = run(narrow, params, 3, tree)[-1]
    floats = convert_state(state, wide, params)
    for name, leaf in decoded(state).items():
        if name in ("w", "stack"):
            np.testing.assert_array_equal(readout(floats, "trace")[name], leaf)
    assert_same_bits(convert_state(floats, narrow, params), state)
    assert_same_bits(convert_state(state, narrow, params), state)


BOXES = {
    "nnx": nnx.Param,
    "linen": lambda x: nn.Partitioned(x, ("embed", "mlp")),
    "haliax": lambda x: hax.named(x, ("embed", "mlp")),
}


@pytest.mark.extended
@pytest.mark.parametrize("kind", BOXES)
def test_boxes(kind):
    x = tree(0, shapes={"w": (70, 12)})["w"]
    params = {"w": BOXES[kind](x)}
    optimizer = orscale(1e-2, mu_dtype="int8", weight_dimension_numbers={"w": Dims(0, 1)})
    updates, state = optimizer.update(params, optimizer.init(params), params)
    codes, scales = momentum_of(state)
    assert type(codes["w"]) is type(scales["w"]) is type(params["w"])
    assert unbox(codes)["w"].shape == (70, 12) and unbox(scales)["w"].shape == (3, 12)
    plain, _ = optimizer.update({"w": x}, optimizer.init({"w": x}), {"w": x})
    np.testing.assert_array_equal(unbox(updates)["w"], plain["w"])


@pytest.mark.extended
def test_describe_counts_its_bytes():
    shapes = {"w": (64, 12), "fused": (32, 48), "b": (4,)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    dims = {"w": Dims(0, 1), "fused": Blocks(0, 1, block_axis=1, blocks=(32, 8, 8))}
    found = {}
    for dtype in ("int8", "float32"):
        numbers = dims | {"b": None}
        optimizer = muon(1e-2, mu_dtype=dtype, weight_dimension_numbers=numbers)
        description = describe(params, optimizer)
        found[dtype] = {row.name: row.state_bytes for row in description.rows}
    for name, entries in {"w": 768, "b": 0}.items():
        saved = found["float32"][name] - found["int8"][name]
        assert saved == (4 - 1.0625) * entries, name
    parts = [name for name in found["int8"] if name.startswith("fused")]
    saved = [found["float32"][name] - found["int8"][name] for name in parts]
    assert saved == [(4 - 1.0625) * 32 * columns for columns in (32, 8, 8)]


@pytest.mark.extended
def test_measurements_are_those_of_the_decoded_momentum():
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(40, 6)), "f4")}
    optimizer = orscale(1e-2, mu_dtype="int8")
    _, state = optimizer.update(params, optimizer.init(params), params)
    found = diagnostics.measure(state, params)
    values = np.linalg.svd(np.asarray(decoded(state)["w"]), compute_uv=False)
    wanted = np.sum(values**2) / values[0] ** 2
    assert found["momentum_stable_rank"]["w"] == pytest.approx(wanted, rel=1e-4)
