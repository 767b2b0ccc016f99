"""Multipliers of the learning rate: which parameter has which, and what is refused."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers, orscale
from orscale_jax.diagnostics import layer_classes
from orscale_jax.parameters.rate_multipliers import rate_multipliers
from orscale_jax.trees.boxes import unbox
from tests import leaves

PARAMS = {
    "embed": jnp.ones((5, 4)),
    "blocks": [
        {"attention": {"query": jnp.ones((4, 4))}, "norm": jnp.ones(4)} for _ in range(2)
    ],
    "head": jnp.ones((4, 5)),
}


def tree(embed, queries, norms, head):
    pairs = zip(queries, norms, strict=True)
    blocks = [{"attention": {"query": q}, "norm": n} for q, n in pairs]
    return {"embed": embed, "blocks": blocks, "head": head}


BY_BLOCK = tree(2.0, [0.5, 0.25], [0.5, 0.25], 1.0)
RULES = {"^embed": 2.0, r"blocks\.0": 0.5, "blocks": 0.25}


@pytest.mark.parametrize(
    "given",
    [
        RULES,
        types.MappingProxyType(RULES),
        list(RULES.items()),
        {re.compile(key): value for key, value in RULES.items()},
        {"^embed": 2.0, r"blocks\.0": np.float32(0.5), re.compile("blocks"): 0.25},
        BY_BLOCK,
        {"embed": 2.0, "blocks": [0.5, 0.25], "head": 1.0},
        {"embed": 2.0, "blocks": [0.5, {"attention": 0.25, "norm": 0.25}], "head": 1},
        lambda params: jax.tree.map(lambda m, _: m, BY_BLOCK, params),
    ],
    ids="mapping proxy pairs patterns mixed tree prefix inner function".split(),
)
def test_every_form(given):
    found = rate_multipliers(given, PARAMS)
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    assert jax.tree.leaves(found) == jax.tree.leaves(BY_BLOCK)


def test_no_match_is_one_and_the_first_match_applies():
    found = rate_multipliers({"query": 3.0, "blocks": 2.0}, PARAMS)
    assert found == tree(1.0, [3.0, 3.0], [2.0, 2.0], 1.0)
    assert rate_multipliers({}, PARAMS) == tree(1.0, [1.0, 1.0], [1.0, 1.0], 1.0)
    assert rate_multipliers(2.0, PARAMS) == tree(2.0, [2.0, 2.0], [2.0, 2.0], 2.0)
    assert rate_multipliers(None, PARAMS) is None


def test_a_mapping_with_the_parameters_own_keys_is_a_tree():
    params = {"w": jnp.ones(2), "w2": {"b": jnp.ones(2)}, "b": jnp.ones(2)}
    given = {"w": 2.0, "w2": 3.0, "b": 4.0}
    assert rate_multipliers(given, params) == {"w": 2.0, "w2": {"b": 3.0}, "b": 4.0}
    assert rate_multipliers({"w2": 3.0, "b": 4.0}, params)["w2"] == {"b": 3.0}


def test_a_tree_has_none_where_the_parameters_have_none():
    params = {"w": jnp.ones((2, 3)), "settings": None}
    given = {"w": 2.0, "settings": None}
    assert rate_multipliers(given, params) == given
    orscale(1e-3, learning_rate_multipliers=given).init(params)


def test_masked_parts():
    masked = PARAMS | {"blocks": optax.MaskedNode()}
    expected = {"embed": 2.0, "blocks": optax.MaskedNode(), "head": 1.0}
    for given in RULES, BY_BLOCK, {"embed": 2.0, "blocks": 0.5, "head": 1.0}:
        assert rate_multipliers(given, masked) == expected
    for empty in (), {}, None:
        assert rate_multipliers(RULES, empty) == empty


def test_states_of_flax_and_classes():
    state = nnx.state(nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))]), nnx.Param)
    by_class = {"bias": 3.0}

    def of_classes(params):
        return jax.tree.map(lambda c: by_class.get(c, 1.0), layer_classes(params))

    for given in {"bias": 3.0}, of_classes:
        found = rate_multipliers(given, unbox(state))
        assert jax.tree.leaves(found) == [3.0, 1.0]  # The bias comes first.


SCHEDULE = optax.constant_schedule(1.0)
READ_ONCE = (
    {"w": 0.5}.items(),
    zip(["w"], [0.5], strict=True),
    (pair for pair in [("w", 0.5)]),
    map(tuple, [("w", 0.5)]),
    filter(None, [("w", 0.5)]),
    iter([("w", 0.5)]),
    {"w": 0.5}.keys(),
)


def name_of(value):
    """The name of a case, without addresses, which differ from process to process."""
    return re.sub(r"<(.*?) at 0x\w+>", r"\1", str(value))[:60]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"^embed": 0.0}, r"learning_rate_multipliers\['\^embed'\]=0.0 is not valid"),
        ({"^embed": -1}, "pass a positive finite number"),
        ({"^embed": np.inf}, r"\['\^embed'\]=inf"),
        ({"^embed": np.nan}, r"\['\^embed'\]=nan"),
        ({"^embed": 1e39}, r"\['\^embed'\]=1e\+39"),
        ({"^embed": 1e-46}, r"\['\^embed'\]=1e-46"),
        ({"^embed": True}, r"\['\^embed'\]=True"),
        ({"^embed": "2"}, r"\['\^embed'\]='2'"),
        ({"^embed": SCHEDULE}, "a group of optax.partition"),
        ({"^embed": jnp.bfloat16(1.1)}, "has dtype bfloat16, which rounds it"),
        ({"^embed": np.array([1.0, 0.0])}, r"\['\^embed'\]=array"),
        ([("^embed", 0)], r"\['\^embed'\]=0 is not valid"),
        ([("(", 1.0)], "not valid"),
        (BY_BLOCK | {"head": -1.0}, "learning_rate_multipliers of 'head'=-1.0"),
        (-1.0, "learning_rate_multipliers=-1.0 is not valid"),
        ("embed", "pass a mapping from regular expressions"),
        *((pairs, r"multipliers=.* pass a dict or a list") for pairs in READ_ONCE),
    ],
    ids=name_of,
)
def test_values_are_refused_at_once(given, message):
    with pytest.raises(ValueError, match=message):
        orscale(1e-3, learning_rate_multipliers=given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"^embed": None}, r"learning_rate_multipliers\['\^embed'\]=None"),
        ({"embxd": 2.0}, "'embxd' of learning_rate_multipliers matches no parameter"),
        ({"blocks": 2.0, "query": 1.0}, "'query' of learning_rate_mul.*decides nothing"),
        ({"(": 2.0}, "an expression of learning_rate_multipliers='\\(' is not valid"),
        ({"blocks": {"0": 2.0}}, "does not fit: pass a mapping from regular"),
        (lambda _: {"embed": 0.0}, "learning_rate_multipliers of 'embed'=0.0|\\['embed'"),
        (
            {"query": np.ones(4)},
            r"'blocks.0.attention.query' of shape \(4, 4\) has shape",
        ),
        ({"norm": np.ones(3)}, r"'blocks.0.norm' of shape \(4,\) has shape \(3,\)"),
    ],
    ids=name_of,
)
def test_what_does_not_fit_is_refused_by_init(given, message):
    optimizer = orscale(1e-3, learning_rate_multipliers=given)
    with pytest.raises(ValueError, match=message):
        optimizer.init(PARAMS)


def test_traced_values_pass():
    @jax.jit
    def step(factor):
        optimizer = orscale(1.0, learning_rate_multipliers={"head": factor})
        return optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)[0]["head"]

    grow = functools.partial(jnp.max, axis=None)
    np.testing.assert_allclose(grow(step(3.0) / step(1.0)), 3.0, rtol=1e-6)


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    ("numbers", "shape"),
    [
        (Dims(0, 2), (4, 3, 6)),
        (Dims(0, 2), (6, 3, 4)),
        (BlockDimensionNumbers(0, 2, block_axis=0, blocks=2), (4, 3, 6)),
        (BlockDimensionNumbers(0, 2, block_axis=2, blocks=(2, 4)), (4, 3, 6)),
        (None, (4, 3, 6)),
    ],
    ids=["wide", "tall", "blocks of rows", "unequal blocks", "AdamW"],
)
def test_layers_along_any_axis_have_their_own_rates(numbers, shape):
    random = np.random.default_rng(0)
    params, grads = (jnp.asarray(random.normal(size=shape)) for _ in range(2))
    factors = np.array([0.25, 1.0, 2.0], np.float32).reshape(1, 3, 1)

    def update(multipliers):
        optimizer = orscale(
            0.1,
            weight_dimension_numbers={"w": numbers},
            learning_rate_multipliers=multipliers,
        )
        state = optimizer.init({"w": params})
        return optimizer.update({"w": grads}, state, {"w": params})[0]["w"]

    found = update({"w": factors})
    np.testing.assert_allclose(found, update(None) * factors, rtol=1e-6)


IN_MATRICES = [
    (leaves.SHAPES[k], leaves.DIMENSIONS[k], (8,)) for k in ("middle", "fused")
]
IN_MATRICES += [(leaves.SHAPES["experts"], leaves.DIMENSIONS["experts"], (3,))]
IN_MATRICES += [
    ((4, 3, 6), Dims(0, 2), shape) for shape in [(4, 1, 1), (1, 2, 1), (1, 3), (4, 3, 6)]
]


@pytest.mark.parametrize("shape, numbers, given", IN_MATRICES)
def test_arrays_on_axes_of_matrices_are_refused(shape, numbers, given):
    """An axis is one of the matrices, or has another length."""
    optimizer = orscale(
        1e-3,
        weight_dimension_numbers={"w": numbers},
        learning_rate_multipliers={"w": np.ones(given)},
    )
    with pytest.raises(ValueError, match=r"must be batch axes of m|broadcasts to \(1, 3"):
        optimizer.init({"w": jnp.ones(shape)})
