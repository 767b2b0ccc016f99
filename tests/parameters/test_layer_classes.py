"""The classes of layers, by the paths of models of many libraries."""

import csv
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from orscale_jax import describe
from orscale_jax.parameters.layer_classes import layer_classes


def of_paths(*paths, shape=(4, 4)):
    """The classes of parameters with these paths."""
    return layer_classes(
        {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path in paths}
    )


# Names of parameters as libraries and published models have them, with their classes.
TABLE = pathlib.Path(__file__).parents[1] / "data" / "layer_classes.csv"
MODELS = {}
for row in csv.DictReader(TABLE.read_text().splitlines()):
    MODELS.setdefault(row["model"], {})[row["path"]] = row["class"]


@pytest.mark.parametrize("name", MODELS)
def test_classes_by_name_and_the_default_rule(name):
    """They agree, but a router's "classifier" or "logits" takes AdamW as well."""
    outside = {"embedding", "head", "norm", "scale", "bias"}
    tree = {path: jax.ShapeDtypeStruct((4, 4), jnp.float32) for path in MODELS[name]}
    for row in describe(tree).rows:
        assert row.layer_class == MODELS[name][row.path]
        router = row.layer_class == "router" and re.search("classifier|logits", row.path)
        assert (row.rule == "adamw") == (row.layer_class in outside or bool(router))


def test_a_gate_by_its_neighbours():
    def gate(*beside, above="mlp"):
        return of_paths(*(f"{above}.{name}" for name in ("gate", *beside)))[
            f"{above}.gate"
        ]

    assert gate("up", "down") == gate() == "mlp gate"
    assert gate("experts.up", "experts.down") == "router"
    assert gate("experts.up", "shared_experts.up", above="block") == "router"
    assert gate("up", "down", above="moe") == "routed expert gate"
    assert gate("wi_0", "wi_1", "wo", above="moe") == gate(above="moe") == "router"
    assert gate("gate_up", "down", above="moe") == "router"
    assert gate("router", "up", "down") == "routed expert gate"
    assert gate("router", "experts.w1", "up_proj", "w2", above="") == "router"
    assert gate("query", above="attention") == "attention gate"
    assert gate("value", above="cell") == "other"
    flat = of_paths("expert_gate", "expert_up", "shared_expert_gate", "shared_expert_up")
    kinds = ["routed expert", "shared expert"]
    roles = ["gate", "up"]
    assert list(flat.values()) == [f"{kind} {role}" for kind in kinds for role in roles]


def test_w1_to_w3_by_their_shapes():
    def classes(w1, w2, w3):
        shapes = {"w1": w1, "w2": w2, "w3": w3}
        layers = layer_classes({"mlp": {k: jnp.ones(shapes[k]) for k in shapes}})["mlp"]
        return " ".join(layer.split()[-1] for layer in layers.values())

    assert classes((2, 6), (6, 2), (2, 6)) == "gate down up"
    assert classes((2, 6), (2, 6), (6, 2)) == "gate up down"
    assert classes((4, 4), (4, 4), (4, 4)) == "gate down up"
    masked = {"w1": optax.MaskedNode(), "w2": optax.MaskedNode(), "w3": jnp.ones((2, 6))}
    assert layer_classes({"mlp": masked})["mlp"]["w3"] == "mlp up"


def test_a_dense_mlp_beside_a_router_and_its_experts():
    expected = {
        "0.router": "router",
        "0.experts.up": "routed expert up",
        "0.up": "mlp up",
    }
    assert of_paths(*expected) == expected
    del expected["0.experts.up"]
    assert of_paths(*expected) == expected | {"0.up": "routed expert up"}


# Trees and rules


def test_masked_leaves_and_empty_trees():
    masked = optax.MaskedNode()
    params = {"gate": jnp.ones((4, 2)), "experts": {"up": masked}, "b": None}
    assert layer_classes(params) == {
        "gate": "router",
        "experts": {"up": masked},
        "b": None,
    }
    assert layer_classes(params, {"experts": "mine"})["gate"] == "router"
    for nothing in ({}, masked, {"a": None}):
        assert layer_classes(nothing) == nothing
    assert layer_classes(jnp.ones((2, 3))) == "other"


@pytest.mark.parametrize("pairs", [dict, list, tuple, iter])
def test_rules_come_first_and_in_order(pairs):
    rules = {r"1\.query": "last query", re.compile("query"): "query", "^scan": "ssm"}
    params = {f"{i}.query": jnp.ones((2, 2)) for i in range(2)}
    params |= {"scan": jnp.ones((2, 2)), "lm_head": jnp.ones((2, 2))}
    given = rules if pairs is dict else pairs(rules.items())
    assert layer_classes(params, given) == {
        "0.query": "query", "1.query": "last query", "lm_head": "head", "scan": "ssm",
    }  # fmt: skip


@pytest.mark.parametrize(
    "rules, words",
    [
        (["up"], "pass a mapping, or pairs, .* to names of classes"),
        ({"up": 3}, r"rules\['up'\]=3 is not valid: pass the name of a class"),
        ({"up": ""}, r"rules\['up'\]='' is not valid: pass the name of a class"),
        ({"rooter": "router"}, r"'rooter' of layer_classes matches no param.*'up'"),
        ([("u", "a"), ("up", "b")], "'up' of layer_classes decides nothing: earlier"),
    ],
)
def test_invalid_rules(rules, words):
    with pytest.raises(ValueError, match=words):
        layer_classes({"router": jnp.ones((2, 2)), "up": jnp.ones((2, 2))}, rules)
