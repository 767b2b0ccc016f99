"""Every platform's way on CPU, and the layouts that TPUs store arrays in."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import orthogonalize
from orscale_jax.distributed.platforms import AUTO_TPU, CPU, GPU, TPU, parameter_layout
from tests.platforms import orthogonalize_as
from tests.runs import AUTO, EXPLICIT, mesh_of, placed, tree

SHAPES = {"wide": (8, 16), "tall": (16, 8), "also": (8, 16), "experts": (4, 8, 8)}


matrices = functools.partial(tree, 0, shapes=SHAPES)


def assert_polar(found, atol):
    stage = orthogonalize(weight_dimension_numbers=Dims(-2, -1))
    wanted, _ = stage.update(matrices(), ())
    for name, q in found.items():
        np.testing.assert_allclose(q, wanted[name], atol=atol)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("platform", [CPU, GPU, TPU, AUTO_TPU])
def test_one_device(platform):
    found, _ = orthogonalize_as(platform, Dims(-2, -1)).update(matrices(), ())
    assert_polar(found, 1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_gpus_on_a_mesh(kind):
    sharded = placed(matrices(), mesh := mesh_of({"a": 4}, kind), P("a"))
    stage = orthogonalize_as(GPU, Dims(-2, -1))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda g: stage.update(g, ())[0])(sharded)
    assert_polar(found, 3e-5)  # Two float32 programs, in which sums have other orders.


@pytest.mark.compiled
@pytest.mark.parametrize(
    "shape, minor_to_major",
    [
        ((256, 704), [0, 1]),  # 704 columns would be padded to 768.
        ((704, 256), [1, 0]),
        ((256, 256), [1, 0]),
        ((3, 256, 704), [1, 2, 0]),
        ((8, 100), [1, 0]),  # Twice 128 columns, but sixteen times 8 rows.
        ((100, 8), [0, 1]),
    ],
)
def test_the_order_that_takes_less_padding(shape, minor_to_major):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    text = jax.jit(parameter_layout).lower(x).as_text()
    [found] = re.findall(r"result_layouts = \[dense<(\[.*?\])>", text)
    assert found == str(minor_to_major)


@pytest.mark.extended
def test_values_and_derivatives_are_kept():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 24)), jnp.float32)
    np.testing.assert_array_equal(jax.jit(parameter_layout)(x), x)
    np.testing.assert_array_equal(jax.vmap(parameter_layout)(x), x)
    np.testing.assert_array_equal(parameter_layout(x[0, 0]), x[0, 0])
    gradient = jax.grad(lambda x: jnp.sum(parameter_layout(x) ** 2))(x)
    np.testing.assert_array_equal(gradient, 2 * x)
