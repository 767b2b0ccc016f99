"""`polar_factor` against the SVD and the float64 oracle."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from examples.benchmarks import hlo_cost
from orscale_jax import muon, orscale, polar_factor
from orscale_jax.newton_schulz import coefficients, restarts
from tests import oracle
from tests.platforms import on_a_gpu
from tests.spectra import random_bases, with_spectrum

SHAPES = [(1, 1), (1, 7), (7, 1), (16, 16), (12, 40), (40, 12), (3, 5, 8), (2, 3, 8, 5)]


def compose(preset, steps, x):
    return oracle.compose(oracle.rows_of(coefficients.PRESETS[preset], steps), x)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_float64_iteration(shape):
    x = np.random.default_rng(1).normal(size=shape)
    expected = np.stack(
        [oracle.newton_schulz(m) for m in x.reshape(-1, *shape[-2:])]
    ).reshape(shape)
    q = polar_factor(jnp.asarray(x, jnp.float32), dtype=jnp.float32)
    assert q.shape == shape and q.dtype == jnp.float32
    np.testing.assert_allclose(q, expected, atol=2e-5)


@pytest.mark.extended
@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_converges_to_the_svd_with_more_steps(shape):
    x = with_spectrum(np.geomspace(1, 1e-2, min(shape)), *shape)
    exact = oracle.svd_polar(x)
    errors = [
        np.linalg.norm(polar_factor(jnp.asarray(x), steps=k) - exact, ord=2)
        for k in (5, 6, 7, 8, 12, 20)
    ]
    assert errors[0] < 0.2 and errors[1] < 2e-3 and errors[2] < 1e-5
    assert all(later < earlier + 1e-5 for earlier, later in itertools.pairwise(errors))


@pytest.mark.extended
def test_more_steps_never_make_the_worst_case_worse():
    x = np.linspace(1e-3, 1, 100_001)
    errors = [np.abs(1 - compose("polar_express", k, x)).max() for k in range(20)]
    assert all(later < earlier + 1e-9 for earlier, later in itertools.pairwise(errors))
    assert errors[7] < 1e-6


@pytest.mark.parametrize(
    "preset, steps",
    [
        *itertools.product(["polar_express", "jordan", "dion"], [1, 3, 5, 6, 9]),
        *itertools.product(["deepseek_v4"], [10, 11, 13]),
    ],
)
def test_every_number_of_steps_takes_its_rows(preset, steps):
    sigma = np.geomspace(1, 1e-2, 8)
    x = with_spectrum(sigma, 8, 20)
    expected = compose(preset, steps, sigma / np.linalg.norm(sigma))
    q = polar_factor(jnp.asarray(x), steps=steps, coeffs=preset, dtype=jnp.float32)
    found = np.linalg.svd(np.asarray(q, np.float64), compute_uv=False)
    np.testing.assert_allclose(np.sort(found), np.sort(np.abs(expected)), atol=1e-5)


@pytest.mark.extended
def test_deepseek_v4_is_eight_steps_of_jordan_and_two_that_converge():
    x = np.geomspace(1e-3, 1, 200_001)
    y = oracle.compose([(3.4445, -4.7750, 2.0315)] * 8 + [(2, -1.5, 0.5)] * 2, x)
    np.testing.assert_array_equal(compose("deepseek_v4", 10, x), y)
    assert y.min() > 0.9995 and 1.0004 < y.max() < 1.0006
    np.testing.assert_allclose(compose("deepseek_v4", 12, x), 1, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 5, 8, 9, jnp.asarray(9)])
def test_fewer_steps_than_deepseek_v4_has_are_refused(steps):
    """Its first rows alone would be Jordan's."""
    words = "'deepseek_v4' is a sequence of 10 steps: pass "
    with pytest.raises(ValueError, match=rf"^steps=.*{words}steps=10 or more"):
        polar_factor(jnp.eye(3), steps=steps, coeffs="deepseek_v4")
    with pytest.raises(ValueError, match=rf"^ns_steps=.*{words}ns_steps=10 or more"):
        muon(1e-3, ns_steps=steps, ns_coeffs="deepseek_v4")


def test_a_traced_number_of_steps_takes_the_rows_of_deepseek_v4():
    x = jax.random.normal(jax.random.key(0), (6, 9))
    traced = jax.jit(lambda k: polar_factor(x, steps=k, coeffs="deepseek_v4"))
    expected = polar_factor(x, steps=10, coeffs="deepseek_v4")
    np.testing.assert_allclose(traced(10), expected, atol=1e-6)
    np.testing.assert_allclose(traced(jnp.uint8(10)), expected, atol=1e-6)
    for steps in (10.0, jnp.array([10])):
        with pytest.raises(ValueError, match=r"^steps=.* pass a whole number"):
            traced(steps)


def test_tables_and_matrices_of_a_user():
    x = np.random.default_rng(0).normal(size=(6, 9))
    pade = (1.875, -1.25, 0.375)
    once = polar_factor(jnp.asarray(x), steps=20, coeffs=pade, dtype=jnp.float32)
    np.testing.assert_allclose(once, oracle.svd_polar(x), atol=1e-5)
    for given, coeffs in ((x, [pade, pade]), (x.tolist(), np.array([pade]))):
        found = polar_factor(given, steps=20, coeffs=coeffs, dtype=jnp.float32)
        np.testing.assert_array_equal(found, once)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "arguments, preset, atol",
    [
        ({}, "dion", 3e-6),
        ({"preconditioning": "aol"}, "dion", 1e-5),
        ({"dtype": jnp.float16}, "dion", 2e-3),
        ({"dtype": jnp.float16}, "polar_express", 2e-3),
    ],
)
def test_traced_steps_and_coefficients_equal_static_ones(arguments, preset, atol):
    x = jax.random.normal(jax.random.key(0), (6, 9))
    fn = functools.partial(polar_factor, **arguments)
    traced = jax.jit(lambda k, t: fn(x, steps=k, coeffs=t))
    for steps in (1, 5, 8):
        found = traced(steps, jnp.asarray(coefficients.PRESETS[preset]))
        expected = fn(x, steps=steps, coeffs=preset)
        np.testing.assert_allclose(found, expected, atol=atol)


FORMS = {
    "frobenius": polar_factor,
    "aol": functools.partial(polar_factor, preconditioning="aol", steps=4),
    "aol in float16": functools.partial(
        polar_factor, preconditioning="aol", steps=4, dtype=jnp.float16
    ),
    "on a GPU": functools.partial(on_a_gpu, dtype=np.dtype(jnp.float16)),
}
WITH_EACH_FORM = pytest.mark.parametrize("form", FORMS)


@WITH_EACH_FORM
@pytest.mark.parametrize("shape", [(5, 9), (64, 48)])
def test_does_not_depend_on_scale(shape, form):
    """From 1e-30 to 1e30. To powers of two, float16 does not round otherwise."""
    x = np.random.default_rng(2).normal(size=shape)
    exponents = np.array([-100, -67, -33, 0, 33, 67, 100])[:, None, None]
    powers, atol = 10.0 ** (0.3 * exponents), 2e-5
    if form not in ("frobenius", "aol"):
        powers, atol = 2.0**exponents, 1e-6
    q, found = (FORMS[form](jnp.asarray(y, jnp.float32)) for y in (x, powers * x))
    np.testing.assert_allclose(found, np.broadcast_to(q, found.shape), atol=atol)


@pytest.mark.extended
@WITH_EACH_FORM
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_zeros_stay_zero_without_a_division_by_zero(shape, form):
    """And the rest of the batch is untouched; a batch may be mapped, or empty."""
    x = jax.random.normal(jax.random.key(0), (4, *shape))
    x = x.at[0].set(0).at[1, 1].set(0).at[2, :, 1].set(0)
    with jax.debug_nans(True), jax.debug_infs(True):
        q = np.asarray(FORMS[form](x))
    assert not q[x == 0].any()
    assert (np.linalg.norm(q[1:], axis=(1, 2)) > 0.5).all()
    if form == "on a GPU":
        return
    if form == "frobenius":
        np.testing.assert_array_equal(q[3], polar_factor(x[3]))
    mapped = jax.vmap(FORMS[form])(x)
    np.testing.assert_allclose(mapped, q, atol=1e-3 if "16" in form else 1e-5)
    for empty in ((0, 4), (2, 3, 0), (0, 4, 6)):
        assert FORMS[form](jnp.zeros(empty)).shape == empty


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_large_values_in_low_precision_inputs(dtype):
    x = np.random.default_rng(2).normal(size=(32, 64))
    q = polar_factor(jnp.asarray(x * 1e4, dtype))
    assert q.dtype == dtype
    np.testing.assert_allclose(
        q.astype(jnp.float32), polar_factor(jnp.asarray(x, jnp.float32)), atol=0.02
    )


@WITH_EACH_FORM
@pytest.mark.parametrize("shape", [(4, 6), (8, 3)])
@pytest.mark.parametrize("steps", [1, 5])
def test_non_finite_matrices_give_nan_and_no_others(steps, shape, form):
    bad = jnp.asarray([np.nan, np.inf, -np.inf])
    x = jax.random.normal(jax.random.key(0), (6, *shape)).at[1::2, 2, 1].set(bad)
    q = np.asarray(FORMS[form](x, steps=steps))
    assert np.isnan(q[1::2]).all() and np.isfinite(q[::2]).all()


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_rounded_to_and_stays_close(dtype):
    x = jnp.asarray(with_spectrum(np.geomspace(1, 0.02, 32), 32, 80), jnp.float32)
    low = np.asarray(polar_factor(x, dtype=dtype), np.float64)
    full = np.asarray(polar_factor(x, dtype=jnp.float32), np.float64)
    error = np.linalg.norm(low - full) / np.linalg.norm(full)
    assert 10 * jnp.finfo(jnp.float32).eps < error < 8 * jnp.finfo(dtype).eps
    np.testing.assert_array_equal(low, np.asarray(low.astype(dtype), np.float64))


@pytest.mark.extended
def test_float16_keeps_small_entries():
    """float16 holds numbers below 6e-5 as subnormals."""
    q = polar_factor(jnp.diag(jnp.array([1.0, 3e-5])), steps=3, dtype=jnp.float16)
    np.testing.assert_allclose(q[1, 1], compose("polar_express", 3, 3e-5), rtol=5e-3)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(("steps", "growth"), [(5, 0.04), (8, 0.4)])
@pytest.mark.parametrize("spread", [1, 100, 1000])
@pytest.mark.parametrize("n", [256, 1024])
def test_matrices_may_be_rounded_before_they_are_normalized(n, spread, steps, growth):
    """As GPUs do; docs/speed.md says by how much the error grows."""
    u, v = random_bases(256, n)
    x = jnp.asarray(u * np.geomspace(1, 1 / spread, 256) @ v.T, jnp.float32)

    def error(x):
        q = np.asarray(polar_factor(x, steps=steps, dtype=jnp.bfloat16), np.float64)
        return np.linalg.norm(q - u @ v.T)

    assert error(x.astype(jnp.bfloat16).astype(jnp.float32)) / error(x) - 1 < growth


@pytest.mark.extended
def test_float64_is_float64(enable_x64):
    x = with_spectrum(np.geomspace(1, 1e-2, 16), 16, 30)
    q = polar_factor(jnp.asarray(x), dtype=jnp.float64)
    assert q.dtype == jnp.float64
    np.testing.assert_allclose(q, oracle.newton_schulz(x), atol=1e-12)
    for scale in (1e-200, 1e200):  # Beyond float32's range, with products in float32.
        scaled = polar_factor(jnp.asarray(x * scale))
        np.testing.assert_allclose(scaled, oracle.newton_schulz(x), atol=2e-5)
    exact = polar_factor(jnp.asarray(x), dtype=jnp.float64, steps=12)
    np.testing.assert_allclose(exact, oracle.svd_polar(x), atol=1e-12)


def products(fn, *args, platform="cpu"):
    """The types of operands and sums of every product, and its line."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    return [(*line.rsplit(":", 1)[1].split("->"), line) for line in lines]


@pytest.mark.compiled
@pytest.mark.parametrize(
    "platform, dtype, operands",
    [
        ("cpu", None, "f32"),
        ("cpu", jnp.bfloat16, "bf16"),
        ("cuda", None, "f16"),
        ("tpu", None, "bf16"),
        ("tpu", jnp.float32, "f32"),
    ],
)
def test_products_of_the_program_for_each_platform(platform, dtype, operands):
    """They depend on the platform compiled for, not on the one this test runs on."""
    fn = functools.partial(polar_factor, dtype=dtype)
    found = products(fn, jnp.ones((8, 12)), platform=platform)
    # In one loop for all steps, except where a loop would copy the operands it carries.
    assert len(found) == (3 if operands == "f32" else 3 * 5)
    for before, after, line in found:
        assert before.count(f"x{operands}>") == 2, line
        # GPUs add up in float32, and round the sum to float16.
        assert "xf32>" in after or (platform, operands) == ("cuda", "f16"), line
        if platform == "tpu" and operands == "f32":
            assert "HIGHEST" in line


@pytest.mark.compiled
def test_operands_in_the_loop_are_rounded():
    """Steps that are traced run in a loop, also in narrow dtypes."""
    fn = functools.partial(polar_factor, dtype=jnp.bfloat16)
    found = products(lambda x, k: fn(x, steps=k), jnp.ones((8, 12)), 5)
    assert [before.count("xbf16>") for before, _, _ in found] == [2] * 3


CUBIC, PADE = (1.5, -0.5, 0.0), (1.875, -1.25, 0.375)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # In a loop, and unrolled.
def test_cubic_steps_compute_no_square(dtype):
    def count(*table):
        fn = jax.jit(lambda x: polar_factor(x, coeffs=table, dtype=dtype))
        compiled = fn.lower(jnp.ones((16, 16))).compile()
        return hlo_cost.of(compiled.as_text()).flops / (2 * 16**3)

    assert count(CUBIC) == 10 and count(PADE) == 15
    assert count(PADE, CUBIC) == (15 if dtype == "float32" else 11)


@pytest.mark.compiled
def test_cubic_steps_compute_no_square_on_the_gram_matrix():
    for row, each in ((CUBIC, 3), (PADE, 4)):
        fn = functools.partial(polar_factor, coeffs=row)
        segments = 1 + len(restarts.restart_steps((row,) * 5, 2**-24))
        assert len(products(fn, jnp.ones((16, 48)))) == each * 5 - segments


@pytest.mark.parametrize("table", [[CUBIC], [PADE, CUBIC], [CUBIC, PADE]])
@pytest.mark.parametrize("shape", [(9, 9), (6, 14)])
def test_tables_with_cubic_rows_equal_the_float64_iteration(table, shape):
    x = np.random.default_rng(0).normal(size=shape)
    exact = oracle.newton_schulz(x, oracle.rows_of(table, 6), safety=1)
    traced = jax.jit(lambda x, k: polar_factor(x, steps=k, coeffs=table))
    x = jnp.asarray(x, jnp.float32)
    for dtype, atol in (("float32", 1e-5), ("float16", 0.01)):
        found = polar_factor(x, steps=6, coeffs=table, dtype=dtype)
        np.testing.assert_allclose(found, exact, atol=atol)
    np.testing.assert_allclose(traced(x, 6), exact, atol=1e-5)


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_the_compiled_program_are_float32(dtype):
    """XLA on CPU accumulates in the type of the result, inside a large program too."""
    params = {"wide": jnp.ones((32, 48)), "tall": jnp.ones((40, 24)), "b": jnp.ones(3)}
    optimizer = orscale(1e-3, ns_dtype=dtype)
    state = optimizer.init(params)
    compiled = jax.jit(optimizer.update).lower(params, state, params).compile()
    found = re.findall(r"= (\w+)\[[\d,]*\]\S* dot\(", compiled.as_text())
    assert len(found) >= 6 and set(found) == {"f32"}


@pytest.mark.compiled
@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_the_smaller_gram_matrix_is_iterated(shape):
    sums = "".join(after for _, after, _ in products(polar_factor, jnp.ones(shape)))
    assert "tensor<8x8xf32>" in sums and "tensor<32x32xf32>" not in sums


@pytest.mark.parametrize(
    "preset, lowest, highest",
    [("polar_express", 0.846, 1.142), ("jordan", 0.47, 1.21), ("dion", 0.47, 1.15)],
)
def test_stated_range_after_five_steps(preset, lowest, highest):
    y = compose(preset, 5, np.linspace(1e-3, 1, 200_001))
    assert lowest <= y.min() < lowest + 0.01
    assert highest - 0.01 < y.max() <= highest


@pytest.mark.extended
@pytest.mark.parametrize("preset", ["jordan", "dion"])
def test_more_steps_stay_in_a_band(preset):
    for steps in range(5, 30):
        y = compose(preset, steps, np.linspace(1e-3, 1, 20_001))
        assert y.min() > 0.45 and y.max() < 1.25


@pytest.mark.parametrize(
    "x, arguments, words",
    [
        (jnp.ones(3), {}, r"shape \(3,\)"),
        (jnp.ones((3, 3), jnp.int32), {}, "int32"),
        (jnp.ones((3, 3), jnp.complex64), {}, "complex64"),
        (jnp.ones((3, 3)), {"coeffs": "quintic"}, "polar_express"),
        (jnp.ones((3, 3)), {"coeffs": (1.0, 2.0)}, "one per step"),
        (jnp.ones((3, 3)), {"coeffs": [(1.0, 2.0, np.nan)]}, "finite"),
        (jnp.ones((3, 3)), {"coeffs": [(1.0, 2.0, 3.0), (1.0,)]}, "one per step"),
        (jnp.ones((3, 3)), {"coeffs": []}, "one per step"),
        (jnp.ones((3, 3)), {"coeffs": ["1", "2", "3"]}, "one per step"),
        (jnp.ones((3, 3)), {"coeffs": [True, False, True]}, "one per step"),
        (jnp.ones((3, 3)), {"steps": 0}, "steps=0"),
        (jnp.ones((3, 3)), {"steps": 2.0}, "steps=2.0"),
        (jnp.ones((3, 3)), {"dtype": jnp.int8}, "int8"),
        (jnp.ones((3, 3)), {"dtype": "float12"}, "float12"),
    ],
)
def test_bad_input_is_refused(x, arguments, words):
    with pytest.raises(ValueError, match=words):
        polar_factor(x, **arguments)


def test_a_second_call_outside_of_jit_compiles_nothing(caplog):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)
    polar_factor(x, steps=3)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        polar_factor(x, steps=3)
        assert "XLA compilation" not in caplog.text
        polar_factor(x, steps=4)
    assert "XLA compilation" in caplog.text


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(
    "spec", [P(None, "a"), P(None, None, "a"), P("a"), P("b", "a"), P(None, "a", "b")]
)
def test_sharded_matrices(kind, spec):
    """They have the factors of one device, sharded as they are."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    x = np.random.default_rng(0).normal(size=(4, 8, 24)).astype(np.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    q = polar_factor(sharded)
    np.testing.assert_allclose(q, polar_factor(jnp.asarray(x)), atol=2e-5)
    if kind == AxisType.Explicit:
        assert jax.typeof(q) == jax.typeof(sharded)
