"""8-bit blocks against float64 NumPy, written from the page alone."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orscale_jax.transforms import momentum as int8_blocks
from orscale_jax.transforms.matrices import Matrices
from tests import leaves

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
SHAPES = hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=70)


@st.composite
def arrays(draw):
    shape = draw(SHAPES)
    scale = draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.normal(size=shape) * scale * np.exp(3 * rng.normal(size=shape[-1:]))
    with np.errstate(under="ignore"):
        x = np.clip(x, -1e38, 1e38).astype(np.float32)
    for place in draw(st.lists(st.integers(0, max(0, x.size - 1)), max_size=4)):
        if x.size:
            x.flat[place] = draw(ENTRIES)
    return x, draw(st.integers(0, len(shape) - 1))


@hypothesis.settings(deadline=None, max_examples=25)
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
        dims = leaves.Dims(0, 1)
        assert blocks_of("w", shape, dims) == axes, shape
    assert blocks_of("query", (4096, 32, 128), leaves.Dims(0, (1, 2))) == 0
    assert blocks_of("out", (32, 128, 4096), leaves.Dims((0, 1), 2)) == 1
    assert blocks_of("conv", (3, 3, 64, 128), leaves.Dims((0, 1, 2), 3)) == 2
    assert blocks_of("experts", (99, 64, 128), leaves.Dims(1, 2)) == 1


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
