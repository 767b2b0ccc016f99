"""The page's restarts and operations, and the emulation behind its errors."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.benchmarks import gram_rounding
from orscale_jax.newton_schulz import coefficients
from orscale_jax.newton_schulz.arithmetic import Arithmetic, Start
from orscale_jax.newton_schulz.polar import gram_newton_schulz
from tests import oracle

PAGE = Path(__file__).parents[3] / "docs" / "newton_schulz.md"
ROWS = np.array(coefficients.PRESETS["polar_express"][:5])


def test_the_page_has_the_tables_of_its_command():
    text = PAGE.read_text()
    assert "python -m examples.benchmarks.gram_rounding" in text
    for table in (gram_rounding.restart_lines(), gram_rounding.bound_lines()):
        assert "\n".join(table) in text


def test_relative_operations():
    """For 2048×8192: 4 m²n = 16 m³ a segment, 2 m³ each square product."""
    found = [gram_rounding.relative_operations(2048, 8192, 5, k) for k in range(5)]
    by_hand = [16 * (k + 1) + 2 * (20 - 3 * (k + 1)) for k in range(5)]
    np.testing.assert_allclose(found, np.array(by_hand) / by_hand[-1])
    # Where the Gram form is not cheaper, the iteration is the plain one.
    assert gram_rounding.relative_operations(4096, 4096, 5, 1) == 1


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def gram(x, rows, before, dtype):
    [q] = gram_newton_schulz([Start(x)], rows, (before,), (Arithmetic(jnp.dtype(dtype)),))
    return q


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("before, units", [((2,), 30), ((2, 4), 4), ((1, 2, 3, 4), 2)])
def test_the_emulation_rounds_where_the_library_does(dtype, before, units):
    """Sums have another order: that decides some roundings, which long segments raise."""
    x = np.random.default_rng(0).normal(size=(2, 16, 64))
    x /= np.linalg.norm(x, axis=(1, 2), keepdims=True)
    power = gram_rounding.power_of_two(x, dtype)
    assert power == (4 if dtype == "float16" else 1)
    rows = ROWS.copy()
    rows[0] = coefficients.divide_argument(rows[0], power)
    expected = gram(jnp.asarray(power * x, dtype), tuple(map(tuple, rows)), before, dtype)
    found = gram_rounding.iterate(x, ROWS, before, dtype)
    unit = gram_rounding.UNITS[dtype]
    np.testing.assert_allclose(found, expected.astype(jnp.float32), atol=units * unit)


def test_errors_are_distances_in_the_spectral_norm():
    xs = np.random.default_rng(0).normal(size=(3, 8, 24))
    xs /= np.linalg.norm(xs, axis=(1, 2), keepdims=True)
    polar = np.stack([oracle.svd_polar(x) for x in xs])
    many = np.array(coefficients.rows_of(coefficients.PRESETS["polar_express"], 12))
    exact = gram_rounding.Exact(xs)
    assert gram_rounding.largest_singular_value(exact(many) - polar) < 1e-12
    moved = exact(many) * np.array([0, 0.25, -0.1])[:, None, None]
    np.testing.assert_allclose(gram_rounding.largest_singular_value(moved), 0.25)
