"""Dimension numbers by path."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import by_path, muon, orscale
from orscale_jax.diagnostics import layer_names
from orscale_jax.equinox import dimension_numbers

PLAIN, W = Dims(0, 1), jnp.ones((2, 3))
QUERY, STACK, CONV = Dims(0, (1, 2)), Dims(-2, -1), Dims((0, 1, 2), 3)
RULES = {
    r"query|key": QUERY,
    r"router|\.gate\.": "adamw",
    r"experts\.(up|down)$": STACK,
    r"^stem\.": CONV,
    r"lm_head": "matrix",
}


def transformer():
    block = {
        "attention": {"query": jnp.ones((6, 2, 3)), "out": jnp.ones((6, 6))},
        "router": jnp.ones((6, 4)),
        "experts": {"up": jnp.ones((4, 6, 8)), "down": jnp.ones((4, 8, 6))},
        "norm": {"scale": jnp.ones(6)},
    }
    return {
        "stem": {"kernel": jnp.ones((3, 3, 2, 6))},
        "embed": jnp.ones((10, 6)),
        "blocks": [block, block],
        "lm_head": {"kernel": jnp.ones((6, 10))},
    }


BLOCK = {
    "attention": {"query": QUERY, "out": PLAIN},
    "router": None,
    "experts": {"up": STACK, "down": STACK},
    "norm": {"scale": None},
}
EXPECTED = {
    "stem": {"kernel": CONV},
    "embed": None,
    "blocks": [BLOCK, BLOCK],
    "lm_head": {"kernel": PLAIN},
}


@pytest.mark.parametrize("pairs", [dict, list, tuple, iter])
def test_a_transformer(pairs):
    rules = RULES if pairs is dict else pairs(RULES.items())
    numbers = by_path(rules)
    assert numbers(transformer()) == EXPECTED
    assert numbers(jax.eval_shape(transformer)) == EXPECTED  # A second call, too.


def test_the_first_expression_applies():
    tree = {"a": {"kernel": jnp.ones((2, 3))}, "b": {"kernel": jnp.ones((2, 3))}}
    numbers = by_path([(re.compile("A", re.I), "adamw"), ("kernel", Dims(1, 0))])
    assert numbers(tree) == {"a": {"kernel": None}, "b": {"kernel": Dims(1, 0)}}
    one = by_path({"": "adamw"})
    assert one(jnp.ones((2, 3))) is None  # The path of the only leaf is empty.


@pytest.mark.parametrize(
    "otherwise",
    [
        {"a": Dims(1, 2), "b": None, "c": Dims(1, 0)},
        {"a": {"x": Dims(1, 2), "y": Dims(1, 2)}, "b": None, "c": Dims(1, 0)},
        lambda tree: {"a": Dims(1, 2), "b": None, "c": Dims(1, 0)},
    ],
)
def test_otherwise(otherwise):
    tree = {
        "a": {"x": jnp.ones((2, 3, 4)), "y": jnp.ones(3)},
        "b": jnp.ones((2, 3)),
        "c": jnp.ones((2, 3)),
    }
    found = by_path({"y": "adamw"}, otherwise=otherwise)(tree)
    assert found == {"a": {"x": Dims(1, 2), "y": None}, "b": None, "c": Dims(1, 0)}


def test_otherwise_is_the_default_rule():
    tree = {"a": jnp.ones((2, 3)), "wte": jnp.ones((2, 3)), "c": jnp.ones((2, 3, 4))}
    for otherwise in (None, lambda _: None):
        found = by_path({"c": "adamw"}, otherwise=otherwise)(tree)
        assert found == {"a": PLAIN, "wte": None, "c": None}
    with pytest.raises(ValueError, match=r"^otherwise must be a tree.*structure"):
        by_path({"c": "adamw"}, otherwise={"x": None})(tree)


def test_no_callable_sees_the_placeholder_of_map_params():
    params = {"w": jnp.ones((3, 4, 4))}
    for given in (by_path({"w": STACK}), lambda tree: dict.fromkeys(tree, STACK)):
        optimizer = orscale(0.1, weight_dimension_numbers=given)
        optax.tree.map_params(optimizer, lambda leaf: leaf + 1, optimizer.init(params))


def test_an_expression_that_matches_nothing():
    with pytest.raises(ValueError, match="rooter") as caught:
        by_path(RULES | {"rooter": "adamw"})(transformer())
    message = str(caught.value)
    assert "expression 'rooter' of by_path matches no parameter" in message
    assert "'blocks.0.router'" in message and "embed" not in message
    assert message.count("'") == 2 + 5 * 2  # Five of thirteen paths.


def test_a_function_taken_for_a_schedule():
    injected = optax.inject_hyperparams(orscale)
    model = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    for numbers in (by_path({"weight": "matrix"}), dimension_numbers(model)):
        with pytest.raises(ValueError, match=r"a step count.* static_args="):
            injected(1e-3, weight_dimension_numbers=numbers).init(model)


def test_masked_leaves_count_as_matched():
    numbers = by_path({"gate": "adamw", "up": STACK})
    tree = {"gate": optax.MaskedNode(), "up": jnp.ones((2, 3, 4)), "out": None}
    assert numbers(tree) == {"gate": optax.MaskedNode(), "up": STACK, "out": None}
    for nothing in ({}, optax.MaskedNode(), {"other": optax.MaskedNode()}):
        assert numbers(nothing) == nothing


def test_all_refused_leaves_are_listed():
    tree = transformer()
    with pytest.raises(ValueError, match="ambiguous") as caught:
        by_path({"stem": CONV, "router": "adamw"})(tree)
    assert str(caught.value).startswith(
        "6 parameters\n"
        "  'blocks.*.attention.query' × 2 of shape (6, 2, 3)\n"
        "  'blocks.*.experts.down' × 2 of shape (4, 8, 6)\n"
        "  'blocks.*.experts.up' × 2 of shape (4, 6, 8)\n"
        "are ambiguous: "
    )
    with pytest.raises(ValueError, match="matrix") as caught:
        by_path(RULES | {"experts.*": "matrix", "norm": "matrix", "o": "matrix"})(
            {"experts": jnp.ones((2, 3, 4)), "norm": jnp.ones(3)} | tree
        )
    assert "'experts.*' of by_path says \"matrix\"" in str(caught.value)
    assert "parameter 'experts' of shape (2, 3, 4) is not of two" in str(caught.value)
    assert "norm" not in str(caught.value)


@pytest.mark.parametrize(
    "rules, leaf, words",
    [
        ({"w": "matrix"}, jnp.ones(3), r"'w' of by_path says \"matrix\".*\(3,\).*adamw"),
        ({"w": Dims(0, 3)}, W, r"expression 'w': .*'w' of shape.*2 axes"),
        ({"w": "matrix"}, W.astype(int), r"expression 'w': .*dtype int32"),
        ({"W": "adamw"}, W, "'W' of by_path matches no parameter"),
        ({"": "matrix", "w": "adamw"}, W, "'w' of by_path decides nothing.*as '.*'w'"),
        ([("w", "matrix"), ("w", "adamw")], W, "'w' of by_path decides nothing"),
    ],
)
def test_rules_that_do_not_fit_their_leaf(rules, leaf, words):
    with pytest.raises(ValueError, match=words):
        by_path(rules)({"w": leaf})


@pytest.mark.parametrize(
    "rules, words",
    [
        ("matrix", "rules='matrix' is not valid: pass a mapping"),
        (3, "rules=3 is not valid"),
        ([("a", "adamw", 1)], "is not valid: pass a mapping, or pairs"),
        (["ab"], "is not valid: pass a mapping, or pairs"),
        ({"(": "adamw"}, r"rules='\(' is not valid: missing \)"),
        ({b"a": "adamw"}, "rules=b'a' is not valid: pass a string"),
        ({re.compile(b"a"): "adamw"}, "is not valid: pass a string"),
        ({"a": "adam"}, r"rules\['a'\]='adam' is not valid: pass \"matrix\", \"adamw\""),
        ({"a": None}, r"rules\['a'\]=None is not valid"),
        ({"a": (0, 1)}, r"rules\['a'\]=\(0, 1\) is not valid"),
    ],
)
def test_invalid_rules_are_refused_at_once(rules, words):
    with pytest.raises(ValueError, match=words):
        by_path(rules)


def alike(dotted, nested):
    """Two leaves of these shapes that print alike, as a.b."""
    return {"a.b": jnp.ones(dotted), "a": {"b": jnp.ones(nested)}, "c": jnp.ones((4, 4))}


@pytest.mark.parametrize("swap", [False, True])
def test_leaves_that_print_alike_have_rules_of_their_own(swap):
    params = alike(*[(8, 16), (8,)][:: -1 if swap else 1])
    own = {"a.b": PLAIN, "a": {"b": None}}
    if swap:
        own = {"a.b": None, "a": {"b": PLAIN}}
    assert by_path({"c": "adamw"})(params) == own | {"c": None}
    for given, others in ((None, {(4, 4)}), (own | {"c": None}, set())):
        optimizer = muon(1e-3, weight_dimension_numbers=given)
        momentum = optax.tree.get(jax.eval_shape(optimizer.init, params), "trace")
        assert {leaf.shape for leaf in jax.tree.leaves(momentum)} == others | {(8, 16)}


def test_a_rule_for_leaves_that_print_alike():
    params = alike((8, 16), (4, 8, 6))
    both = {"a.b": STACK, "a": {"b": STACK}, "c": PLAIN}
    assert by_path({r"a\.b": STACK})(params) == both
    others = {"a.b": PLAIN, "a": {"b": STACK}, "c": PLAIN}
    assert by_path({"c": "adamw"}, otherwise=others)(params) == others | {"c": None}
    message = r"parameter 'a\.b' of shape \(4, 8, 6\) is not of two axes"
    with pytest.raises(ValueError, match=message):
        by_path({r"a\.b": "matrix"})(params)
    masked = params | {"a": {"b": optax.MaskedNode()}}
    numbers = by_path({r"a\.b": "matrix"})(masked)
    assert (numbers["a.b"], numbers["c"]) == (PLAIN, PLAIN)
    names = layer_names(params | {"a.b": params["c"]})
    assert names == {"a.b": "a.b", "a": {"b": "a.b"}, "c": "c"}
