"""Layouts that TPUs store arrays in, from the program before it is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orscale_jax.distributed.platforms.tpu import parameter_layout


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


def test_values_and_derivatives_are_kept():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 24)), jnp.float32)
    np.testing.assert_array_equal(jax.jit(parameter_layout)(x), x)
    np.testing.assert_array_equal(jax.vmap(parameter_layout)(x), x)
    np.testing.assert_array_equal(parameter_layout(x[0, 0]), x[0, 0])
    gradient = jax.grad(lambda x: jnp.sum(parameter_layout(x) ** 2))(x)
    np.testing.assert_array_equal(gradient, 2 * x)
