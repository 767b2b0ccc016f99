"""Weights with outputs first, as in PyTorch: the same steps in both layouts."""

import functools

import jax.numpy as jnp
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers as Blocks, muon
from tests.everything import OPTIMIZERS
from tests.leaves import relative_error
from tests.runs import first_update, tree

# They normalize neurons.
ON_SIDES = {"normuon", "orscale_on_normuon"}
# PyTorch's shape and numbers, the axes in the order of JAX's, and numbers there.
KINDS = {
    "linear": ((8, 14), Dims(1, 0), (1, 0), Dims(0, 1)),
    "in_proj": (
        *((18, 5), Blocks(1, 0, block_axis=0, blocks=3)),
        *((1, 0), Blocks(0, 1, block_axis=1, blocks=3)),
    ),
    "conv": ((8, 4, 3, 2), Dims((1, 2, 3), 0), (2, 3, 1, 0), Dims((0, 1, 2), 3)),
    "grouped": (
        *((8, 2, 3, 3), Blocks((1, 2, 3), 0, block_axis=0, blocks=2)),
        *((2, 3, 1, 0), Blocks((0, 1, 2), 3, block_axis=3, blocks=2)),
    ),
    "transposed": ((4, 8, 3, 3), Dims((0, 2, 3), 1), (2, 3, 0, 1), Dims((0, 1, 2), 3)),
}
THEIRS = {name: kind[1] for name, kind in KINDS.items()}
OURS = {name: kind[3] for name, kind in KINDS.items()}


weights = functools.partial(tree, shapes={name: kind[0] for name, kind in KINDS.items()})


def to_jax(values):
    return {name: leaf.transpose(KINDS[name][2]) for name, leaf in values.items()}


def step(make, numbers, params, grads):
    optimizer = make(0.1, weight_dimension_numbers=numbers, ns_dtype=jnp.float32)
    return first_update(optimizer, params, grads)[0]


@pytest.mark.extended
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_step_in_both_layouts(name):
    """And for which optimizers a linear layer may be taken for (in, out)."""
    take = functools.partial(step, OPTIMIZERS[name])
    params, grads = weights(0), weights(1)
    found = take(THEIRS, params, grads)
    expected = take(OURS, to_jax(params), to_jax(grads))
    for kind, update in to_jax(found).items():
        assert relative_error(update, expected[kind]) < 2e-5, kind
    linear, grad = ({"linear": values["linear"]} for values in (params, grads))
    turned = take({"linear": Dims(0, 1)}, linear, grad)
    error = relative_error(turned["linear"], found["linear"])
    assert (error > 1e-2) == (name in ON_SIDES)
    assert (error < 2e-5) == (name not in ON_SIDES)


@pytest.mark.extended
def test_other_axes_of_a_convolution_are_other_matrices():
    params, grads = weights(0), weights(1)
    found = step(muon, THEIRS, params, grads)["conv"]
    other = step(muon, THEIRS | {"conv": Dims((0, 1, 2), 3)}, params, grads)["conv"]
    assert relative_error(other, found) > 0.1
