"""float16, the operands of GPUs: its range, and its errors beside bfloat16's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from orscale_jax.newton_schulz.arithmetic import Arithmetic
from orscale_jax.newton_schulz.coefficients import PRESETS
from orscale_jax.newton_schulz.platforms import PLATFORMS
from tests import oracle
from tests.platforms import on_a_gpu
from tests.spectra import adversarial, composed, with_spectrum

FLOAT16, BFLOAT16, FLOAT32 = map(np.dtype, (jnp.float16, jnp.bfloat16, jnp.float32))
LARGEST = float(jnp.finfo(jnp.float16).max)


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
    x = x / np.linalg.norm(x, axis=(-2, -1), keepdims=True)
    return composed(x, oracle.rows_of(PRESETS[preset], steps))


def distance(x, y):
    return np.linalg.norm(x - y, ord=2)


@pytest.mark.extended
@pytest.mark.parametrize("preset", ["polar_express", "jordan", "dion"])
@pytest.mark.parametrize("shape", [(48, 160), (160, 48), (64, 64)])
def test_errors_beside_those_of_bfloat16(shape, preset):
    """Smaller on the whole; where larger, by less than 2.5 % of an orthogonal matrix."""
    m, n = sorted(shape)
    x = np.stack(list(adversaries(m, n).values()))
    x = x if shape == (m, n) else x.mT
    expected = exact(x, preset)
    of_float16, of_bfloat16 = (
        np.linalg.norm(on_a_gpu(x, dtype, preset) - expected, axis=(1, 2))
        for dtype in (FLOAT16, BFLOAT16)
    )
    assert ((of_float16 - of_bfloat16) / np.sqrt(m)).max() < 0.025
    assert 1 - of_float16.sum() / of_bfloat16.sum() > 0.15


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
        # 0.01 with float32 polynomials, times the margin of test_monic.py.
        assert difference.max() < (2.5 * 0.01 if steps == 1 else 0.2)
    assert Arithmetic(FLOAT16).scale ** 2 < LARGEST / 2


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
    arithmetic = Arithmetic(FLOAT16)
    sample = np.random.default_rng(0).normal(size=1000)

    def error(x):
        rounded = np.asarray(arithmetic.round(jnp.float32(x)), np.float64)
        return np.linalg.norm(rounded - x) / np.linalg.norm(x)

    for typical, power in ((1 / size, 1), (size**-1.5, 2)):
        assert error(sample * typical * arithmetic.scale**power) < arithmetic.unit
    assert error(sample * size**-1.5) > 0.03  # Without the scale.


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
