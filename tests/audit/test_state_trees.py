"""Which optimizer has each parameter: against assignments and bytes by hand."""

import dataclasses
import functools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from examples.study import controls
from orscale_jax import by_path, describe, family, muon, orscale
from orscale_jax.trees.nodes import nodes_of

PARAMS = {
    "w": jnp.ones((4, 6)),
    "conv": jnp.ones((2, 3, 4)),
    "head": {"w": jnp.ones((4, 4)), "scale": jnp.ones(4)},
}
LABELS = {"w": "m", "conv": "a", "head": {"w": "z", "scale": "a"}}


def groups(**others):
    return {"m": orscale(0.1), "a": optax.adamw(0.1), "z": optax.set_to_zero(), **others}


def part(labels=LABELS, **others):
    return optax.partition(groups(**others), labels)


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rows(optimizer, params=PARAMS, numbers=None):
    """Rule and label by path; every byte is counted once."""
    description = describe(params, numbers, optimizer=optimizer)
    state = jax.eval_shape(optimizer.init, params)
    total = description.totals["all"].state_bytes
    assert total == size(state)
    assert total == description.shared_bytes + sum(
        row.state_bytes for row in description.rows
    )
    injected = nodes_of(state, optax.InjectStatefulHyperparamsState)
    of_optax = sum(size(node.hyperparams) for node in injected)
    assert description.shared_bytes - of_optax < 100
    return {row.path: (row.rule, row.label) for row in description.rows}


PARTED = {
    "w": ("matrix", "m"),
    "conv": ("other", "a"),
    "head.w": ("stateless", "z"),
    "head.scale": ("other", "a"),
}
OURS = {"w": True, "conv": False, "head": False}
CASES = {
    "partition": (part(), PARTED),
    "multi_transform": (optax.multi_transform(groups(), LABELS), PARTED),
    "labels are a function": (part(lambda params: LABELS), PARTED),
    "labels are a prefix": (
        part({"w": "m", "conv": "a", "head": "a"}),
        PARTED | {"head.w": ("other", "a")},
    ),
    "chain": (optax.chain(optax.clip_by_global_norm(1.0), part()), PARTED),
    "named_chain": (optax.named_chain(("mu", optax.clip(1.0)), ("nu", part())), PARTED),
    "apply_if_finite": (optax.apply_if_finite(part(), 3), PARTED),
    "MultiSteps": (optax.MultiSteps(part(), 2), PARTED),
    "injected inside": (
        part(
            m=optax.inject_hyperparams(orscale)(0.1),
            a=optax.inject_hyperparams(optax.adamw)(0.1),
        ),
        PARTED,
    ),
    "int labels": (
        optax.partition(
            {0: orscale(0.1), 1: optax.adamw(0.1)},
            {"w": 0, "conv": 1, "head": {"w": 1, "scale": 0}},
        ),
        {
            "w": ("matrix", "0"),
            "conv": ("other", "1"),
            "head.w": ("other", "1"),
            "head.scale": ("adamw", "0"),
        },
    ),
    "a group without parameters": (part(empty=muon(0.1)), PARTED),
    "the innermost group": (
        part(
            m=optax.partition({"x": muon(0.1), "y": optax.sgd(0.1)}, lambda _: "x"),
            z=optax.chain(optax.clip(1.0), optax.partition(groups(), lambda _: "z")),
        ),
        # What keeps no state is told by elimination, as far as that goes.
        PARTED | {"w": ("matrix", "m/x"), "head.w": ("stateless", "m/y or z/z")},
    ),
    "two groups without state": (
        part(sgd=optax.sgd(0.1)),
        PARTED | {"head.w": ("stateless", "sgd or z")},
    ),
    "selective_transform": (
        optax.transforms.selective_transform(
            orscale(0.1), freeze_mask={"w": False, "conv": True, "head": False}
        ),
        {
            "w": ("matrix", "train"),
            "conv": ("stateless", "freeze"),
            "head.w": ("adamw", "train"),  # An output head.
            "head.scale": ("adamw", "train"),
        },
    ),
    "conditionally_mask": (
        optax.conditionally_mask(part(), lambda step: step < 9),
        PARTED,
    ),
    "schedules and bfloat16": (
        part(
            m=orscale(
                optax.linear_schedule(0.1, 0.0, 9),
                weight_decay=optax.linear_schedule(0.1, 0.0, 9),
                mu_dtype=jnp.bfloat16,
            )
        ),
        PARTED,
    ),
    "groups that are called like ours": (
        optax.partition(
            {"matrix": orscale(0.1), "adamw": optax.adamw(0.1)},
            {"w": "matrix", "conv": "adamw", "head": "matrix"},
        ),
        {
            "w": ("matrix", "matrix"),
            "conv": ("other", "adamw"),
            "head.w": ("adamw", "matrix"),
            "head.scale": ("adamw", "matrix"),
        },
    ),
    "masked": (
        optax.masked(orscale(0.1), OURS),
        {
            "w": ("matrix", ""),
            "conv": ("stateless", ""),
            "head.w": ("stateless", ""),
            "head.scale": ("stateless", ""),
        },
    ),
    "two masks": (
        optax.chain(
            optax.masked(orscale(0.1), OURS),
            optax.masked(optax.adamw(0.1), jax.tree.map(lambda on: not on, OURS)),
        ),
        {
            "w": ("matrix", ""),
            "conv": ("other", ""),
            "head.w": ("other", ""),
            "head.scale": ("other", ""),
        },
    ),
    "adafactor": (optax.adafactor(0.1, 2), dict.fromkeys(PARTED, ("other", ""))),
    "optax's adamw": (optax.adamw(0.1), dict.fromkeys(PARTED, ("other", ""))),
    "sgd": (optax.sgd(0.1), dict.fromkeys(PARTED, ("stateless", ""))),
    "sgd with momentum": (optax.sgd(0.1, 0.9), dict.fromkeys(PARTED, ("other", ""))),
    "several arrays a parameter": (optax.sm3(0.1), dict.fromkeys(PARTED, ("other", ""))),
    "optax's muon": (
        optax.contrib.muon(0.1),
        {
            "w": ("other", "muon"),
            "conv": ("other", "adam"),
            "head.w": ("other", "muon"),
            "head.scale": ("other", "adam"),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_who_has_what(name):
    optimizer, expected = CASES[name]
    assert rows(optimizer) == expected


@pytest.mark.parametrize("build", [family.normuon, controls.momentum_denominator])
def test_ours_are_told_by_their_states(build):
    numbers = {"w": Dims(0, 1), "conv": Dims(1, 2), "head": None}
    found = rows(build(0.1, weight_dimension_numbers=numbers), numbers=numbers)
    assert found == {
        "w": ("matrix", ""),
        "conv": ("matrix", ""),
        "head.w": ("adamw", ""),
        "head.scale": ("adamw", ""),
    }


def test_the_wrapper_of_nnx():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, orscale(0.1), wrt=nnx.Param)
    description = describe(nnx.state(model, nnx.Param), optimizer=optimizer)
    assert [row.rule for row in description.rows] == ["adamw", "matrix"]


class TestTheTable:
    """Totals, plans and columns follow the optimizer."""

    def test_totals_and_plan(self):
        description = describe(PARAMS, optimizer=part())
        leaves = {name: total.leaves for name, total in description.totals.items()}
        assert leaves == {
            "matrix": 1, "adamw": 0, "other": 2, "stateless": 1, "shared": 0, "all": 4,
        }  # fmt: skip
        assert [stack.names for stack in description.stacks()] == [("w",)]
        assert describe(PARAMS, optimizer=optax.adamw(0.1)).stacks() == []
        assert "Newton–Schulz" not in str(describe(PARAMS, optimizer=optax.adamw(0.1)))

    def test_the_label_has_a_column_where_there_is_one(self):
        description = describe(PARAMS, optimizer=part())
        for text in (str(description), description.to_csv(), description._repr_html_()):
            assert "label" in text
        # Also in a selection whose rows have none.
        assert "label" in str(description.select("^w$"))
        for optimizer in (None, orscale(0.1)):
            plain = describe({"w": PARAMS["w"]}, optimizer=optimizer)
            assert "label" not in str(plain) + plain.to_csv()

    def test_numbers_of_the_whole_model(self):
        """Those of another optimizer's parameters do not matter."""
        numbers = {"w": Dims(0, 1), "conv": Dims(1, 2), "head": None}
        assert rows(part(), numbers=numbers) == PARTED
        with pytest.raises(ValueError, match="'w' is adamw here and matrix in the opt"):
            rows(part(), numbers=numbers | {"w": None})


@pytest.mark.parametrize(
    "optimizer, params",
    [
        (optax.flatten(orscale(0.1)), PARAMS),
        (optax.flatten(orscale(0.1)), {"w": jnp.ones((4, 6))}),
        (optax.flatten(orscale(0.1)), jnp.ones((4, 6))),
        (optax.MultiSteps(optax.flatten(orscale(0.1)), 2), PARAMS),
        (optax.flatten(optax.adamw(0.1)), PARAMS),
        (optax.flatten(optax.inject_hyperparams(muon)(0.1)), PARAMS),
        (part(a=optax.flatten(optax.adamw(0.1))), PARAMS),
    ],
)
def test_vectors_of_several_parameters_are_refused(optimizer, params):
    with pytest.raises(ValueError, match=r"optax.flatten does that: .* Take it away"):
        describe(params, optimizer=optimizer)


class Named(NamedTuple):
    mu: Any
    count: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["nu", "count"], meta_fields=[]
)
@dataclasses.dataclass
class Fields:
    nu: Any
    count: Any


W, B = jnp.ones((3, 5)), jnp.ones(5)


@pytest.mark.parametrize(
    "params",
    [
        {"w1": W, "b1": B, "w2": W, "b2": B},  # The names of hyperparameters.
        {"mu": {"w": W}, "w": W, "count": B},
        Named(Named(W, B), W),
        Fields({"mu": W}, Fields(W, B)),
        (W, (B, W)),
        [W, B, W, B],
        (W, B, B),  # As long as AdamW's chain.
        {"learning_rate": B, "hyperparams": {"count": W}, "inner_state": W},
    ],
)
def test_names_and_containers_like_those_of_a_state(params):
    """Bytes by hand: two moments of AdamW; momentum, six numbers and a flag of ours."""
    flat = jax.tree.leaves(params)
    for optimizer, rule in [
        (optax.inject_hyperparams(optax.adamw)(0.1), "other"),
        (optax.MultiSteps(optax.inject_hyperparams(orscale)(0.1), 2), "matrix"),
    ]:
        found = describe(params, optimizer=optimizer).rows
        accumulated = 4 if rule == "matrix" else 0
        for row, leaf in zip(found, flat, strict=True):
            matrix = rule == "matrix" and leaf.ndim == 2
            kept = (4 * leaf.size + 25) if matrix else 8 * leaf.size
            assert row.state_bytes == kept + accumulated * leaf.size
            assert row.rule == ("adamw" if rule == "matrix" and not matrix else rule)


WRAPPERS = {
    "clip": lambda o: optax.chain(optax.clip(1.0), o, optax.add_decayed_weights(0.1)),
    "finite": lambda o: optax.apply_if_finite(o, 2),
    "steps": lambda o: optax.MultiSteps(o, 2),
    "masked": lambda o: optax.masked(o, True),
    "named": lambda o: optax.named_chain(("trace", o), ("scale", optax.scale(1.0))),
    "parted": lambda o: optax.partition({"all": o}, lambda _: "all"),
}
RULES = {
    "ours": (orscale(0.1), {2: "matrix", 1: "adamw"}, {2: 4, 1: 8}),
    "adam": (optax.adam(0.1), dict.fromkeys((1, 2), "other"), {2: 8, 1: 8}),
    "momentum": (optax.sgd(0.1, 0.9), dict.fromkeys((1, 2), "other"), {2: 4, 1: 4}),
    "frozen": (optax.set_to_zero(), dict.fromkeys((1, 2), "stateless"), {2: 0, 1: 0}),
}
LEAVES = {"a": (3, 4), "b": (5,), "c": (4, 4), "d": (2, 3), "e": (7,)}


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    st.lists(st.sampled_from([*RULES]), min_size=len(LEAVES), max_size=len(LEAVES)),
    st.lists(st.sampled_from([*WRAPPERS]), max_size=3, unique=True),
    st.booleans(),
)
def test_any_assignment_in_any_wrappers(chosen, wrappers, nested):
    """The rows are the assignment, and the bytes those of each optimizer."""
    params = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in LEAVES.items()}
    labels = dict(zip(LEAVES, chosen, strict=True))
    if nested:
        params = {"model": [params, {"f": params["b"]}]}
        labels = {"model": [labels, {"f": chosen[0]}]}
    optimizer = optax.partition({name: rule[0] for name, rule in RULES.items()}, labels)
    for name in wrappers:
        optimizer = WRAPPERS[name](optimizer)
    # The labels of the group "all" stand before those inside.
    before = "all/" if "parted" in wrappers else ""
    found = describe(params, optimizer=optimizer).rows
    for row, label in zip(found, jax.tree.leaves(labels), strict=True):
        _, rules, entries = RULES[label]
        rank = len(row.shape)
        assert row.rule == rules[rank]
        if "masked" in wrappers and row.rule == "stateless":
            # The mask may have left it out, for all that the state tells.
            assert row.label.split(" or ")[1:] == [before + label]
        else:
            assert row.label == before + label
        matrix = 25 * (row.rule == "matrix")
        summed = 4 * row.parameters * ("steps" in wrappers)
        assert row.state_bytes == entries[rank] * row.parameters + matrix + summed


def test_names_that_print_alike_are_two_rows():
    params = {"a.b": jnp.ones((2, 3)), "a": {"b": jnp.ones((3, 4))}, "c": jnp.ones(2)}
    description = describe(params, optimizer=orscale(0.1))
    assert [row.path for row in description.rows] == ["a.b", "'a.b'", "c"]
    assert [row.m for row in description.select("'").rows] == [2]
    assert {stack.names for stack in description.stacks()} == {("a.b",), ("'a.b'",)}
    assert description.select("b").totals["all"].leaves == 2
    assert description.to_csv().count("\n") == 4
    # As one key without a counterpart, it keeps its name, and by_path finds it.
    numbers = by_path({r"^a\.b$": "adamw"})
    assert [row.rule for row in describe({"a.b": W}, numbers).rows] == ["adamw"]
