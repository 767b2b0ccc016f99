"""Which optimizer has each parameter: against assignments and bytes by hand."""

from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import by_path, describe, family, muon, orscale
from orscale_jax.trees.nodes import nodes_of
from tests.runs import NUMBERS, tree

PARAMS = {
    "w": jnp.ones((4, 6)),
    "conv": jnp.ones((2, 3, 4)),
    "head": {"w": jnp.ones((4, 4)), "scale": jnp.ones(4)},
}
LABELS = {"w": "m", "conv": "a", "head": {"w": "z", "scale": "a"}}
GROUPS = {"m": orscale(0.1), "a": optax.adamw(0.1), "z": optax.set_to_zero()}
ZERO = jnp.zeros(())


def part(labels=LABELS, **others):
    return optax.partition(GROUPS | others, labels)


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rows(optimizer, params=PARAMS):
    """Rule and label of w, conv, head.w and head.scale; every byte is counted once."""
    description = describe(params, optimizer)
    state = jax.eval_shape(optimizer.init, params)
    total = description.totals["all"].state_bytes
    owned = sum(row.state_bytes for row in description.rows)
    assert total == size(state) == description.shared_bytes + owned
    injected = nodes_of(state, optax.InjectStatefulHyperparamsState)
    assert description.shared_bytes - sum(size(x.hyperparams) for x in injected) < 100
    found = {row.path: f"{row.rule} {row.label}".strip() for row in description.rows}
    return ", ".join(found[name] for name in ("w", "conv", "head.w", "head.scale"))


def by_hand(make):
    """Momentum in a state that has no types of its own."""
    return optax.GradientTransformation(
        lambda params: make(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, state),
    )


PARTED = "matrix m, other a, stateless z, other a"
OTHERS = "other, other, other, other"
OURS = {"w": True, "conv": False, "head": False}
THEIRS = {"w": False, "conv": True, "head": True}
INJECTED = {
    "m": optax.inject_hyperparams(orscale)(0.1),
    "a": optax.inject_hyperparams(optax.adamw)(0.1),
}
INTEGERS = {"w": 0, "conv": 1, "head": {"w": 1, "scale": 0}}
NAMED = {"w": "matrix", "conv": "adamw", "head": "matrix"}
OF_M = optax.partition({"x": muon(0.1), "y": optax.sgd(0.1)}, lambda _: "x")
OF_Z = optax.chain(optax.clip(1.0), part(lambda _: "z"))
SELECTED = optax.transforms.selective_transform(
    orscale(0.1), freeze_mask=THEIRS | {"head": False}
)
MASKED = optax.masked(orscale(0.1), OURS)
CASES = {
    "partition": (part(), PARTED),
    "labels are a function": (part(lambda params: LABELS), PARTED),
    "labels are a prefix": (
        part({"w": "m", "conv": "a", "head": "a"}),
        "matrix m, other a, other a, other a",
    ),
    "injected inside": (part(**INJECTED), PARTED),
    "a group without parameters": (part(empty=muon(0.1)), PARTED),
    "int labels": (
        optax.partition({0: orscale(0.1), 1: optax.adamw(0.1)}, INTEGERS),
        "matrix 0, other 1, other 1, adamw 0",
    ),
    "groups that are called like ours": (
        optax.partition({"matrix": orscale(0.1), "adamw": optax.adamw(0.1)}, NAMED),
        "matrix matrix, other adamw, adamw matrix, adamw matrix",
    ),
    # What keeps no state is told by elimination, as far as that goes.
    "the innermost group": (
        part(m=OF_M, z=OF_Z), "matrix m/x, other a, stateless m/y or z/z, other a",
    ),
    "selective_transform": (
        SELECTED, "matrix train, stateless freeze, adamw train, adamw train",
    ),
    "masked": (MASKED, "matrix, stateless, stateless, stateless"),
    "two masks": (
        optax.chain(MASKED, optax.masked(optax.adamw(0.1), THEIRS)),
        "matrix, other, other, other",
    ),
    "adafactor": (optax.adafactor(0.1, 2), OTHERS),
    "optax's muon": (
        optax.contrib.muon(0.1), "other muon, other adam, other muon, other adam",
    ),
    "a tuple as a state": (by_hand(lambda mu: (ZERO, mu)), OTHERS),
    "a dictionary as a group's": (part(a=by_hand(lambda m: {"n": ZERO, "m": m})), PARTED),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_who_has_what(name):
    optimizer, expected = CASES[name]
    assert rows(optimizer) == expected


def test_ours_are_told_by_their_states():
    numbers = {"w": Dims(0, 1), "conv": Dims(1, 2), "head": None}
    found = rows(family.normuon(0.1, weight_dimension_numbers=numbers))
    assert found == "matrix, matrix, adamw, adamw"


def test_totals_plan_and_label_follow_the_optimizer():
    description = describe(PARAMS, part())
    leaves = {name: total.leaves for name, total in description.totals.items()}
    assert leaves == {
        "matrix": 1, "adamw": 0, "other": 2, "stateless": 1, "shared": 0, "all": 4,
    }  # fmt: skip
    assert [group.names for group in description.plan.groups] == [("w",)]
    for text in (str(description), str(description.select("^w$"))):
        assert "label" in text
    theirs = describe(PARAMS, optax.adamw(0.1))
    assert theirs.plan.groups == () and "Newton–Schulz" not in str(theirs)
    plain = describe({"w": PARAMS["w"]}, orscale(0.1))
    assert "label" not in str(plain)


FLAT = optax.flatten(orscale(0.1))


@pytest.mark.parametrize(
    "optimizer, params",
    [
        (FLAT, jnp.ones((4, 6))),
        (optax.MultiSteps(FLAT, 2), PARAMS),
        (optax.flatten(optax.inject_hyperparams(muon)(0.1)), PARAMS),
        (part(a=optax.flatten(optax.adamw(0.1))), PARAMS),
        (optax.contrib.split_real_and_imaginary(muon(0.1)), {"w": 1j * jnp.ones(4)}),
    ],
)
def test_vectors_of_several_parameters_are_refused(optimizer, params):
    with pytest.raises(
        ValueError, match=r"it trains other arrays, .* Take that wrapper away"
    ):
        describe(params, optimizer)


class Named(NamedTuple):
    mu: Any
    count: Any


W, B = jnp.ones((3, 5)), jnp.ones(5)


@pytest.mark.parametrize(
    "params",
    [
        {"w1": W, "b1": B, "w2": W, "b2": B},  # The names of hyperparameters.
        Named({"mu": W}, Named(W, B)),
        (W, [B, W]),
        (W, B, B),  # As long as AdamW's chain.
        {"learning_rate": B, "hyperparams": {"count": W}, "inner_state": W},
        W,  # A lone array.
    ],
)
def test_names_and_containers_like_those_of_a_state(params):
    """Bytes by hand: two moments of AdamW; momentum, six numbers and a flag of ours."""
    flat = jax.tree.leaves(params)
    adamw = optax.inject_hyperparams(optax.adamw)(0.1)
    ours = optax.MultiSteps(optax.inject_hyperparams(orscale)(0.1), 2)
    pairs = zip(*(describe(params, tx).rows for tx in (adamw, ours)), flat, strict=True)
    for of_adamw, of_ours, leaf in pairs:
        matrix = leaf.ndim == 2
        assert (of_adamw.rule, of_adamw.state_bytes) == ("other", 8 * leaf.size)
        bytes_of_ours = 8 * leaf.size + 28 if matrix else 12 * leaf.size
        found = of_ours.rule, of_ours.state_bytes
        assert found == ("matrix" if matrix else "adamw", bytes_of_ours)


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
    found = describe(params, optimizer).rows
    for row, label in zip(found, jax.tree.leaves(labels), strict=True):
        _, rules, entries = RULES[label]
        rank = len(row.shape)
        assert row.rule == rules[rank]
        if "masked" in wrappers and row.rule == "stateless":
            # The mask may have left it out, for all that the state tells.
            assert row.label.split(" or ")[1:] == [before + label]
        else:
            assert row.label == before + label
        matrix = 28 * (row.rule == "matrix")
        summed = 4 * row.parameters * ("steps" in wrappers)
        assert row.state_bytes == entries[rank] * row.parameters + matrix + summed


def test_names_that_print_alike_are_two_rows():
    params = {"a.b": jnp.ones((2, 3)), "a": {"b": jnp.ones((3, 4))}, "c": jnp.ones(2)}
    description = describe(params, orscale(0.1))
    assert [row.path for row in description.rows] == ["a.b", "'a.b'", "c"]
    assert [row.m for row in description.select("'").rows] == [2]
    names = {group.names for group in description.plan.groups}
    assert names == {("a.b",), ("'a.b'",)}
    assert description.select("b").totals["all"].leaves == 2
    assert description.to_csv().count("\n") == 4
    # As one key without a counterpart, it keeps its name, and by_path finds it.
    numbers = by_path({r"^a\.b$": "adamw"})
    optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
    assert [row.rule for row in describe({"a.b": W}, optimizer).rows] == ["adamw"]


def test_an_audit_inside_of_another_one():
    """Each collects what its own optimizer notes, also where both note equal things."""
    inner = []

    def scales(optimizer):
        return {
            row.path: row.scale for row in describe(tree(0), optimizer=optimizer).rows
        }

    def numbers(params):
        inner.append(scales(muon(0.1, weight_dimension_numbers=NUMBERS)))
        return NUMBERS

    outer = scales(orscale(0.1, consistent_rms=None, weight_dimension_numbers=numbers))
    assert outer == {"w": 1, "stack": 1, "b": None}
    assert inner[0] == {"w": 0.2 * 6**0.5, "stack": 0.2 * 5**0.5, "b": None}
