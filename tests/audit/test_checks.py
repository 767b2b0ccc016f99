"""What the column "check" of describe marks, and what it leaves alone."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers as Blocks, by_path, describe
from orscale_jax.parameters.dimension_numbers import matrix_axes


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def marks(shapes, rules=None):
    """The check of each parameter that has one, by dotted path."""
    tree = unflatten_dict({k: leaf(*v) for k, v in shapes.items()}, sep=".")
    rows = describe(tree, by_path(rules or {})).rows
    return {row.name: ", ".join(row.check) for row in rows if row.check}


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return nn.Dense(8, name="down")(nn.relu(nn.Dense(16, name="up")(x))), None


def scanned():
    model = nn.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=12
    )()
    with jax.numpy_rank_promotion("allow"):
        init = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 3, 8)), None)
    return init["params"]


def test_a_scanned_model_by_the_list_in_the_error():
    """Rules for exactly the leaves that the error lists: no norm and bias is a matrix."""
    params = scanned()
    with pytest.raises(ValueError, match="ambiguous") as caught:
        matrix_axes(None, params)
    listed = re.findall(
        r"'(\S+)' of shape \(([^)]*)\)( \(class \w+\))?", str(caught.value)
    )
    ranks = {name: shape.count(",") + 1 for name, shape, _ in listed}
    assert len(listed) == 9 and max(ranks.values()) == 4
    biases = {name for name, _, layer in listed if layer == " (class bias)"}
    assert biases == {name for name in ranks if name.endswith("bias")}
    assert len(biases) == 3  # Of (layers, heads, head_dim).
    rules = {
        re.escape(name): Dims(1, tuple(range(2, rank))) for name, rank in ranks.items()
    }
    rules |= dict.fromkeys(map(re.escape, biases), "adamw")
    rules |= {re.escape(n): Dims((1, 2), 3) for n in ranks if n.endswith("out.kernel")}
    for row in describe(params, by_path(rules)).rows:
        assert (row.rule == "matrix") == row.path.endswith("kernel"), row.path
        assert row.check == ()
    # A rule that also matches the biases and norms makes them matrices, with a mark.
    broad = {"kernel": Dims(-2, -1), "": Dims(-2, -1)}
    for row in describe(params, by_path(broad)).rows:
        assert row.rule == "matrix"
        expected = {"bias": ["bias?"], "norm": ["norm?"]}.get(row.layer_class, [])
        assert [mark for mark in row.check if "?" in mark] == expected


@pytest.mark.parametrize(
    "name, shape, rules, expected",
    [
        ("norm.scale", (12, 8), {"": Dims(0, 1)}, "norm?"),
        ("mlp.bias", (12, 8), {"": "matrix"}, "bias?"),
        ("layer_scale.gamma", (12, 8), {"": "matrix"}, "scale?"),
        ("attention.query.bias", (4, 16), {"": "matrix"}, "bias?"),
        ("lm_head.kernel", (8, 99), {"": "matrix"}, "head?"),
        ("embed.embedding", (99, 8), {"": "matrix"}, "embedding?"),
        ("tok_embeddings.weight", (999, 8), {"": "matrix"}, "embedding?"),
        ("router.kernel", (512, 8), None, "router?"),
    ],
)
def test_a_class_that_contradicts_the_rule(name, shape, rules, expected):
    assert marks({name: shape}, rules) == {name: expected}


def test_marks_that_the_class_refutes():
    assert marks({"layers.gate": (8, 16), "layers.up": (8, 16)}) == {}
    assert marks({"gate": (8, 16), "up": (8, 16), "down": (16, 8)}) == {}
    assert marks({"layers.out": (8, 8), "layers.q": (8, 8), "layers.k": (8, 8)}) == {}
    assert marks({"attention.out.kernel": (8, 8)}) == {}
    assert marks({"blocks.query.lora_a": (64, 2), "blocks.query.lora_b": (2, 64)}) == {}
    assert marks({"mlp.in_proj.kernel": (8, 16), "mlp.out_proj.kernel": (16, 8)}) == {}
    # Without a class that fits, or without the other half of a gated MLP, they stay.
    assert marks({"cell.gate": (8, 8)}) == {"cell.gate": "router?"}
    assert marks({"mlp.gate": (8, 4)}) == {"mlp.gate": "router?"}
    assert marks({"decoder.out": (8, 8)}) == {"decoder.out": "table or head?"}
    assert marks({"thin": (64, 2)}) == {"thin": "32 times as long"}


SPLIT = {
    "gemma": ("attn.kv_einsum.w", (2, 1, 64, 16), Dims(2, (1, 3))),
    "gemma, scanned": ("layers.attn.kv_einsum.w", (5, 2, 1, 64, 16), Dims(3, (2, 4))),
    "gemma's mlp": ("mlp.gating_einsum", (2, 64, 128), Dims(1, 2)),
    "qkv": ("attention.qkv.kernel", (8, 3, 2, 4), Dims(0, (2, 3))),
    "blocks": ("attention.qkv", (8, 24), Blocks(0, 1, block_axis=1, blocks=3)),
}


@pytest.mark.parametrize("case", SPLIT)
def test_fused_projections_that_are_split(case):
    name, shape, numbers = SPLIT[case]
    assert marks({name: shape}, {"": numbers}) == {}


def test_layers_and_experts_split_no_fused_projection():
    stacked = {"layers.qkv.kernel": (3, 8, 24), "layers.norm.scale": (3, 8)}
    rules = {"kernel": Dims(1, 2)}
    assert marks(stacked, rules) == {"layers.qkv.kernel": "fused?"}
    parts = {"layers.qkv.kernel": (3, 8, 24), "layers.norm.scale": (8,)}
    assert marks(parts, rules) == {}
    experts = {"experts.gate_up": (2, 8, 16), "experts.down": (2, 8, 8)}
    assert marks(experts, {"": Dims(1, 2)}) == {"experts.gate_up": "fused?"}


def test_matrices_as_long_as_the_vocabulary():
    flax = {"embed.embedding": (99, 8), "readout.kernel": (8, 99), "mix.kernel": (8, 8)}
    assert marks(flax) == {"readout.kernel": "as long as embed.embedding"}
    haiku = {
        "language_model/embed": {"embeddings": leaf(99, 8)},
        "language_model/linear": {"w": leaf(8, 99), "b": leaf(99)},
        "language_model/transformer/linear": {"w": leaf(8, 32)},
    }
    found = {row.path: row.check for row in describe(haiku).rows if row.check}
    mark = "as long as language_model/embed.embeddings"
    assert found == {"language_model/linear.w": (mark,)}
    # Positions, single tokens, and a vocabulary as long as the width show nothing.
    for table, shape in [
        ("pos_embedding", (99, 8)),
        ("cls_token", (1, 8)),
        ("embed", (8, 8)),
        ("patch_embed.proj.weight", (8, 12)),
    ]:
        assert marks({table: shape, "a": (8, 99), "b": (1, 8), "c": (8, 12)}) == {}
    # Nor does a length where the class is known.
    assert marks({"embed": (99, 8), "mlp.up": (8, 99), "mlp.down": (99, 8)}) == {}


def test_stacks_of_vectors_without_a_class():
    mixer = {"layers.mixer.D": (5, 8), "layers.mixer.in.kernel": (5, 8, 16)}
    rules = {"kernel": Dims(1, 2)}
    assert marks(mixer, rules) == {"layers.mixer.D": "stack of vectors?"}
    assert marks(mixer | {"layers.mixer.skip": (8,)}, rules) == {}
    # Heads of a square projection are no stack, nor are the experts of a router.
    heads = {"attention.query.kernel": (8, 2, 4), "attention.mix": (8, 8)}
    assert marks(heads, {"query": Dims(0, (1, 2))}) == {}
    experts = {"moe.experts.up.kernel": (5, 8, 16), "moe.router": (5, 8)}
    assert marks(experts, rules) == {"moe.router": "router?"}


def test_paths_without_names():
    def found(tree):
        return [row.check for row in describe(tree).rows]

    assert found([leaf(8, 8), leaf(8)]) == [("no name",), ()]
    assert found(({"value": {"data_array": leaf(8, 8)}},)) == [("no name",)]
    assert found(leaf(8, 8)) == found({"w": leaf(8, 8)}) == [()]


def test_heads_of_attention_are_long_and_no_stacks():
    shapes = {"attn.q_proj": (512, 64), "attn.o_proj": (64, 512)}
    tree = unflatten_dict({k: leaf(*v) for k, v in shapes.items()}, sep=".")
    description = describe(tree, by_path({}, head_size=16))
    assert [(row.m, row.n, row.check) for row in description.rows] == [
        (16, 512, ()),
        (512, 16, ()),
    ]
    assert marks({"attn.q_proj": (512, 16)}) == {"attn.q_proj": "32 times as long"}
