"""Rows that differ only by numbers in their names are one in print."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from orscale_jax import by_path, convert_state, describe, orscale
from orscale_jax.parameters.dimension_numbers import Unresolved
from orscale_jax.parameters.module_types import resolved
from orscale_jax.trees.names import by_name, merged

EXPERTS = MuonDimensionNumbers(-2, -1)

TWELVE = [f"h.{i}.w" for i in range(12)]


@pytest.mark.parametrize(
    ("names", "keys", "expected"),
    [
        ([], "", []),
        (["up"], "-", ["up"]),
        (["blocks.0.up"], "-", ["blocks.0.up"]),
        (["blocks.0.up", "blocks.1.up"], "--", ["blocks.*.up × 2"]),
        (["b.2.up", "up", "b.10.up"], "---", ["b.*.up × 2", "up"]),
        (["B_0.Dense_0.w", "B_1.Dense_0.w"], "--", ["B_*.Dense_0.w × 2"]),
        (["h0_attn/query.w", "h1_attn/query.w"], "--", ["h*_attn/query.w × 2"]),
        (["0.1", "1.1", "0.0", "1.0"], "----", ["*.* × 4"]),
        # The place of a block is no number of a layer.
        (["w0[0:2]", "w0[2:4]", "w1[0:2]"], "---", ["w*[0:2] × 2", "w0[2:4]"]),
        # Layer 0 has fewer experts than the others.
        (["0.e0", "1.e0", "1.e1", "2.e0", "2.e1"], "-----", ["*.e* × 5"]),
        (["layer_07", "layer_08"], "--", ["layer_* × 2"]),
        (["l_08", "l_09", "l_10", "l_11"], "---+", ["l_{08,09,…} × 3", "l_11"]),
        # Other keys stay apart, and are named.
        (TWELVE, "-----------+", ["h.{0,1,…}.w × 11", "h.11.w"]),
        (TWELVE, "-+--+++++-++", ["h.{0,2,…}.w × 4", "h.{1,4,…}.w × 8"]),
    ],
)
def test_merged_names(names, keys, expected):
    assert [name for name, _ in merged(names, keys)] == expected


def decoder(layers=12):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    blocks = [
        {
            "norm": {"scale": array(4)},
            "attention": {"out": array(4, 4)},
            "up": array(4, 8),
        }
        for _ in range(layers)
    ]
    return {"wte": array(20, 4), "blocks": blocks}


def lines_of(description):
    """The lines of the rows by their names, with all columns."""
    _, rule, *lines = description.to_text().splitlines()
    return {line.split("  ")[0]: line for line in lines[: lines.index(rule)]}


@pytest.mark.extended
def test_equal_rows_over_layers_are_one_line():
    params = decoder()
    description = describe(params, orscale(1e-3))
    lines = lines_of(description)
    assert [*lines] == [
        "blocks.*.attention.out × 12",
        "blocks.*.norm.scale × 12",
        "blocks.*.up × 12",
        "wte",
    ]
    norms = [np.linalg.norm(block["up"]) for block in params["blocks"]]
    line = lines["blocks.*.up × 12"]
    assert f"{min(norms):.4g} … {max(norms):.4g}" in line
    # Twelve matrices, their entries, and their bytes: a momentum, and 28 a matrix.
    assert re.search(r" 12 of 4 × 8 .* 384 +1,872$", line)
    assert len(description.rows) == 37 == len(description.to_csv().splitlines()) - 1


@pytest.mark.parametrize(
    "value, shown", [(0, " 0 … "), (np.nan, " nan "), (np.inf, "… inf")]
)
def test_one_matrix_with_a_remarkable_norm_is_seen(value, shown):
    params = decoder()
    params["blocks"][7]["up"] = jnp.full((4, 8), float(value))
    assert shown in lines_of(describe(params))["blocks.*.up × 12"]
    assert shown in str(describe(params))


@pytest.mark.parametrize("differs", ["shape", "dtype", "rule", "label", "state", "check"])
def test_a_layer_that_differs_has_its_own_line(differs):
    """Whatever it differs in; the others say which they are."""
    params, optimizer = decoder(4), None
    odd = params["blocks"][2]
    changed = {
        "shape": jnp.ones((4, 9)),
        "dtype": odd["up"].astype(jnp.bfloat16),
        "check": jnp.ones((4, 20)),  # As long as the vocabulary.
    }
    odd["up"] = changed.get(differs, odd["up"])
    if differs not in changed:
        labels = jax.tree.map(lambda _: "on", params)
        labels["blocks"][2]["up"] = "odd"
        other = {
            "rule": optax.adamw(0.1),
            "label": orscale(0.1),
            "state": optax.sgd(0.1, momentum=0.9),
        }[differs]
        main = optax.adam(0.1) if differs == "state" else orscale(0.1)
        optimizer = optax.partition({"on": main, "odd": other}, labels)
    lines = lines_of(describe(params, optimizer))
    of_up = [name for name in lines if ".up" in name]
    assert of_up == ["blocks.{0,1,…}.up × 3", "blocks.2.up"]


def test_gpt2_fits_on_a_screen():
    """GPT-2 124M, from shapes: 40 lines of 94 columns, with the state."""
    from examples.benchmarks.models import gpt2

    leaves = gpt2()
    params = {n: jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in leaves.items()}
    numbers = {name: leaf.numbers for name, leaf in leaves.items()}
    optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
    description = describe(params, optimizer)
    lines = str(description).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 94
    assert len(description.rows) == 148


def largest_model():
    """Kimi K2, from shapes, and convolutions of which no two are alike."""
    from examples.benchmarks.models import KIMI_K2, mixture, over_all

    leaves = mixture(over_all({"fsdp": 8}), P("fsdp"), KIMI_K2)
    shapes = {f"layers.{name}": leaf.shape for name, leaf in leaves.items()}
    shapes |= {f"stem.{i}.kernel": (3, 3, i, 2 * i) for i in range(1, 60)}
    return {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}


@pytest.mark.parametrize(
    "refused",
    [
        lambda tree: jax.eval_shape(orscale(1e-3).init, tree),
        by_path({"": "matrix"}),
        by_path({"stem": "adamw", "experts": EXPERTS}, head_size=1000),
        lambda tree: jax.eval_shape(
            lambda params: convert_state((), optax.trace(0.9), params), tree
        ),
        lambda tree: resolved(
            by_name(tree), {p: Unresolved("no rule") for p in by_name(tree)}, None, False
        ),
    ],
    ids=["default", "by_path", "head_size", "convert_state", "types of modules"],
)
def test_messages_about_the_largest_model_fit_on_a_screen(refused):
    """Leaves that differ by numbers have one line, and a long list has an end."""
    tree = largest_model()
    with pytest.raises(ValueError, match=r"' × \d+[ \n]") as caught:
        refused(tree)
    lines = str(caught.value).splitlines()
    assert 3 <= len(lines) <= 25
