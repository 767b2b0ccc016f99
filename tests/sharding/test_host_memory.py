"""A state in the host's memory between the steps, on both kinds of meshes."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax import keep_master_weights, orscale, state_shardings
from tests import runs
from tests.runs import AUTO, EXPLICIT, assert_same_bits, mesh_of, numbers_of

SHAPES = {"w": (16, 8), "stack": (8, 4, 6), "b": (8,)}
NUMBERS = numbers_of(SHAPES)
SPACE = jax.memory.Space


def tree(seed, where, dtype):
    return jax.device_put(runs.tree(seed, dtype, SHAPES), where)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.extended
@pytest.mark.parametrize("axes", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    ("wrapper", "dtype"), [(lambda x: x, "float32"), (keep_master_weights, "bfloat16")]
)
def test_the_state_may_lie_on_the_host(axes, wrapper, dtype):
    mesh = mesh_of({"data": 8}, axes)
    where = NamedSharding(mesh, P("data"))
    optimizer = wrapper(orscale(1e-2, weight_dimension_numbers=NUMBERS))
    new = functools.partial(tree, where=where, dtype=dtype)

    def train(at_rest):
        @functools.partial(jax.jit, out_shardings=(where, at_rest))
        def step(params, state, grads):
            state = jax.device_put(state, SPACE.Device)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = new(0)
        state = jax.jit(optimizer.init, out_shardings=at_rest)(params)
        for seed in (1, 2):
            params, state = step(params, state, new(seed))
        return params, state

    with jax.set_mesh(mesh):
        on_devices = state_shardings(optimizer, new(0))
        on_host = jax.tree.map(
            lambda sharding: sharding.with_memory_kind("pinned_host"), on_devices
        )
        found, wanted = train(on_host), train(on_devices)
        with pytest.raises(ValueError, match="memory_space"):
            jax.jit(optimizer.update)(new(1), found[1], found[0])
    assert [kinds(part) for part in found] == [{"device"}, {"pinned_host"}]
    assert_same_bits(*(jax.tree.map(np.asarray, part) for part in (found, wanted)))
