"""A restored state is checked against the optimizer and the parameters, for any chain."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from orscale_jax import check_state, family, muon, orscale
from tests.runs import NUMBERS, mesh_of, placed, run, tree

MODELS = {
    "orscale": orscale(1e-2, weight_dimension_numbers=NUMBERS),
    "int8": orscale(1e-2, mu_dtype="int8", weight_dimension_numbers=NUMBERS),
    "hyperball": family.hyperball(1e-2, weight_dimension_numbers=NUMBERS),
}
OTHERS = {
    "muon": muon(1e-2, weight_dimension_numbers=NUMBERS),
    "adamw": optax.adamw(1e-2),
    "optax's muon": optax.contrib.muon(1e-2, muon_weight_dimension_numbers=NUMBERS),
    "accumulated": optax.MultiSteps(optax.sgd(1e-2, 0.9), 2),
}


def trained(optimizer, params, steps=3):
    return run(optimizer, params, steps, gradients=tree)[-1]


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", MODELS | OTHERS)
def test_its_own_state_and_those_of_others(name):
    optimizer = (MODELS | OTHERS)[name]
    params, state = trained(optimizer, tree(0))
    check_state(optimizer.init(params), optimizer, params)
    check_state(state, optimizer, params)
    check_state(jax.device_get(state), optimizer, params)
    longer = params | {"w": jnp.ones((7, 4))}
    with pytest.raises(ValueError, match=r"of parameter 'w' has shape \(6, 4\)"):
        check_state(state, optimizer, longer)
    with pytest.raises(ValueError, match="the state does not fit"):
        check_state(state, optax.sgd(1e-2, 0.9), params)
    # At one entry, as by a broken file.
    broken = jax.tree.map(
        lambda x: (
            x.at[(0,) * x.ndim].set(jnp.nan)
            if x.shape == (4,) and x.dtype == jnp.float32
            else x
        ),
        state,
    )
    with pytest.raises(ValueError, match="of parameter 'b' is not finite"):
        check_state(broken, optimizer, params)


@pytest.mark.extended
@pytest.mark.parametrize("name", MODELS)
def test_the_state_of_another_model(name):
    """As Megatron-LM 6920: names and shapes agree, and the loss looks normal."""
    optimizer = MODELS[name]
    _, state = trained(optimizer, tree(0))
    others = jax.tree.map(lambda x: 3 * x, tree(7))
    with pytest.raises(ValueError, match="the state is that of another model"):
        check_state(state, optimizer, others)
    sharded = placed(
        others, mesh_of({"data": 2}), {"w": P("data"), "stack": P(), "b": P()}
    )
    with pytest.raises(ValueError, match="the state is that of another model"):
        check_state(state, optimizer, sharded)


@pytest.mark.extended
@pytest.mark.parametrize("a", [1, 0])
def test_matrices_that_were_zero(a):
    """As LoRA's B: c is infinite, and the norm grows fast in the first steps."""
    params = {"a": a * jnp.asarray(tree(0)["w"]), "b_up": jnp.zeros((4, 6))}
    optimizer = orscale(optax.linear_schedule(1e-3, 1e-1, 5))
    state = optimizer.init(params)
    for step in range(4):
        angles = jax.tree.map(lambda x: jnp.arange(x.size).reshape(x.shape), params)
        grads = jax.tree.map(lambda x, step=step: jnp.cos(step + x), angles)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        check_state(state, optimizer, params)
