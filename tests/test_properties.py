"""Names, order and containers of leaves do not matter, and dtypes never change."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import Phase, given, settings, strategies as st

from tests import everything
from tests.runs import assert_same_bits, readout

OPTIMIZERS = {
    name: functools.partial(make, 1e-2) for name, make in everything.OPTIMIZERS.items()
}
RATIOS = ("calibration", "raw_trust_ratio", "trust_ratio")


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


FIELDS = {"embedding": (5, 4), "kernel": (4, 3), "bias": (3,), "wide": (3, 4)}


def fields(seed):
    return {
        name: jnp.asarray(normal(seed + i, shape))
        for i, (name, shape) in enumerate(FIELDS.items())
    }


def two_steps(build, pack):
    """Updates and state of the second step on a container of :func:`fields`."""
    optimizer = build()
    params = pack(fields(0))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for seed in (10, 20):
        updates, state = update(pack(fields(seed)), state, params)
        params = optax.apply_updates(params, updates)
    return params, updates, state


@functools.cache
def as_a_dict():
    return two_steps(OPTIMIZERS["orscale"], dict)


@settings(max_examples=3)
@given(st.permutations(sorted(FIELDS)), st.booleans())
def test_names_and_order_of_leaves_do_not_matter(order, rename):
    """To the bit. JAX sorts a dict's keys, so only new names change its order."""
    prefix = {field: f"{i}_{field}" if rename else field for i, field in enumerate(order)}

    def pack(tree):
        return {prefix[field]: tree[field] for field in order}

    _, found, _ = two_steps(OPTIMIZERS["orscale"], pack)
    _, expected, _ = as_a_dict()
    for field in FIELDS:
        assert_same_bits(found[prefix[field]], expected[field])


NAMES = tuple(FIELDS)
Tuple = NamedTuple("Tuple", [(name, Any) for name in NAMES])


def annotated(*bases, **more):
    fields = dict.fromkeys(NAMES, Any) | dict.fromkeys(more, Any)
    return type("Fields", bases, {"__annotations__": fields} | more)


Registered = jax.tree_util.register_dataclass(dataclasses.dataclass(annotated()))


class Module(annotated(eqx.Module)):
    activation: Any = jax.nn.relu

    def __call__(self, x):
        raise TypeError("The parameters are a tree, and not a function from one.")


class Network(nnx.Module):
    def __init__(self, tree):
        for name, leaf in tree.items():
            setattr(self, name, nnx.Param(leaf))


def equinox_module(tree):
    return eqx.filter(Module(**tree), eqx.is_inexact_array)


def by_attribute(container):
    return {name: getattr(container, name) for name in FIELDS}


def of_lists(tree):
    return {name: leaf for [one] in tree for name, leaf in one.items()}


# Name: from a dict to the container, and back.
CONTAINERS = {
    "lists": (lambda tree: [({k: x},) for k, x in tree.items()], of_lists),
    "named tuple": (lambda tree: Tuple(**tree), by_attribute),
    "dataclass": (lambda tree: Registered(**tree), by_attribute),
    "equinox": (equinox_module, by_attribute),
    "nnx.State": (
        lambda tree: nnx.state(Network(tree), nnx.Param),
        lambda state: {name: state[name][...] for name in FIELDS},
    ),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("container", CONTAINERS)
def test_the_container_does_not_matter(container):
    """To the bit, and updates come back in the container of the gradients."""
    pack, unpack = CONTAINERS[container]
    params, updates, state = two_steps(OPTIMIZERS["orscale"], pack)
    expected_params, expected, expected_state = as_a_dict()
    assert jax.tree.structure(updates) == jax.tree.structure(pack(fields(0)))
    for field in FIELDS:
        assert_same_bits(unpack(updates)[field], expected[field])
        assert_same_bits(unpack(params)[field], expected_params[field])
    for ratio in RATIOS:
        found, wanted = (
            sorted(map(float, jax.tree.leaves(readout(s, ratio))))
            for s in (state, expected_state)
        )
        assert found == wanted
        assert len(found) == 2  # kernel and wide: the embedding takes AdamW.


FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32]


def draw_dtypes(kinds):
    return st.fixed_dictionaries({name: st.sampled_from(kinds) for name in FIELDS})


def abstract(dtypes):
    return {
        name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in FIELDS.items()
    }


def signature(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_never_change(name, double):
    """Each parameter and gradient has its own; updates have the dtypes of AdamW's."""
    kinds = FLOATS + [jnp.float64] * double

    # Shrinking a failure would take minutes, as every example is traced.
    @settings(max_examples=6, phases=[Phase.generate])
    @given(draw_dtypes(kinds), draw_dtypes(kinds), st.sampled_from([None, *kinds]))
    def check(params_dtypes, grads_dtypes, mu_dtype):
        optimizer = OPTIMIZERS[name](mu_dtype=mu_dtype)
        params, grads = abstract(params_dtypes), abstract(grads_dtypes)
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, grads, state, params)
        assert signature(after) == signature(state)
        adamw = optax.adamw(1e-3, mu_dtype=mu_dtype)
        theirs = jax.eval_shape(adamw.init, params)
        theirs, _ = jax.eval_shape(adamw.update, grads, theirs, params)
        assert signature(updates) == signature(theirs)
        for field in ("kernel", "wide"):
            momentum = readout(state, "trace")[field]
            assert momentum.dtype == (mu_dtype or params_dtypes[field])
            for _, numbers in optax.tree.get_all_with_path(state, "numbers"):
                wide = jnp.promote_types(params_dtypes[field], jnp.float32)
                assert numbers[field].dtype == wide

    with jax.enable_x64(double):
        check()
