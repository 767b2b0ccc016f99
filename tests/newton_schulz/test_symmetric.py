"""Symmetric products by Pallas, interpreted on the CPU, against float64."""

import dataclasses
import itertools
import math
import subprocess
import sys

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from orscale_jax import muon, orscale, orthogonalize
from orscale_jax.distributed.engine import Execution
from orscale_jax.distributed.platforms import GPU, PLATFORMS, TPU_AUTO
from orscale_jax.newton_schulz import symmetric
from orscale_jax.newton_schulz.arithmetic import Arithmetic
from orscale_jax.newton_schulz.coefficients import coefficient_table
from orscale_jax.newton_schulz.polar import NewtonSchulz
from orscale_jax.newton_schulz.symmetric import TPU, TRITON, symmetric_product
from orscale_jax.transforms.orthogonalize import orthogonalize_by

WIDE, TALL, PAIR = (-2, -2), (-1, -1), (-2, -1)


def interpreted(kernel, **changes):
    """The same kernel on the CPU, with small tiles."""
    small = {"tile": 16, "large_tile": 16, "depth": 32, "smallest": 32}
    return dataclasses.replace(kernel, interpret=True, **small | changes)


KERNELS = [
    pytest.param(interpreted(TRITON), id="triton"),
    pytest.param(interpreted(TPU), id="tpu"),
]


def integers(shape, seed=0):
    """Small ones: bfloat16 holds them, and float32 the sums of their products."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float64)


def product(x, y, axes, kernel):
    operands = (jnp.asarray(operand, jnp.bfloat16) for operand in (x, y))
    found = symmetric_product(*operands, axes, kernel)
    assert found.dtype == jnp.float32
    return np.asarray(found)


def circulant(size, seed):
    """A symmetric matrix that commutes with the others of its size."""
    half = integers(size // 2 + 1, seed)
    distance = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    return half[np.minimum(distance, size - distance)]


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "shape", [(5, 7), (32, 64), (40, 70), (70, 40), (2, 3, 33, 20), (1, 1)]
)
def test_gram_matrices_to_the_last_bit(kernel, shape):
    x = integers(shape)
    np.testing.assert_array_equal(product(x, x, WIDE, kernel), x @ x.mT)
    np.testing.assert_array_equal(product(x, x, TALL, kernel), x.mT @ x)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kernel", KERNELS)
def test_where_integers_have_64_bits(kernel, enable_x64):
    x = integers((40, 70))
    np.testing.assert_array_equal(product(x, x, WIDE, kernel), x @ x.mT)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [48, 50, 64])
def test_products_of_matrices_that_commute(kernel, size):
    x, y = circulant(size, 0), circulant(size, 1)
    np.testing.assert_array_equal(product(x, y, PAIR, kernel), x @ y)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_part_above_the_diagonal_is_mirrored(kernel):
    """Seen where the product is not symmetric; tiles on the diagonal are whole."""
    x, y = integers((60, 60)), integers((60, 60), 1)
    found, exact = product(x, y, PAIR, kernel), x @ y
    tile = np.arange(60) // kernel.tile
    above = tile[:, None] <= tile
    np.testing.assert_array_equal(found, np.where(above, exact, exact.T))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_batch_that_is_mapped_over(kernel):
    x = integers((3, 2, 20, 40))
    found = jax.vmap(lambda x: symmetric_product(x, x, WIDE, kernel))(
        jnp.asarray(x, jnp.bfloat16)
    )
    np.testing.assert_array_equal(found, x @ x.mT)


@pytest.mark.extended
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("axes", [WIDE, TALL, PAIR])
def test_derivatives_are_those_of_the_product(kernel, axes):
    x, y = (jnp.asarray(integers((20, 20), i), jnp.bfloat16) for i in range(2))

    def by_xla(x, y):
        return jnp.einsum(
            symmetric.SUBSCRIPTS[axes], x, y, preferred_element_type=jnp.float32
        )

    def by_kernel(x, y):
        return symmetric_product(x, y, axes, kernel)

    for derivative in (jax.grad, jax.jacfwd):
        found, expected = (
            derivative(lambda x, f=f: jnp.sum(jnp.sin(f(x, y)[0])))(x)
            for f in (by_xla, by_kernel)
        )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", range(1, 10))
def test_each_pair_of_tiles_comes_once(count):
    found = [
        tuple(map(int, symmetric.pair(jnp.int32(p), count)))
        for p in range(symmetric.pairs(count))
    ]
    expected = itertools.combinations_with_replacement(range(count), 2)
    assert sorted(found) == list(expected)


def kernels_in(jaxpr):
    """The equations of the Pallas kernels in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from kernels_in(inner)


@pytest.mark.parametrize(
    "kernel, steps", [(TRITON, 1), (TPU, math.ceil(3072 / TPU.depth) + 1)]
)
def test_the_grid_has_the_tiles_of_a_triangle(kernel, steps):
    x = jax.ShapeDtypeStruct((2, 768, 3072), jnp.bfloat16)
    program = jax.make_jaxpr(lambda x: symmetric_product(x, x, WIDE, kernel))(x)
    [equation] = kernels_in(program.jaxpr)
    along = 768 // kernel.tile
    grid = equation.params["grid_mapping"].grid
    assert math.prod(grid) == 2 * along * (along + 1) // 2 * steps


@pytest.mark.parametrize("kernel", [TRITON, TPU])
def test_what_a_kernel_takes(kernel):
    """Nothing wider than bfloat16, whose products would be rounded, and nothing small."""
    size = kernel.smallest
    for dtype, rows, taken in (
        ("bfloat16", size, True),
        ("float16", size, kernel is TRITON),
        ("float32", size, False),
        ("bfloat16", size - 1, False),
    ):
        arithmetic = Arithmetic(jnp.dtype(dtype), kernel=kernel)
        x = jax.ShapeDtypeStruct((rows, 2 * size), dtype)
        program = jax.make_jaxpr(arithmetic.gram)(x)
        assert len(list(kernels_in(program.jaxpr))) == taken


def stage(kernel, ns_products, dtype=None):
    """Orthogonalize on the CPU, as on GPUs."""
    policy = GPU._replace(kernel=kernel)
    settings = NewtonSchulz(
        2, coefficient_table("polar_express"), "frobenius", dtype, products=ns_products
    )
    return orthogonalize_by(Execution(settings, platforms={**PLATFORMS, "cpu": policy}))


@pytest.mark.extended
@pytest.mark.parametrize("kernel", KERNELS)
def test_polar_factors(kernel):
    """As by XLA, up to the order of sums; bfloat16 has three digits."""
    keys = jax.random.split(jax.random.key(0), 2)
    updates = {
        "wide": jax.random.normal(keys[0], (40, 70)),
        "tall": jax.random.normal(keys[1], (80, 33)),
    }
    by_xla, by_kernel = (
        jax.jit(stage(kernel, name).update)(updates, None)[0]
        for name in symmetric.PRODUCTS
    )
    for name in updates:
        np.testing.assert_allclose(by_kernel[name], by_xla[name], atol=0.02)


@pytest.mark.extended
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_polar_factors_on_a_mesh(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.random.normal(jax.random.key(0), (40, 70))
    sharded = {"w": jax.device_put(x, NamedSharding(mesh, spec))}
    update = jax.jit(stage(interpreted(TRITON), "pallas").update)
    found, expected = update(sharded, None)[0], update({"w": x}, None)[0]
    np.testing.assert_allclose(found["w"], expected["w"], atol=0.02)


def lowered(optimizer, platform):
    """The text of a step for a platform that need not be there."""
    params = {"kernel": jax.ShapeDtypeStruct((768, 1024), jnp.float32)}
    state = jax.eval_shape(optimizer.init, params)
    traced = jax.jit(optimizer.update).trace(params, state, params)
    try:
        return traced.lower(lowering_platforms=(platform,)).as_text()
    except (RuntimeError, DeprecationWarning) as error:
        # Newer JAX makes Triton kernels only where it sees a GPU, and will drop them.
        if "AbstractDevice" in str(error) or "Triton backend" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "platform, call", [("cuda", "triton"), ("tpu", "tpu_custom_call")]
)
def test_programs_have_kernels_where_they_are_asked_for(platform, call):
    for build in (orscale, muon):
        assert call in lowered(build(1e-3, ns_products="pallas"), platform)
    assert call not in lowered(orscale(1e-3), platform)
    wide = orscale(1e-3, ns_products="pallas", ns_dtype=jnp.float32)
    assert call not in lowered(wide, platform)


def test_cpus_have_none():
    by_xla, by_pallas = (
        lowered(orscale(1e-3, ns_products=name), "cpu") for name in symmetric.PRODUCTS
    )
    assert by_pallas == by_xla


def test_the_partitioner_meets_no_kernel():
    assert TPU_AUTO.kernel is None


def test_bad_values_are_refused():
    for build in (orthogonalize, lambda **given: orscale(1e-3, **given)):
        for bad in ("triton", None, True):
            with pytest.raises(ValueError, match=r"^ns_products=.*'xla' or 'pallas'"):
                build(ns_products=bad)


def test_pallas_is_imported_when_it_is_used():
    program = (
        "import sys, orscale_jax; sys.exit('jax.experimental.pallas' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
