"""The shardings of the state, against what the compiled program gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import orscale, state_shardings
from tests import everything
from tests.runs import AUTO, EXPLICIT, mesh_of, numbers_of

SPECS = {
    "w": P("a", "b"), "stack": P("a", None, "b"), "middle": P(None, ("a", "b"), None),
    "norm": P("b"), "whole": P(),
}  # fmt: skip
SHAPES = {
    "w": (8, 16), "stack": (4, 12, 8), "middle": (6, 8, 4), "norm": (4,), "whole": (6, 4)
}  # fmt: skip
NUMBERS = numbers_of(SHAPES) | {"middle": Dims(0, 2)}
MESH = {"a": 2, "b": 4}
# Of the arrays with one entry per matrix, and of those with one per output neuron.
# Of the scales of 8-bit momentum: shards of w cut its blocks, along the last axis.
SCALES = SPECS | {"w": P(("a", "b"))}
BATCHES = {"w": P(), "stack": P("a"), "middle": P(("a", "b")), "whole": P()}
NEURONS = {"w": P("b"), "stack": P("a", "b"), "middle": P(("a", "b")), "whole": P()}
build = functools.partial(orscale, 1e-2, weight_dimension_numbers=NUMBERS)
OPTIMIZERS = {
    "bfloat16 momentum": build(mu_dtype=jnp.bfloat16),
    "adamw": optax.adamw(1e-2),
    "injected": optax.inject_hyperparams(orscale)(
        learning_rate=optax.linear_schedule(1e-2, 0.0, 9),
        weight_dimension_numbers=NUMBERS,
    ),
    "wrapped": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.MultiSteps(build(), 2).gradient_transformation(),
    ),
} | {
    name: factory(1e-2, weight_dimension_numbers=NUMBERS)
    for name, factory in everything.OPTIMIZERS.items()
}


def abstract(mesh):
    return {
        name: jax.ShapeDtypeStruct(
            SHAPES[name], jnp.float32, sharding=NamedSharding(mesh, spec)
        )
        for name, spec in SPECS.items()
    }


def placed(mesh):
    return jax.device_put(np.ones(SHAPES["w"]), abstract(mesh)["w"].sharding)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arrays_with_and_without_the_shape_of_a_parameter(name, kind):
    on, optimizer = mesh_of(MESH, kind), OPTIMIZERS[name]
    shardings = state_shardings(optimizer, abstract(on))
    state = jax.eval_shape(optimizer.init, abstract(on))
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    seen = set()
    leaves = jax.tree.leaves_with_path(state)
    for (path, leaf), found in zip(leaves, jax.tree.leaves(shardings), strict=True):
        assert found.mesh == on
        owner = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else None
        if owner not in SHAPES:
            expected = P()
        elif leaf.shape == SHAPES[owner]:
            expected = SPECS[owner]
        elif jax.tree_util.GetAttrKey("neuron_mean_square") in path:
            expected = NEURONS[owner]
        elif jax.tree_util.GetAttrKey("trace_scale") in path:
            expected = SCALES[owner]
        elif jax.tree_util.GetAttrKey("numbers") in path:
            expected = P(None, *BATCHES[owner])
        else:
            expected = BATCHES[owner]
        seen.add((owner, expected))
        assert found.is_equivalent_to(NamedSharding(on, expected), leaf.ndim), path
    assert set(SPECS.items()) <= seen
    if name == "orscale":
        numbers = {(owner, P(None, *batch)) for owner, batch in BATCHES.items()}
        assert numbers <= seen


# An injected optimizer is made anew in each update, and remembers no shardings.
@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "injected"])
def test_an_init_outside_of_jit_leaves_only_scalars_to_be_placed(name):
    """As midGPT restores a state: where its arrays lie, and scalars on the mesh."""
    on, optimizer = mesh_of(MESH), OPTIMIZERS[name]
    params = {
        key: jnp.ones(x.shape, device=x.sharding) for key, x in abstract(on).items()
    }
    restored = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding if x.ndim else NamedSharding(on, P())),
        optimizer.init(params),
    )
    jax.jit(optimizer.update)(params, restored, params)


def test_leaves_without_a_named_sharding_are_everywhere():
    on = mesh_of(MESH)
    params = {"w": placed(on), "own": jnp.ones((3, 2)), "gain": 1.0}
    shardings = state_shardings(optax.adam(1e-2), params)
    assert shardings[0].mu["w"].spec == P("a", "b")
    for moment in (shardings[0].mu["own"], shardings[0].nu["gain"]):
        assert moment.is_fully_replicated


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="no parameter has a jax"):
        state_shardings(optax.adam(1e-2), {"w": jnp.ones(3)})
    other = mesh_of({"c": 8})
    params = {
        "w": placed(mesh_of(MESH)),
        "v": jax.device_put(jnp.ones(8), NamedSharding(other, P("c"))),
    }
    with pytest.raises(ValueError, match=r"'v' of shape \(8,\) and 'w' of"):
        state_shardings(optax.adam(1e-2), params)
