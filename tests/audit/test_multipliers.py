"""The column of the learning rate's multipliers."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from orscale_jax import describe, family, muon, orscale
from tests.runs import NUMBERS, tree

PER_LAYER = np.array([1.0, 2.0, 4.0])
RULES = {"^b": 0.5, "stack": PER_LAYER}


def ours(make=orscale, given=RULES):
    return make(0.1, weight_dimension_numbers=NUMBERS, learning_rate_multipliers=given)


def in_groups():
    groups = {"x": ours(), "y": ours(muon, 3.0), "z": optax.sgd(0.1)}
    return optax.partition(groups, {"w": "y", "stack": "x", "b": "z"})


@pytest.mark.parametrize(
    "optimizer, w, b",
    [
        (ours(), 1, 0.5),
        (ours(family.hyperball), 1, 0.5),
        (optax.MultiSteps(ours(), 2), 1, 0.5),
        (ours(optax.inject_hyperparams(orscale)), 1, 0.5),
        (in_groups(), 3, 1),
    ],
    ids=["orscale", "hyperball", "MultiSteps", "injected", "partition"],
)
def test_rows(optimizer, w, b):
    abstract = jax.eval_shape(lambda: tree(0))
    for _ in range(2):  # What JAX has traced before does not hide them.
        rows = describe(abstract, NUMBERS, optimizer=optimizer).rows
        found = {row.path: row.multipliers for row in rows}
        assert found == {"w": (w, w), "b": (b, b), "stack": (1, 4)}


def test_an_audit_inside_of_another_one():
    """Each collects what its own optimizer notes, also where both note equal things."""
    inner = []

    def rules(params):
        inner.append(describe(params, NUMBERS, optimizer=ours(given={"^b": 0.5})))
        return {"w": 2.0, "stack": 1.0, "b": 0.5}

    outer = describe(tree(0), NUMBERS, optimizer=ours(given=rules))
    for description, w in ((outer, (2, 2)), (inner[0], (1, 1))):
        found = {row.path: row.multipliers for row in description.rows}
        assert found == {"w": w, "b": (0.5, 0.5), "stack": (1, 1)}


def test_the_column_is_there_if_it_says_something():
    description = describe(tree(0), NUMBERS, optimizer=ours())
    heading, *lines = str(description).splitlines()
    column = heading.index("η ×")
    assert [line[: column + 3].split()[-1] for line in lines[1:4]] == ["0.5", "4", "1"]
    assert "learning_rate_multiplier" in description.to_csv()
    assert "η ×" in str(description.select("^w"))
    for plain in None, ours(given=None), ours(given={}):
        description = describe(tree(0), NUMBERS, optimizer=plain)
        assert "η ×" not in str(description)
        assert "multiplier" not in description.to_csv()


def test_an_optimizer_of_flax_and_values_that_are_traced():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    tx = orscale(0.1, learning_rate_multipliers={"bias": 3.0})
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    [bias, _] = describe(nnx.state(model, nnx.Param), optimizer=optimizer).rows
    assert bias.multipliers == (3, 3)

    @jax.jit
    def step(factor):
        traced = ours(given={"^b": factor, "stack": 2.0})
        found = describe(tree(0), NUMBERS, optimizer=traced).rows
        assert [row.multipliers for row in found] == [(1, 1), (2, 2), (1, 1)]
        return factor

    step(0.5)
