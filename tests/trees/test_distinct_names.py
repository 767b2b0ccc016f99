"""No two leaves have one name, in any tree, table or log."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import describe, orscale
from orscale_jax.diagnostics import find_problems, read, summarize, tabulate
from orscale_jax.trees.names import distinct_names, dotted

KEYS = st.text("ab0.[]' ", max_size=4)
TREES = st.recursive(
    st.just(0.0),
    lambda inside: (
        st.dictionaries(KEYS, inside, min_size=1, max_size=3)
        | st.lists(inside, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.extended
@hypothesis.given(TREES)
def test_names_are_distinct(tree):
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    names = distinct_names(paths)
    assert len({*names}) == len(paths)
    plain = list(map(dotted, paths))
    if len({*plain}) == len(paths) and not any("]" in name for name in plain):
        assert names == plain  # Nothing is quoted without need.


W = jnp.ones((3, 4))
ALIKE = [
    ({"a.b": W, "a": {"b": 2 * W}}, ["a.b", "'a.b'"]),
    ({"a.b": W, "a": {"b": jnp.ones(3)}}, ["'a.b'"]),  # Beside a bias, as in describe.
    ({"a": [W, W], "a.0": W}, ["a.0", "a.1", "'a.0'"]),
    ({"up": jnp.ones((2, 3, 4)), "up[0]": W}, ["up[0]", "up[1]", "'up[0]'"]),
]


@pytest.mark.quick_first_case
@pytest.mark.parametrize("params, names", ALIKE)
def test_tables_and_scalars_have_an_entry_for_each(params, names):
    numbers = jax.tree.map(lambda x: Dims(-2, -1) if x.ndim > 1 else None, params)
    optimizer = orscale(0.1, weight_dimension_numbers=numbers)
    reading = read(optimizer.init(params), params, numbers, learning_rate=0.1)
    table = tabulate(reading)
    assert table["matrix"].tolist() == names
    scalars = summarize(reading, matrices="")
    assert {f"optimizer/{name}/growth" for name in names} <= {*scalars}
    # The audit and the history know a matrix by the same name.
    rows = describe(params, optimizer).rows
    assert {row.path for row in rows if row.m} == {
        name if name.endswith("'") else name.partition("[")[0] for name in names
    }


def test_matrices_called_like_experts_are_no_stack():
    table = {"matrix": ["'up[0]'", "'up[1]'", "down[0]", "down[1]"]}
    table |= {"weight_norm": [1.0] * 4, "started": [1, 0, 1, 0]}
    [problem] = find_problems(table)
    assert problem.matrices == ("down[1]",)


@pytest.mark.extended
def test_classes_that_have_one_name_are_one_class():
    params = {"a": W, "b": 3 * W}
    reading = read(orscale(0.1).init(params), params)
    grown = reading._replace(growth={"a": jnp.float32(1), "b": jnp.float32(3)})
    scalars = summarize(grown, {"a": "mlp up", "b": "mlp_up"})
    assert float(scalars["optimizer/mlp_up/growth/mean"]) == 2.0
