"""float16, the operands of GPUs: its range, and its errors beside bfloat16's."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from orscale_jax import polar_factor
from orscale_jax.distributed.engine import PolarOptions, polar_factors
from orscale_jax.distributed.platforms import PLATFORMS
from orscale_jax.newton_schulz.coefficients import PRESETS, coefficient_table
from orscale_jax.newton_schulz.polar import NewtonSchulz
from tests import oracle
from tests.spectra import adversarial, with_spectrum

FLOAT16, BFLOAT16, FLOAT32 = map(np.dtype, (jnp.float16, jnp.bfloat16, jnp.float32))
LARGEST = float(jnp.finfo(jnp.float16).max)


def on_a_gpu(x, dtype, preset="polar_express", steps=5, preconditioning="frobenius"):
    """What a program for GPUs computes, on CPU."""
    settings = NewtonSchulz.of(steps, preset, dtype, preconditioning)
    options = PolarOptions(settings, platforms={**PLATFORMS, "cpu": PLATFORMS["gpu"]})
    [q] = polar_factors([jnp.asarray(x, jnp.float32)], [P(None, None)], None, options)
    return np.asarray(q, np.float64)


def adversaries(m, n):
    rng = np.random.default_rng(1)
    spectra = adversarial(m, rng) | {"geometric": np.geomspace(1, 1e-3, m)}
    found = {name: with_spectrum(sigma, m, n) for name, sigma in spectra.items()}
    dense = rng.normal(size=(m, n))
    found["Gaussian"] = dense
    found["zero rows"] = dense * (np.arange(m) < m // 2)[:, None]
    # Below 6e-8 of the norm, and far below what float16 holds after scaling.
    sparse = np.where(rng.uniform(size=(m, n)) < 0.02, 1.0, 1e-9) * dense
    found["sparse, small entries"] = sparse
    found["one entry"] = np.eye(m, n) * (np.arange(n) == 0)
    return found


def exact(x, preset="polar_express", steps=5):
    """The polynomials in float64, on the singular values."""
    u, sigma, vt = np.linalg.svd(x, full_matrices=False)
    sigma = sigma / np.linalg.norm(sigma, axis=-1, keepdims=True)
    sigma = oracle.compose(oracle.rows_of(PRESETS[preset], steps), sigma)
    return u * sigma[..., None, :] @ vt


def distance(x, y):
    return np.linalg.norm(x - y, ord=2)


@pytest.mark.extended
@pytest.mark.parametrize("preset", ["polar_express", "jordan", "dion"])
@pytest.mark.parametrize("shape", [(48, 160), (160, 48), (64, 64)])
def test_errors_beside_those_of_bfloat16(shape, preset):
    """Smaller on the whole; where larger, by less than 2 % of an orthogonal matrix."""
    m, n = sorted(shape)
    x = np.stack(list(adversaries(m, n).values()))
    x = x if shape == (m, n) else x.mT
    expected = exact(x, preset)
    of_float16, of_bfloat16 = (
        np.linalg.norm(on_a_gpu(x, dtype, preset) - expected, axis=(1, 2))
        for dtype in (FLOAT16, BFLOAT16)
    )
    assert (of_float16 <= of_bfloat16 + 0.02 * np.sqrt(m)).all()
    assert of_float16.sum() < 0.85 * of_bfloat16.sum()


@pytest.mark.extended
def test_more_steps_come_nearer_to_the_svd_than_in_bfloat16():
    """Both dtypes have the same error of the matrix itself, rounded to bfloat16."""
    x = with_spectrum(np.geomspace(1, 0.05, 48), 48, 160)
    expected = oracle.svd_polar(x)
    of_float16, of_bfloat16 = (
        np.linalg.norm(on_a_gpu(x, dtype, steps=8) - expected)
        for dtype in (FLOAT16, BFLOAT16)
    )
    assert of_float16 < 0.7 * of_bfloat16


@pytest.mark.quick_first_case
@pytest.mark.parametrize("preconditioning", ["frobenius", "aol"])
@pytest.mark.parametrize("steps", [1, 5, 8])
def test_nothing_overflows(steps, preconditioning):
    """The largest entries that a Gram matrix may have: those of rank one."""
    for shape in ((40, 40), (24, 96)):
        x = np.stack([np.ones(shape), np.eye(*shape) * (np.arange(shape[1]) == 0)])
        q, expected = (
            on_a_gpu(x, dtype, steps=steps, preconditioning=preconditioning)
            for dtype in (FLOAT16, FLOAT32)
        )
        # At 1, the end of its interval, the polynomial is steep.
        difference = np.linalg.norm(q - expected, ord=2, axis=(1, 2))
        assert difference.max() < (0.01 if steps == 1 else 0.2)
    settings = NewtonSchulz(5, coefficient_table("dion"), "frobenius", FLOAT16)
    assert settings.arithmetic().scale ** 2 < LARGEST / 2


@pytest.mark.parametrize("exponent", [-100, -33, 33, 100])  # 1e-30 to 1e30.
def test_does_not_depend_on_scale(exponent):
    x = np.random.default_rng(2).normal(size=(24, 64))
    scaled = on_a_gpu(x * 2.0**exponent, FLOAT16)
    np.testing.assert_allclose(scaled, on_a_gpu(x, FLOAT16), atol=1e-6)


def test_matrices_16384_wide():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 16384))
    expected = exact(x)
    of_float16, of_bfloat16 = (
        distance(on_a_gpu(x, dtype), expected) for dtype in (FLOAT16, BFLOAT16)
    )
    assert of_float16 < of_bfloat16


def test_typical_entries_of_large_matrices_keep_their_digits():
    """Those of a Gaussian square of 16,384 and of its Gram matrix, off the diagonal."""
    size = 16384
    arithmetic = NewtonSchulz(5, np.eye(3), "frobenius", FLOAT16).arithmetic()
    sample = np.random.default_rng(0).normal(size=1000)

    def error(x):
        rounded = np.asarray(arithmetic.round(jnp.float32(x)), np.float64)
        return np.linalg.norm(rounded - x) / np.linalg.norm(x)

    for typical, power in ((1 / size, 1), (size**-1.5, 2)):
        assert error(sample * typical * arithmetic.scale**power) < arithmetic.unit
    assert error(sample * size**-1.5) > 0.03  # Without the scale.


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_matrices_give_nan(bad):
    x = np.ones((4, 12))
    x[1, 2] = bad
    assert np.isnan(on_a_gpu(x, FLOAT16)).all()
    assert not on_a_gpu(np.zeros((4, 12)), FLOAT16).any()


@pytest.mark.extended
def test_traced_steps_equal_static_ones():
    x = jax.random.normal(jax.random.key(0), (6, 7))
    traced = jax.jit(lambda k, t: polar_factor(x, steps=k, coeffs=t, dtype=jnp.float16))
    for steps, preset in itertools.product((1, 5, 8), ("dion", "polar_express")):
        expected = polar_factor(x, steps=steps, coeffs=preset, dtype=jnp.float16)
        found = traced(steps, jnp.asarray(PRESETS[preset]))
        np.testing.assert_allclose(found, expected, atol=2e-3)


def test_dtypes_in_which_matrices_are_stacked_and_sent():
    """Two bytes where they are normalized before; CPUs normalize them one by one."""
    found = {
        name: dataclasses.replace(platform, dtype=FLOAT16).packed_dtype(FLOAT32)
        for name, platform in PLATFORMS.items()
    }
    half = dict.fromkeys(PLATFORMS, FLOAT16)
    assert found == half | {"cpu": FLOAT32}
    cpu = dataclasses.replace(PLATFORMS["cpu"], dtype=BFLOAT16)
    assert cpu.packed_dtype(FLOAT32) == BFLOAT16
