"""A state in the host's memory between the steps, on both kinds of meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import keep_master_weights, orscale, state_shardings

SHAPES = {"w": (16, 8), "stack": (8, 4, 6), "b": (8,)}
NUMBERS = {"w": Dims(0, 1), "stack": Dims(1, 2), "b": None}
SPACE = jax.memory.Space


def tree(seed, where, dtype):
    rng = np.random.default_rng(seed)
    arrays = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}
    return jax.device_put(arrays, where)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.extended
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("wrapper", "dtype"), [(lambda x: x, "float32"), (keep_master_weights, "bfloat16")]
)
def test_the_state_may_lie_on_the_host(axes, wrapper, dtype):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axes,))
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
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, y)
