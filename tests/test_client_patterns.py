"""The operations of third-party trainers on an optimizer's state, in their order.

MaxText, nanodo and Tunix are not packages that install with this JAX; `make clients` runs
one that does.
"""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax import orscale
from tests.flax.test_annotations import (
    RATE,
    RULES,
    LinenPair,
    Pair,
    assert_close,
    linen_alone,
    linen_placed,
    linen_trained,
    mesh_of,
    nnx_alone,
    nnx_trained,
    squares,
)

pytestmark = pytest.mark.extended


def is_variable(node):
    return isinstance(node, nnx.Variable)


def spec_of_variable(variable, rules):
    """MaxText's spec: from the metadata, cut to the rank of the value."""
    value = variable.get_value()
    if not hasattr(value, "shape"):
        return None
    names = variable.get_metadata("out_sharding", None) or ()
    return P(*[dict(rules).get(name) for name in names][: len(value.shape)])


def test_maxtext_with_nnx():
    """A factory without parameters, an abstract state, shardings of variables."""

    def get_optimizer(config, schedule):
        return orscale(schedule, weight_decay=config["weight_decay"])

    def build():
        model = Pair(nnx.Rngs(0), "rows", "columns")
        tx = get_optimizer({"weight_decay": 0.1}, optax.constant_schedule(RATE))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    mesh = mesh_of()
    with nnx.logical_axis_rules(RULES), nnx.use_eager_sharding(False):
        graph, shapes = nnx.split(nnx.eval_shape(build))
        where = jax.tree.map(
            lambda v: NamedSharding(mesh, spec_of_variable(v, RULES)),
            shapes,
            is_leaf=is_variable,
        )
        state = jax.jit(lambda: nnx.state(build()), out_shardings=where)()

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=where)
        def step(state):
            model, optimizer = nnx.merge(graph, state)
            optimizer.update(model, nnx.grad(squares)(model))
            return nnx.state((model, optimizer))

        for _ in range(2):
            state = step(state)
    model, _ = nnx.merge(graph, state)
    assert_close(nnx.to_pure_dict(nnx.state(model)), nnx_alone("orscale"))


def test_nanodo():
    """get_sharding of the whole train state, MultiSteps around the optimizer."""

    def accumulating():
        return optax.MultiSteps(orscale(RATE), every_k_schedule=1)

    mesh = mesh_of()

    def specs_of(state):
        by_box = nn.get_sharding(state, mesh)
        return jax.tree.map(lambda where: where.spec, by_box)

    with jax.set_mesh(mesh):
        model = LinenPair(("fsdp", "tensor"))
        state, where = linen_placed(model, accumulating(), mesh, specs_of)
        state = linen_trained(state, where)
    assert state.opt_state.gradient_step == 2
    assert_close(state.params, linen_alone(LinenPair(), accumulating()).params)


def test_tunix():
    """Dtypes of all variables of the state; then each is placed by its annotation."""
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        model = Pair(nnx.Rngs(0), "fsdp", "tensor")
        optimizer = nnx.Optimizer(model, orscale(RATE), wrt=nnx.Param)
        state = nnx.state(optimizer, nnx.optimizer.OptState)
        dtypes = jax.tree.map(
            lambda variable: variable.get_value().dtype, state, is_leaf=is_variable
        )
        assert {np.dtype(dtype) for dtype in jax.tree.leaves(dtypes)} == {
            np.dtype(kind) for kind in ("float32", "int32", "uint32", "int8")
        }
        specs = nnx.get_partition_spec(state)
        placed = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs
        )
        nnx.update(optimizer, placed)
        assert_close(nnx_trained(model, optimizer), nnx_alone("orscale"))
