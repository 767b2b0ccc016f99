"""The kernel of symmetric products, by Pallas's interpreter and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from examples.benchmarks import symmetric

INTERPRETER = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"),
    reason="JAX 0.10 has no public interpreter of Mosaic GPU",
)


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 16])
def test_places_are_on_and_below_the_diagonal_once(n):
    i, j = symmetric.place(np.arange(n * (n + 1) // 2), n)
    np.testing.assert_array_equal(
        np.sort(n * i + j), np.flatnonzero(np.tril(np.ones((n, n))))
    )


def commuting(shape, rng):
    """Symmetric C, A and B with common eigenvectors, rounded."""
    q = np.linalg.qr(rng.normal(size=shape))[0]
    values = rng.uniform(-1, 1, (3, shape[0], 1, shape[2]))
    made = np.float16((q * values) @ q.mT)
    return np.tril(made) + np.tril(made, -1).mT


@INTERPRETER
@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((2, 256, 256), 128),
        ((1, 128, 128), 64),
        ((1, 384, 384), 192),
        ((1, 200, 200), 128),  # No multiple of the tile.
        ((2, 100, 200), 64),  # Gram matrices.
    ],
)
def test_the_kernel_rounds_once_and_is_symmetric_to_the_bit(shape, tile, monkeypatch):
    monkeypatch.setattr(symmetric, "SMS", 2)  # Each computes several tiles.
    rng = np.random.default_rng(0)
    if shape[1] == shape[2]:
        c, a, b = commuting(shape, rng)
        above = np.arange(shape[1]) // tile > np.arange(shape[1])[:, None] // tile
        given = jnp.asarray(np.where(above, np.nan, c))  # Nothing of it is read.
    else:
        c, a, given = 0, rng.normal(size=shape).astype(np.float16), None
        b = a
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        found = symmetric.symmetric_product(
            given, -0.75, jnp.asarray(a), jnp.asarray(b), tile
        )
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, found.mT)
    c, a, b = (np.float64(x) for x in (c, a, b))
    want = c - 0.75 * a @ b.mT
    rounding = 2.0**-11 * abs(want) + 1e-6 * abs(a) @ abs(b).mT
    # Rounded operands do not quite commute.
    assert (abs(np.float64(found) - want) <= rounding + abs(want - want.mT)).all()


@pytest.mark.extended
@pytest.mark.parametrize("shape", [(2, 256, 256), (2, 384, 448)])
def test_it_lowers_for_a_gpu(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float16)
    c = jax.ShapeDtypeStruct((*shape[:2], shape[1]), jnp.float16)
    traced = jax.jit(symmetric.symmetric_product, static_argnums=1).trace(c, 0.5, x, x)
    lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call") == 1


def test_one_product_of_2048_rows_takes_as_long_in_whole_waves(capsys):
    """Where public kernels cross: XLA's 128 tiles take one wave, 136 halves take two."""
    xla, kernel = ([*symmetric.counts(form, 1, 2048, 2048)] for form in symmetric.FORMS)
    assert kernel[:3] == ["136 of 256", "1.03", "9.1"] and xla[2] == "17.2"
    assert kernel[-1] == xla[-1] and float(kernel[-2]) < 0.6 * float(xla[-2])
    symmetric.main()
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * 9
