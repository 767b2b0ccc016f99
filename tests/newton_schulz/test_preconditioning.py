"""AOL against NumPy in float64: its bound, its cost, and its absence by default."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from examples.benchmarks import hlo_cost
from orscale_jax import (
    muon,
    orscale,
    orthogonalize,
    polar_express_coefficients,
    polar_factor,
)
from orscale_jax.newton_schulz import arithmetic as preconditioning, restarts as restarts_
from orscale_jax.newton_schulz.arithmetic import Arithmetic
from orscale_jax.newton_schulz.platforms import NewtonSchulz
from tests import oracle
from tests.runs import first_update, tree

SHAPES = [(1, 1), (1, 7), (7, 1), (16, 16), (12, 40), (40, 12), (3, 5, 8), (2, 2, 8, 3)]
FLOAT32 = Arithmetic(jnp.dtype(jnp.float32))
TABLE = polar_express_coefficients(5e-3, 4)

eager_aol = functools.partial(polar_factor, preconditioning="aol", dtype=jnp.float32)


def rows_of(coeffs, steps):
    return NewtonSchulz.of(steps, coeffs, None, "frobenius").rows


def aol(x, **arguments):
    return jax.jit(functools.partial(eager_aol, **arguments))(x)


def numpy_aol(x):
    """AOL of one matrix, by loops over the vectors of its shorter side."""
    if len(x) > len(x.T):
        return numpy_aol(x.T).T
    scaled = np.zeros_like(x)
    for i, row in enumerate(x):
        total = sum(abs(row @ other) for other in x)
        if total > 0:
            scaled[i] = row / total**0.5
    return scaled


@functools.partial(jax.jit, static_argnums=1)
def preconditioned(x, dtype=jnp.float32):
    arithmetic = Arithmetic(jnp.dtype(dtype))
    x = preconditioning.normalize(x, arithmetic)
    return preconditioning.precondition(x, "aol", arithmetic)


def gaussian(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def adversaries():
    """Matrices that reach the bound, or whose rows are nearly lost, of shape (24, 32)."""
    rng = np.random.default_rng(1)
    g = rng.normal(size=(24, 32))
    return {
        "equal rows": np.ones((24, 1)) * g[:1],
        "opposite rows": (-1.0) ** np.arange(24)[:, None] * g[:1],
        "rank one": np.outer(np.geomspace(1, 1e-6, 24), g[0]),
        "Hadamard": scipy.linalg.hadamard(32)[:24].astype(float),
        "common row": g[0] + 0.1 * g,
        "unequal rows": np.geomspace(1, 1e-9, 24)[:, None] * g,
        "unequal columns": np.geomspace(1, 1e-9, 32) * g,
        "low rank": rng.normal(size=(24, 2)) @ rng.normal(size=(2, 32)),
        "one row": np.eye(24, 32)[:1] * np.eye(24)[:, :1],
        "Gaussian": g,
    }


# Equal to NumPy.


@pytest.mark.parametrize(
    "shape, coeffs, tolerance",
    [(shape, TABLE, 1e-5) for shape in SHAPES]
    + [((12, 40), "dion", 1e-5), ((12, 40), "polar_express", 2e-5)],
)
def test_equals_the_float64_iteration(shape, coeffs, tolerance):
    x = gaussian(shape, seed=1)
    rows = rows_of(coeffs, 4)
    matrices = x.reshape(-1, *shape[-2:])
    expected = np.reshape([oracle.iterated(numpy_aol(m), rows) for m in matrices], shape)
    q = aol(jnp.asarray(x, jnp.float32), steps=4, coeffs=coeffs)
    assert q.shape == shape and q.dtype == jnp.float32
    np.testing.assert_allclose(q, expected, atol=tolerance)


@pytest.mark.extended
def test_float64_is_float64(enable_x64):
    x = gaussian((16, 30))
    expected = oracle.iterated(numpy_aol(x), TABLE)
    for scale in (1e-200, 1, 1e200):
        arguments = {"steps": 4, "coeffs": TABLE, "preconditioning": "aol"}
        q = polar_factor(jnp.asarray(scale * x), dtype=jnp.float64, **arguments)
        np.testing.assert_allclose(q, expected, atol=1e-12)
        q = polar_factor(jnp.asarray(scale * x), **arguments)  # Products in float32.
        np.testing.assert_allclose(q, expected, atol=1e-5)


# The bound.


def test_singular_values_are_at_most_one():
    reached = ("equal rows", "opposite rows", "rank one", "Hadamard", "one row")
    x = np.stack(list(adversaries().values()))
    for matrices in (x, np.swapaxes(x, 1, 2)):
        expected = np.stack([numpy_aol(matrix) for matrix in matrices])
        found = np.asarray(preconditioned(matrices).x, np.float64)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        norms = np.linalg.norm(found, ord=2, axis=(1, 2))
        for name, norm in zip(adversaries(), norms, strict=True):
            assert norm <= 1 + 1e-6, name
            assert norm > 1 - 1e-6 or name not in reached, name


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_gram_matrix_handed_on_is_that_of_the_matrices(dtype):
    x = np.stack(list(adversaries().values()))
    unit = float(jnp.finfo(dtype).eps) / 2
    for matrices in (x, np.swapaxes(x, 1, 2)):
        start = preconditioned(matrices, dtype)
        assert start.x.dtype == dtype and start.gram.dtype == jnp.float32
        scale = Arithmetic(jnp.dtype(dtype)).scale
        wide = np.asarray(start.x, np.float64) / scale
        wide = wide if wide.shape[1] <= wide.shape[2] else np.swapaxes(wide, 1, 2)
        gram = wide @ np.swapaxes(wide, 1, 2)
        np.testing.assert_allclose(start.gram / scale**2, gram, atol=2 * unit + 1e-5)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("coeffs", ["polar_express", "jordan", TABLE])
def test_low_precision_stays_bounded(dtype, coeffs):
    x = jnp.asarray(np.stack(list(adversaries().values())), jnp.float32)
    y = oracle.compose(rows_of(coeffs, 4), np.linspace(0, 1, 10_001))
    q = aol(x, steps=4, coeffs=coeffs, dtype=dtype)
    norms = np.linalg.norm(np.asarray(q, np.float64), ord=2, axis=(1, 2))
    assert norms.max() < 1.02 * np.abs(y).max()
    np.testing.assert_array_equal(q, q.astype(dtype).astype(jnp.float32))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_beyond_the_range_of_squares_are_lost_quietly(dtype):
    """Their Gram matrix is zero or subnormal, for which no factor should make up."""
    sizes = jnp.asarray([1, 1e-6, 1e-10, 1e-18, 1e-19, 1e-20, 1e-21, 1e-25, 1e-37])
    x = sizes[:, None] * jnp.asarray(gaussian((9, 14)), jnp.float32)
    start = preconditioned(x, dtype)
    scale = Arithmetic(jnp.dtype(dtype)).scale
    lengths = np.linalg.norm(np.asarray(start.x, np.float64), axis=1) / scale
    assert np.isfinite(lengths).all() and lengths.max() < 1.01
    assert lengths[0] > 0.9 and lengths[-1] < 1e-3
    assert np.isfinite(aol(x, steps=4, dtype=dtype)).all()


# The cost.


@pytest.mark.extended
@pytest.mark.compiled
@pytest.mark.parametrize(
    "shape, dtype",
    [((m, n), jnp.float32) for m, n in [(32, 32), (40, 32), (24, 96), (96, 24)]]
    + [((24, 96), jnp.bfloat16)],  # The plain form: a restart before every step.
)
def test_aol_needs_no_more_products_than_plain_steps(shape, dtype):
    def products(preconditioning, steps):
        fn = functools.partial(
            polar_factor, steps=steps, dtype=dtype, preconditioning=preconditioning
        )
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        return hlo_cost.of(jax.jit(fn).lower(x).compile().as_text()).flops

    for steps in (1, 4):
        unit = Arithmetic(jnp.dtype(dtype)).unit
        restarts = restarts_.restart_steps(rows_of("polar_express", steps), unit)
        segments = len(restarts) if restarts_.is_cheaper(*shape) else steps - 1
        expected = restarts_.flops(*shape, steps, segments)
        assert products("frobenius", steps) == products("aol", steps) == expected


# In the optimizers.


@pytest.mark.extended
@pytest.mark.parametrize("build", [orscale, muon])
def test_the_first_step_differs_only_in_q(build):
    """At c's first step r̂ is 1: W - η(λW + sQ). The default is Frobenius."""
    params = tree(1, shapes={"wide": (6, 9), "tall": (8, 5), "bias": (3,)})
    grads = jax.tree.map(lambda p: p[::-1] + 1, params)
    given = {"steps": 4, "coeffs": TABLE, "dtype": jnp.float32}
    steps = {}
    for name, chosen in (("frobenius", {}), ("aol", {"preconditioning": "aol"})):
        arguments = {f"ns_{key}": value for key, value in (given | chosen).items()}
        optimizer = build(0.5, weight_decay=0.1, **arguments)
        steps[name], _, _ = first_update(optimizer, params, grads)
        for key in ("wide", "tall"):
            q = polar_factor(grads[key], **given, preconditioning=name)
            expected = -0.5 * (0.1 * params[key] + 0.2 * max(q.shape) ** 0.5 * q)
            np.testing.assert_allclose(steps[name][key], expected, atol=2e-5)
    np.testing.assert_array_equal(steps["aol"]["bias"], steps["frobenius"]["bias"])
    assert np.abs(steps["aol"]["wide"] - steps["frobenius"]["wide"]).max() > 1e-2


@pytest.mark.parametrize("bad", ["AOL", "spectral", None, 1, ["aol"]])
def test_unknown_names_are_refused_when_built(bad):
    with pytest.raises(ValueError, match=r"^preconditioning=.*'frobenius' or 'aol'\.$"):
        polar_factor(jnp.ones((2, 2)), preconditioning=bad)
    for build in (orthogonalize, functools.partial(orscale, 1e-3)):
        with pytest.raises(ValueError, match=r"^ns_preconditioning=.*'aol'"):
            build(ns_preconditioning=bad)


@functools.partial(jax.jit, static_argnames="arithmetic")
def in_one_pass(x, arithmetic):
    def sums(xs):
        return [arithmetic.sum(x) for x in xs]

    [normalized] = preconditioning.normalize_all([x], arithmetic, sums)
    return normalized


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "normalize", [preconditioning.normalize, in_one_pass], ids=["two passes", "one pass"]
)
def test_norms_at_any_scale_in_one_pass_or_two(normalize, dtype):
    """Also of entries that differ in size by more than their squares can."""
    with jax.enable_x64(dtype == "float64"):
        normalize = functools.partial(normalize, arithmetic=Arithmetic(jnp.dtype(dtype)))
        largest = jnp.finfo(dtype).maxexp - 1
        x = gaussian((6, 9)) / 8
        spread = x * np.logspace(0, -30, 9)
        for exponent in np.linspace(24 - largest, largest, 41, dtype=int):
            for matrix in x, spread:
                scaled = jnp.asarray(np.ldexp(matrix, exponent), dtype)
                exact = np.asarray(scaled, np.longdouble)
                exact /= np.sqrt(np.square(exact).sum())
                found = np.asarray(normalize(scaled), np.longdouble)
                # The tolerance allows for subnormal entries.
                np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-4)
                assert np.isclose(np.square(found).sum(), 1, atol=1e-6)
        assert not normalize(jnp.zeros((2, 3), dtype)).any()
        for bad in jnp.nan, jnp.inf:
            assert jnp.isnan(normalize(jnp.ones((2, 3), dtype).at[0, 1].set(bad))).any()


@pytest.mark.extended
def test_a_zero_vector_has_a_derivative():
    """It is far from one: where a vector is zero, Q jumps. But it is no NaN."""

    @jax.grad
    def derivative(x):
        return polar_factor(x, preconditioning="aol").sum()

    assert jnp.isfinite(derivative(jnp.eye(4).at[0].set(0))).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_norms_in_one_pass_have_derivatives(scale):
    def normalized(x):
        return in_one_pass(x, Arithmetic(jnp.dtype("float32")))

    x, along = jnp.asarray(gaussian((2, 4, 6)), jnp.float32)
    _, tangent = jax.jvp(normalized, [x * scale], [along * scale])
    _, exact = jax.jvp(lambda x: x / jnp.linalg.norm(x), [x], [along])
    np.testing.assert_allclose(tangent, exact, atol=1e-6)
