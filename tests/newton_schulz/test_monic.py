"""The monic form of Newton–Schulz: its errors in float16, its range, its derivative."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orscale_jax.newton_schulz.arithmetic import Arithmetic, Start
from orscale_jax.newton_schulz.coefficients import PRESETS
from orscale_jax.newton_schulz.iteration import (
    gram_newton_schulz,
    monic_newton_schulz,
    newton_schulz,
)
from orscale_jax.newton_schulz.platforms import GPU, TPU, NewtonSchulz
from orscale_jax.newton_schulz.restarts import monic_scales, restart_steps
from tests import oracle
from tests.platforms import on_a_gpu
from tests.spectra import (
    adversarial,
    composed,
    hadamard_bases,
    random_bases,
    with_spectrum,
)

FLOAT16 = np.dtype(np.float16)
LARGEST = float(jnp.finfo(jnp.float16).max)


@dataclasses.dataclass(frozen=True)
class Emulated(Arithmetic):
    """What a GPU may do: round the sum alone, or also the scaled product in it."""

    once: bool = True
    sizes: list[float] = dataclasses.field(default_factory=list, compare=False)

    def product(self, x, y, axes=(-2, -1), *, symmetric=False):
        # CPUs multiply float32 faster, and the sums are the same.
        return super().product(x.astype(jnp.float32), y.astype(jnp.float32), axes)

    def add_product(self, c, beta, x, y):
        multiple = jnp.float32(beta) * self.product(x, y)
        if self.once:
            result = (c.astype(jnp.float32) + multiple).astype(self.dtype)
        else:
            result = c + multiple.astype(self.dtype)
        for each in (self.product(x, y), multiple, result):
            self.sizes.append(float(jnp.abs(each).max()))
        return result


def of_monic_form(
    x, name="polar_express", steps=5, once=True, restarts=None, dtype=FLOAT16
):
    """Polar factors of normalized matrices, and the largest number on the way."""
    settings = NewtonSchulz.of(steps, PRESETS[name], dtype, "frobenius")
    arithmetic = Emulated(dtype, once=once)
    if restarts is None:
        restarts = restart_steps(settings.rows, arithmetic.unit)
    scales = monic_scales(settings.rows, restarts, arithmetic.scale)
    start = Start(jnp.asarray(arithmetic.scale * x, dtype))
    # Not compiled: XLA may leave out roundings.
    form = monic_newton_schulz.__wrapped__
    q = form(start, settings.rows, restarts, scales, arithmetic)
    return np.asarray(q, np.float64), max(arithmetic.sizes)


def of_float32_sums(x, dtype=FLOAT16):
    """The same by the form whose sums and polynomials are float32."""
    settings = NewtonSchulz.of(5, "polar_express", dtype, "frobenius")
    arithmetic = Emulated(dtype)
    s = arithmetic.scale
    (a, b, c), *others = settings.rows
    [q] = gram_newton_schulz(
        [Start(jnp.asarray(s * x, dtype))],
        [(a / s, b / s**3, c / s**5), *others],
        (restart_steps(settings.rows, arithmetic.unit),),
        (arithmetic,),
    )
    return np.asarray(q, np.float64)


def exact(x, name="polar_express", steps=5):
    return composed(x, oracle.rows_of(PRESETS[name], steps))


def adversaries(m, n, bases=(random_bases, hadamard_bases)):
    """Matrices of norm 1."""
    rng = np.random.default_rng(1)
    i = np.arange(m)
    spectra = {
        **adversarial(m, rng),
        "almost equal": 1 + 1e-4 * rng.normal(size=m),
        "eight and a tail": np.r_[np.ones(8), np.geomspace(1e-2, 1e-6, m - 8)],
        "1e6": np.geomspace(1, 1e-6, m),
        "momentum": (i + 1) ** -0.5 * np.exp(-i / (m / 4)),
    }
    # Large matrices take long: of those, the four that are most like momenta.
    chosen = [*spectra.values()][-4 if m > 512 else 0 :]
    found = [with_spectrum(s, m, n, b) for s in chosen for b in bases]
    x = np.stack([*found, rng.normal(size=(m, n))])
    return x / np.linalg.norm(x, axis=(-2, -1), keepdims=True)


def errors(q, expected):
    return np.linalg.norm(q - expected, axis=(-2, -1)) / np.sqrt(min(q.shape[-2:]))


def largest(q):
    return np.linalg.norm(q, ord=2, axis=(-2, -1))


@pytest.mark.parametrize(
    "shape, bases",
    [
        ((32, 512), (random_bases, hadamard_bases)),
        ((256, 64), (random_bases, hadamard_bases)),
        ((96, 384), (random_bases,)),
        pytest.param((768, 3072), (random_bases,), marks=pytest.mark.slow),
    ],
)
def test_errors_beside_those_of_float32_sums(shape, bases):
    """Whether a GPU rounds only the sum, or the scaled product before it."""
    x = adversaries(*sorted(shape), bases)
    x = x if shape[0] <= shape[1] else x.mT
    expected = exact(x)
    before = errors(of_float32_sums(x), expected).mean()
    top = largest(expected).max()
    figures = []
    for once, limit in ((True, 1.7), (False, 2.2)):
        q, _ = of_monic_form(x, once=once)
        error, most = errors(q, expected).mean(), largest(q).max() / top
        assert error < limit * before
        assert most - 1 < 0.05
        figures.append(f"{error:.4f} {most:.3f}")
    print(f"{shape[0]}x{shape[1]}: {before:.4f}, {', '.join(figures)}")  # With -s.


def test_errors_on_a_gaussian_matrix():
    """With constants in float16 it would be 0.0055: that is another polynomial."""
    x = np.random.default_rng(0).normal(size=(256, 256)).astype(ml_dtypes.bfloat16)
    expected = exact(x.astype(np.float64) / np.linalg.norm(x.astype(np.float64)))
    error = np.linalg.norm(on_a_gpu(x, FLOAT16) - expected) / np.linalg.norm(expected)
    print(f"256x256, Gaussian: {error:.4f}")  # With -s.
    assert error < 0.0035


@pytest.mark.extended
def test_errors_that_bfloat16_would_have():
    """With restarts before every step, as they are there."""
    x, bfloat16 = adversaries(96, 384, (random_bases,)), jnp.dtype(jnp.bfloat16)
    expected = exact(x)
    before = errors(of_float32_sums(x, bfloat16), expected).mean()
    figures = []
    for once, limit in ((True, 1.6), (False, 1.9)):
        q, _ = of_monic_form(x, once=once, dtype=bfloat16)
        figures.append(errors(q, expected).mean())
        assert figures[-1] < limit * before
        assert largest(q).max() / largest(expected).max() - 1 < 0.05
    print(f"bfloat16: {before:.3f}, {figures[0]:.3f}, {figures[1]:.3f}")  # With -s.


@pytest.mark.extended
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_no_number_overflows_and_nothing_explodes(name, plain, once):
    """Products that are not scaled yet, constants and results, at every step."""
    wide = adversaries(16, 64)
    for steps in range(10 if name == "deepseek_v4" else 1, 11):
        # What rounding leaves of a zero may become anything that the steps can reach.
        rows = oracle.rows_of(PRESETS[name], steps)
        limit = oracle.compose(rows, np.geomspace(1e-6, 1, 20_001))
        restarts = tuple(range(1, steps)) if plain else None
        for x in (wide, wide.mT, wide[..., :16] / 2):
            q, number = of_monic_form(x, name, steps, once, restarts)
            assert number < LARGEST / 1.2  # The scales keep below LARGEST / 2.
            assert largest(q).max() / limit.max() - 1 < 0.05


@pytest.mark.parametrize("name, steps", [("polar_express", 5), ("jordan", 10)])
@pytest.mark.parametrize("preconditioning", ["frobenius", "aol"])
def test_the_scale_changes_what_is_rounded_and_nothing_else(name, steps, preconditioning):
    """GPUs round matrices to bfloat16 first, which powers of two do not change."""
    x = np.random.default_rng(0).normal(size=(3, 16, 64)).astype(np.float32)

    def of(x):
        return on_a_gpu(x, FLOAT16, name, steps, preconditioning)

    for power in (2.0**-100, 2.0**100):
        np.testing.assert_array_equal(of(np.float32(power) * x), of(x))
    for scale in (1, 3, 1e-30, 1e30):
        scaled = np.float32(scale) * x
        rounded = scaled.astype(ml_dtypes.bfloat16).astype(np.float64)
        rounded /= np.linalg.norm(rounded, axis=(1, 2), keepdims=True)
        if preconditioning == "aol":
            rounded /= np.sqrt(np.abs(rounded @ rounded.mT).sum(-1, keepdims=True))
        expected = exact(rounded, name, steps)
        off = np.linalg.norm(of(scaled) - expected, axis=(1, 2))
        # At most 0.036 for 133 triples of such matrices.
        assert (off / np.linalg.norm(expected, axis=(1, 2))).mean() < 0.05


def test_large_matrices_keep_their_digits_after_many_steps():
    """Without the lift, x would be subnormal in the last of ten steps."""
    x = np.random.default_rng(0).normal(size=(8, 8192))
    x /= np.linalg.norm(x)
    expected = exact(x, "jordan", 10)
    q, _ = of_monic_form(x, "jordan", 10)
    assert errors(q, expected) < 0.02


@pytest.mark.parametrize(
    "table", [((3.0, 0.0, -1.0),), ((0.0, 2.0, -1.0),), ((50.0, 30.0, 20.0),) * 7]
)
def test_tables_without_a_monic_form_take_the_other(table):
    settings = NewtonSchulz.of(len(table), table, FLOAT16, "frobenius")
    assert monic_scales(settings.rows, GPU.running(settings).restarts, 2.0**7) is None
    x = np.random.default_rng(0).normal(size=(8, 32))
    assert on_a_gpu(x, FLOAT16, table, len(table)).shape == x.shape


def test_cubics_take_no_square():
    table = ((1.5, -0.5, 0.0),) * 5
    x = np.random.default_rng(0).normal(size=(8, 32))
    q, wide = (on_a_gpu(x, np.dtype(d), table) for d in (np.float16, np.float32))
    np.testing.assert_allclose(q, wide, atol=3e-3)


def test_the_derivative_is_that_in_float32():
    rng = np.random.default_rng(0)
    x, dx = (jnp.asarray(rng.normal(size=(8, 24)), jnp.float32) for _ in range(2))

    def directional(dtype):
        settings = NewtonSchulz.of(5, "polar_express", dtype, "frobenius")
        platform = TPU.running(settings)
        scale = platform.arithmetic().scale

        def factor(x):
            [q] = newton_schulz([scale * x / jnp.linalg.norm(x)], platform)
            return q

        return jax.jvp(factor, (x,), (dx,))[1]

    found, expected = directional("float16"), directional("float32")
    assert jnp.linalg.norm(found - expected) < 0.1 * jnp.linalg.norm(expected)
