"""The benchmarks of the momentum's dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.benchmarks import momentum_bytes, momentum_codes
from orscale_jax.transforms import momentum as int8_blocks


def test_the_linear_code_is_the_package_s():
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    wanted = momentum_codes.ROUNDINGS["linear, blocks of 32"](x.astype(np.float64))
    found = int8_blocks.decode(*int8_blocks.encode(jnp.asarray(x), 0), jnp.float32)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_dynamic_code():
    table = momentum_codes.dynamic_table()
    assert len(table) == 256 and (np.diff(table) > 0).all()
    assert table[-1] == 1 and table[0] > -1 and table[127] == 0
    assert (momentum_codes.dynamic(table) == table).all()
    x = np.random.default_rng(0).uniform(-1, 1, size=1000)
    distances = np.abs(x[:, None] - table)
    np.testing.assert_array_equal(momentum_codes.dynamic(x), table[distances.argmin(1)])


def test_nothing_rounded_is_no_error():
    rng = np.random.default_rng(0)
    momenta = [rng.normal(size=(8, 6)) for _ in range(3)]
    assert momentum_codes.error(momenta, lambda x: x) < 1e-12
    assert 0 < momentum_codes.error(momenta, momentum_codes.ROUNDINGS["bfloat16"]) < 0.1


def test_bytes_of_the_state(monkeypatch):
    monkeypatch.setattr(momentum_bytes, "SHAPES", {"up": (64, 128), "down": (128, 64)})
    for mu_dtype, momentum in {"bfloat16": 2, "int8": 1.0625}.items():
        cells = momentum_bytes.row(jax.devices()[:2], mu_dtype, None).split("|")
        # A flag for each matrix is on every device.
        assert float(cells[4]) == pytest.approx(momentum, abs=2e-3)
