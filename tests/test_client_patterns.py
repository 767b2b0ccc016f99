"""The operations of third-party trainers on an optimizer's state, in their order.

MaxText, nanodo and Tunix are not packages that install with this JAX; `make clients` runs
one that does.
"""

import functools

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from orscale_jax import orscale
from tests.flax.test_annotations import (
    RATE,
    RULES,
    Pair,
    assert_close,
    mesh_of,
    nnx_alone,
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
