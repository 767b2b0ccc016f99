"""What the column "check" of describe marks, and what it leaves alone."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers as Blocks, by_path, describe, orscale
from orscale_jax.flax import nnx_dimension_numbers
from orscale_jax.parameters.dimension_numbers import matrix_axes


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def described(tree, numbers):
    return describe(tree, orscale(1e-3, weight_dimension_numbers=numbers))


def marks(shapes, rules=None):
    """The check of each parameter that has one, by dotted path."""
    tree = unflatten_dict({k: leaf(*v) for k, v in shapes.items()}, sep=".")
    description = described(tree, by_path(rules or {}))
    found = {row.name: ", ".join(row.check) for row in description.rows if row.check}
    assert ("check" in str(description).splitlines()[0]) == bool(found)
    return found


ALL, STACK, LAYERS = {"": "matrix"}, {"": Dims(1, 2)}, {"kernel": Dims(1, 2)}


@pytest.mark.parametrize(
    ("name", "shape", "rules", "expected"),
    [
        ("attention.qkv", (8, 24), None, "fused?"),
        ("attention.kv", (8, 16), None, "fused?"),
        ("in_proj", (8, 24), None, "fused?"),
        ("linear_attn.in_proj_qkvz", (8, 24), None, "fused?"),
        ("linear_attn.in_proj_ba", (8, 24), None, "fused?"),
        ("mixer.x_proj.weight", (8, 24), None, "fused?"),
        ("self_attn.W_pack.weight", (24, 8), None, "fused?"),
        ("attn.Wqkv.weight", (24, 8), None, "fused?"),
        ("attn.qkvz.weight", (32, 8), None, "fused?"),
        ("ff.net_0.proj.kernel", (8, 64), None, "fused?"),
        ("linear_attn.in_proj_z", (8, 24), None, ""),
        ("router", (8, 4), None, "router?"),
        ("router.kernel", (512, 8), None, "router?"),
        ("mlp.gate.kernel", (8, 4), None, "router?"),
        ("mlp.gate", (8, 4), None, "router?"),  # Without the rest of a gated MLP.
        ("cell.gate", (8, 8), None, "router?"),
        ("output", (8, 32), None, "table or head?"),
        ("decoder.out", (8, 8), None, "table or head?"),
        ("adapter", (64, 4), None, "16 times as long"),
        ("thin", (64, 2), None, "32 times as long"),
        ("experts", (1, 8, 8), STACK, "batch of one"),
        # A class that contradicts the rule.
        ("norm.scale", (12, 8), {"": Dims(0, 1)}, "norm?"),
        ("mlp.bias", (12, 8), ALL, "bias?"),
        ("layer_scale.gamma", (12, 8), ALL, "scale?"),
        ("attention.query.bias", (4, 16), ALL, "bias?"),
        ("lm_head.kernel", (8, 99), ALL, "head?"),
        ("embed.embedding", (99, 8), ALL, "embedding?"),
        ("tok_embeddings.weight", (999, 8), ALL, "embedding?"),
        # A class that refutes a mark.
        ("mlp.gate_proj.kernel", (8, 16), None, ""),
        ("wi_0", (8, 32), None, ""),
        ("attention.output.dense", (8, 8), None, ""),
        ("attention.out.kernel", (8, 8), None, ""),
        # Fused projections that blocks or an axis of the batch divide.
        ("attn.kv_einsum.w", (2, 1, 64, 16), {"": Dims(2, (1, 3))}, ""),
        ("layers.attn.kv_einsum.w", (5, 2, 1, 64, 16), {"": Dims(3, (2, 4))}, ""),
        ("mlp.gating_einsum", (2, 64, 128), STACK, ""),
        ("attention.qkv.kernel", (8, 3, 2, 4), {"": Dims(0, (2, 3))}, ""),
        ("attention.qkv", (8, 24), {"": Blocks(0, 1, block_axis=1, blocks=3)}, ""),
    ],
)
def test_marks_of_a_leaf_alone(name, shape, rules, expected):
    assert marks({name: shape}, rules) == ({name: expected} if expected else {})


# Gate and up in one kernel, by the shapes: twice as wide as the projection down takes.
GATED = {
    "blocks.0.ff_proj.weight": "blocks.0.ff_out.weight",
    "mlp.Wi.weight": "mlp.Wo.weight",
    "mlp.dense_h_to_4h.weight": "mlp.dense_4h_to_h.weight",
    "mlp.fc1.kernel": "mlp.fc2.kernel",
    "ffn.proj_up.kernel": "ffn.proj_down.kernel",
    "mlp.Dense_0.kernel": "mlp.Dense_1.kernel",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.output_linear.weight",
}


@pytest.mark.parametrize("up", GATED)
def test_a_gate_in_the_projection_up(up):
    for d, inner in ((8, 12), (8, 4), (8, 8)):
        for sides in (1, -1):  # (in, out) and (out, in).
            shapes = {up: (d, 2 * inner)[::sides], GATED[up]: (inner, d)[::sides]}
            assert marks(shapes) == {up: "fused?"}
            shapes[up] = (d, inner)[::sides]
            assert marks(shapes) == {}


def test_olmo():
    names = {
        "att_proj": (8, 24),
        "attn_out": (8, 8),
        "ff_proj": (8, 32),
        "ff_out": (32, 8),
    }
    shapes = {f"blocks.0.{name}.weight": shape for name, shape in names.items()}
    assert marks(shapes) == {"blocks.0.att_proj.weight": "fused?"}


MIXER = {"layers.mixer.D": (5, 8), "layers.mixer.in.kernel": (5, 8, 16)}
# Two layers and an output layer that no name shows.
MLP = {"one.kernel": (8, 12), "two.kernel": (12, 20), "readout.kernel": (20, 7)}
BIASES = {"one.bias": (12,), "two.bias": (20,), "readout.bias": (7,)}
OUTPUT = {"readout.kernel": "output layer?"}
TORCH = {"one.weight": (12, 8), "two.weight": (20, 12), "readout.weight": (7, 20)}
BOARD = {"one.w": (3, 3, 2, 16), "two.w": (3, 3, 16, 16), "three.w": (1, 1, 16, 2)}
BOARD |= {"policy.w": (50, 9), "policy.b": (9,)}
CONVOLUTIONS = {"one|two|three": Dims((0, 1, 2), 3)}
VIT = {"blocks.0.linear1.weight": (64, 16), "blocks.0.linear2.weight": (16, 64)}
VIT |= {"mlp.layers.0.weight": (16,), "mlp.layers.1.weight": (10, 16)}
STACKED = {"layers.qkv.kernel": (3, 8, 24), "layers.norm.scale": (3, 8)}
AXES = {"attn.c_attn.weight_MxN": (3, 24, 8), "attn.c_proj.weight_MxN": (3, 8, 8)}
SHORT = {"a": (8, 99), "b": (1, 8), "c": (8, 12)}


@pytest.mark.parametrize(
    ("shapes", "rules", "expected"),
    [
        ({"layers.gate": (8, 16), "layers.up": (8, 16)}, None, {}),
        ({"gate": (8, 16), "up": (8, 16), "down": (16, 8)}, None, {}),
        ({"layers.out": (8, 8), "layers.q": (8, 8), "layers.k": (8, 8)}, None, {}),
        ({"blocks.query.lora_a": (64, 2), "blocks.query.lora_b": (2, 64)}, None, {}),
        ({"mlp.in_proj.kernel": (8, 16), "mlp.out_proj.kernel": (16, 8)}, None, {}),
        # An axis that all neighbours have is one of layers or experts, and splits none.
        (STACKED, LAYERS, {"layers.qkv.kernel": "fused?"}),
        (STACKED | {"layers.norm.scale": (8,)}, LAYERS, {}),
        (AXES, {"weight": Dims(2, 1)}, {"attn.c_attn.weight_MxN": "fused?"}),
        *(
            # Of which nothing is beside the array itself, as in midGPT.
            (
                {"attn.qkv.own_w": (layers, 8, 24), "attn.out.own_w": (layers, 8, 8)},
                STACK,
                {"attn.qkv.own_w": "fused?"},
            )
            for layers in (2, 3, 4, 6)
        ),
        (
            {"experts.gate_up": (2, 8, 16), "experts.down": (2, 8, 8)},
            STACK,
            {"experts.gate_up": "fused?"},
        ),
        # As long as the vocabulary.
        (
            {"embed.embedding": (99, 8), "readout.kernel": (8, 99), "mix.kernel": (8, 8)},
            None,
            {"readout.kernel": "as long as embed.embedding"},
        ),
        # Positions, single tokens, and a vocabulary as long as the width show nothing,
        # nor does a length where the class is known.
        (SHORT | {"pos_embedding": (99, 8)}, None, {}),
        (SHORT | {"cls_token": (1, 8)}, None, {}),
        (SHORT | {"embed": (8, 8)}, None, {}),
        (SHORT | {"patch_embed.proj.weight": (8, 12)}, None, {}),
        ({"embed": (99, 8), "mlp.up": (8, 99), "mlp.down": (99, 8)}, None, {}),
        # No layer takes its outputs, or equal parts of them.
        (MLP, None, OUTPUT),
        (MLP | BIASES, None, OUTPUT),
        (TORCH, None, {"readout.weight": "output layer?"}),
        (TORCH | BIASES, None, {"readout.weight": "output layer?"}),
        (MLP | {"three.kernel": (7, 11), "four.kernel": (11, 8)}, None, {}),
        (MLP | {"other.kernel": (40, 14), "norm.scale": (14,)}, None, {}),
        (MLP | {"lm_head.kernel": (20, 9)}, None, OUTPUT),  # Beside a known one, too.
        # Behind a flattened image, whose window does not count; in a module "mlp".
        (BOARD, CONVOLUTIONS, {"policy.w": "output layer?"}),
        (VIT, None, {"mlp.layers.1.weight": "output layer?"}),
        ({"readout.kernel": (20, 7), "other.kernel": (8, 8)}, None, {}),
        (
            MLP | {"readout.kernel": (3, 20, 7)},
            {"readout.kernel": Dims(1, 2)},
            {},
        ),
        # Vectors in a stack: all that stands beside them is stacked as well.
        (MIXER, LAYERS, {"layers.mixer.D": "stack of vectors?"}),
        (MIXER | {"layers.mixer.skip": (8,)}, LAYERS, {}),
        # Heads of a square projection are no stack, nor are the experts of a router.
        (
            {"attention.query.kernel": (8, 2, 4), "attention.mix": (8, 8)},
            {"query": Dims(0, (1, 2))},
            {},
        ),
        (
            {"moe.experts.up.kernel": (5, 8, 16), "moe.router": (5, 8)},
            LAYERS,
            {"moe.router": "router?"},
        ),
        # Heads are long; without heads, a projection is not.
        ({"attn.q_proj": (512, 16)}, None, {"attn.q_proj": "32 times as long"}),
    ],
)
def test_marks_among_neighbours(shapes, rules, expected):
    assert marks(shapes, rules) == expected


def test_heads_of_attention_are_long_and_no_stacks():
    tree = {"attn": {"q_proj": leaf(512, 64), "o_proj": leaf(64, 512)}}
    heads = {
        "q_proj": Blocks(0, 1, block_axis=1, blocks=4),
        "o_proj": Blocks(0, 1, block_axis=0, blocks=4),
    }
    rows = described(tree, by_path(heads)).rows
    found = [(row.m, row.n, row.check) for row in rows]
    assert found == [(16, 512, ()), (512, 16, ())]


def test_an_example_input_answers_whether_it_is_the_output_layer():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(8, 12, rngs=rngs), nnx.relu, nnx.Linear(12, 7, rngs=rngs)
    )
    for inputs, expected in (
        ((), ("matrix", ("output layer?",))),
        ((jnp.ones((1, 8)),), ("adamw", ())),
    ):
        rows = described(model, nnx_dimension_numbers(model, *inputs)).rows
        of_kernels = [(x.rule, x.check) for x in rows if x.path.endswith("kernel")]
        assert of_kernels == [("matrix", ()), expected]


def test_other_trees():
    """Haiku's names, and paths without names."""
    haiku = {
        "language_model/embed": {"embeddings": leaf(99, 8)},
        "language_model/linear": {"w": leaf(8, 99), "b": leaf(99)},
        "language_model/transformer/linear": {"w": leaf(8, 32)},
    }
    long = "as long as language_model/embed.embeddings"
    for tree, expected in [
        (haiku, [(), (), (long,), ()]),
        ([leaf(8, 8), leaf(8)], [("no name",), ()]),
        (({"value": {"data_array": leaf(8, 8)}},), [("no name",)]),
        (leaf(8, 8), [()]),
        ({"w": leaf(8, 8)}, [()]),
    ]:
        assert [row.check for row in describe(tree).rows] == expected


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return nn.Dense(8, name="down")(nn.relu(nn.Dense(16, name="up")(x))), None


def test_a_scanned_model_by_the_list_in_the_error():
    """Rules for exactly the leaves that the error lists: no norm and bias is a matrix."""
    model = nn.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=12
    )()
    with jax.numpy_rank_promotion("allow"):
        init = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 3, 8)), None)
    params = init["params"]
    with pytest.raises(ValueError, match="ambiguous") as caught:
        matrix_axes(None, params)
    listed = dict(re.findall(r"'(\S+)' of shape \(([^)]*)\)", str(caught.value)))
    ranks = {name: shape.count(",") + 1 for name, shape in listed.items()}
    assert len(ranks) == 6 and max(ranks.values()) == 4  # No bias of (layers, heads, d).
    rules = {
        re.escape(name): Dims(1, tuple(range(2, rank))) for name, rank in ranks.items()
    }
    rules |= {re.escape(n): Dims((1, 2), 3) for n in ranks if n.endswith("out.kernel")}
    for row in described(params, by_path(rules)).rows:
        assert (row.rule == "matrix") == row.path.endswith("kernel"), row.path
        assert row.check == ()
    # A rule that also matches the biases and norms makes them matrices, with a mark.
    broad = {"kernel": Dims(-2, -1), "": Dims(-2, -1)}
    for row in described(params, by_path(broad)).rows:
        assert row.rule == "matrix"
        expected = {"bias": ["bias?"], "norm": ["norm?"]}.get(row.kind, [])
        assert [mark for mark in row.check if "?" in mark] == expected
