"""One answer to "which parameter is this?", in every container and flat dictionary."""

import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import by_path, describe, orscale
from orscale_jax.equinox import dimension_numbers as equinox_numbers
from orscale_jax.flax import linen_dimension_numbers, nnx_dimension_numbers
from orscale_jax.haliax import dimension_numbers as haliax_numbers
from orscale_jax.parameters.dimension_numbers import is_resolvable
from orscale_jax.trees.names import keys_on

AS_LONG = re.compile(r"^as long as .*")  # The name is as the table prints it.


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def answers(tree, numbers=None):
    """Rule, kind and check, by the identity of the leaf."""
    rows = describe(tree, orscale(1e-3, weight_dimension_numbers=numbers)).rows
    leaves = jax.tree.leaves(tree)
    assert len(rows) == len(leaves)
    return {
        id(leaf): (
            row.rule,
            row.kind,
            [AS_LONG.sub("as long", c) for c in row.check],
        )
        for leaf, row in zip(leaves, rows, strict=True)
    }


# Containers


def modules(tree):
    """Attributes and lists."""
    if not isinstance(tree, dict):
        return tree
    children = {key: modules(value) for key, value in tree.items()}
    if "0" in tree:
        return list(children.values())
    fields = {"__annotations__": dict.fromkeys(tree, Any)}
    return type("Fields", (eqx.Module,), fields)(**children)


def haiku(tree):
    """Modules by their path, with "~" where a method is not __call__."""
    paths = {}
    for (*above, last), value in flatten_dict(tree).items():
        paths.setdefault("/~/".join(above), {})[last] = value
    return paths


CONTAINERS = {
    "modules": modules,
    "Haiku": haiku,
    "boxes by tuples": lambda tree: flatten_dict(jax.tree.map(nnx.Param, tree)),
}


MODEL = {
    "embed": {"embedding": leaf(96, 6)},
    "blocks": {
        str(i): {
            "norm_1": {"scale": leaf(6)},
            "attn": {name: {"kernel": leaf(6, 6)} for name in ("query", "key", "out")},
            "mlp": {"gate": leaf(6, 8), "up": leaf(6, 8), "down": leaf(8, 6)},
            "router": {"kernel": leaf(6, 4)},
        }
        for i in range(2)
    },
    "norm": {"scale": leaf(6)},
    "lm_head": {"kernel": leaf(6, 96), "bias": leaf(96)},
    "readout": {"kernel": leaf(6, 96)},
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_model_in_each_container(container):
    found = answers(CONTAINERS[container](MODEL))
    assert found == answers(MODEL)
    assert found[id(MODEL["lm_head"]["kernel"])] == ("adamw", "head", [])
    assert found[id(MODEL["embed"]["embedding"])] == ("adamw", "embedding", [])
    check = ["as long", "16 times as long"]
    assert found[id(MODEL["readout"]["kernel"])] == ("matrix", "other", check)
    router = MODEL["blocks"]["1"]["router"]["kernel"]
    assert found[id(router)] == ("matrix", "other", ["router?"])
    out = MODEL["blocks"]["0"]["attn"]["out"]["kernel"]
    assert found[id(out)] == ("matrix", "other", [])


# Names


def rules_of(tree):
    return {row.path: row.rule for row in describe(tree).rows}


MATRICES = """
    normalized_mlp.kernel normalized_mlp.weight bias_net.kernel bias_net.weight bias_proj
    scale_proj.kernel scale_net.weight head_mixer hyperhead heads headline
    attention.head_proj norm_proj.weight norm1.linear.weight adaLN_modulation.1.weight
    beta_proj.weight offset_net.kernel to_tokens.kernel LayerNormMLP_0.wi_kernel
    WeightNorm_0.Dense_0.kernel norm.mlp.up embassy.kernel mlp_tokens.fc1.weight
    gate_bias_mlp.kernel blocks.output.kernel lora.b layers.wkv_b
    kernel attention_heads query ahead out multi_head_q ember o_proj
    blocks.0.sa.heads.0.key.weight attention.head_dim_proj.kernel header_w
    layers.3.attention.score.weight layers.3.mlp.output_layer.weight
    multi_head_attention.kernel layers.0.multi_head.kernel multi_head_w
    attn.c_attn.weight_MxN MAPHead_0.query.kernel block_diag.kernel freqs_proj.kernel
    attention.kv_latent
""".split()
ADAMW = """
    cvf.scale envelope.pi envelope.0.sigma actor.log_std actor_logstd log_sigma
    norm.scale norm norm_1.weight ln_f.kernel attention_norm.kernel final_norm.w
    mlp.bias attention.query.bias qkv_bias in_proj_bias linear.b scale layers.scale
    ls1.gamma layer_scale.lambda1 logit_scale batch_normalization.moving_gamma
    cls_token cls mask_tokens.weight shared.weight encoder.shared.weight
    attn.relative_position_bias_table LayerNormMLP_0.scale norm_proj.scale LMHead_0
    head.kernel tokEmb pos_embed.value to_logits.weight ln_mlp.weight
    norm.shift.weights mixer.A_log ssm.Lambda_re att.time_decay
    resampler.latents kan.phase kan.omega rope.freqs rotations.angles dual.diag_kernel
    embedding embed_tokens.kernel tok_embeddings wte wpe.kernel Embed_0.kernel pos_embed
    position encoder.positions
    unembed lm_head head lmHead.kernel output_head.kernel logits logits_dense.kernel
    classifier patchEmbed tok_emb posEmb vocab tok pos vocab_proj TokEmb
""".split()


HEADS = """
    head_w lm_head_kernel classifier_weight stage3.lm_head_w head_dist.weight
    lm_head.weight_MxN head_VxD decoder.output_projection.weight transformer.ff_out.weight
    heads.0.weight heads.head.weight score.weight
    decoder.output_layer.weight params.output_layer.kernel
""".split()


@pytest.mark.parametrize("sep", [None, ".", "/"])
def test_names_of_matrices_and_of_vectors(sep):
    for name in MATRICES + ADAMW + HEADS:
        keys = name.split(".")
        tree = {keys[-1]: leaf(6, 4)}
        if keys[-1] == "b":
            tree |= {"a": leaf(4, 6)} if keys[0] == "lora" else {"w": leaf(6, 6)}
        for key in reversed(keys[:-1]):
            tree = {key: tree}
        if sep:
            tree = flatten_dict(tree, sep=sep)
        path = name.replace(".", sep or ".")
        [row] = (row for row in describe(tree).rows if row.path == path)
        assert row.rule == ("matrix" if name in MATRICES else "adamw"), name
        assert row.kind == "head" or name not in HEADS


def test_names_beside_decide_about_an_output_and_a_b():
    embedded = {"tok_embeddings": leaf(99, 8), "output": {"kernel": leaf(8, 99)}}
    assert rules_of(embedded)["output.kernel"] == "adamw"
    assert rules_of({"output": leaf(8, 99)}) == {"output": "matrix"}
    toy = {"w1": leaf(3, 4), "b1": leaf(3, 4)}
    assert rules_of(toy) == {"w1": "matrix", "b1": "adamw"}
    factors = dict.fromkeys(("A", "B", "w"), leaf(3, 4))
    assert set(rules_of(factors).values()) == {"matrix"}
    gates = {"gating_w": leaf(3, 4), "gating_b": leaf(3, 4)}
    assert rules_of(gates) == {"gating_w": "matrix", "gating_b": "adamw"}


@pytest.mark.parametrize(
    "key, names",
    [
        ("gpt/~/lm_head/linear", ("gpt", "lm_head", "linear")),
        ("layers.0.attn", ("layers", "0", "attn")),
        ("layers_0", ("layers_0",)),
        ("layers__0::attn|w", ("layers", "0", "attn", "w")),
        ("up.kernel.array", ("up", "kernel")),
        ("['layers'][0].attn", ("layers", "0", "attn")),
        (("layers", 0, "attn.w"), ("layers", "0", "attn", "w")),
        ("dense/kernel:0", ("dense", "kernel")),
        ("_query_norm", ("_query_norm",)),
        ("__init__", ("init",)),
        ("params", ("params",)),
        ("params/up", ("up",)),
        ("attention/value", ("attention", "value")),
        ("attention/value/kernel/value", ("attention", "value", "kernel")),
        ("0.value.data_array", ("0", "value")),
        ("", ()),
        (7, ("7",)),
    ],
)
def test_the_names_in_one_key(key, names):
    [(path, _)] = jax.tree.leaves_with_path({key: 0})
    assert keys_on(path) == names


def test_expressions_match_tuples_as_keys():
    tree = {("blocks", "0", "query"): leaf(6, 2, 3), ("lm_head", "w"): leaf(6, 9)}
    numbers = by_path({r"^blocks\.0\.query$": Dims(0, (1, 2)), r"lm_head\.": "matrix"})
    assert numbers(tree) == dict(zip(tree, (Dims(0, (1, 2)), Dims(0, 1)), strict=True))


# Names beside types

# A layer of each library by a name, and what says which of its parameters are matrices.
SIDE, (IN, OUT) = (3, 3), hax.make_axes(inputs=4, outputs=6)
LAYERS = {
    "nnx.Linear": lambda r: nnx.Linear(4, 6, use_bias=False, rngs=r),
    "nnx.Einsum": lambda r: nnx.Einsum("bi,io->bo", (4, 6), rngs=r),
    "nnx.Conv": lambda r: nnx.Conv(4, 6, SIDE, use_bias=False, rngs=r),
    "nnx.Embed": lambda r: nnx.Embed(4, 6, rngs=r),
    "eqx.Linear": lambda _: eqx.nn.Linear(4, 6, use_bias=False, key=jax.random.key(0)),
    "eqx.Embedding": lambda _: eqx.nn.Embedding(4, 6, key=jax.random.key(0)),
    "hax.Linear": lambda _: hax.nn.Linear.init(
        IN, OUT, key=jax.random.key(0), use_bias=False
    ),
    "nn.Dense": lambda name: nn.Dense(6, use_bias=False, name=name),
    "nn.Conv": lambda name: nn.Conv(6, SIDE, use_bias=False, name=name),
}
HIDDEN = """
    stem patch_embed embedding to_tokens pos_embed cls_token norm_mlp scale bias position
""".split()
OUTPUT = """
    lm_head classifier to_logits unembed output_embedding score
""".split()


class Named(nn.Module):
    """A Linen model that ends in a hidden state: no trace shows a head."""

    layer: str
    name_of_layer: str

    @nn.compact
    def __call__(self, x):
        return nn.relu(LAYERS[self.layer](self.name_of_layer)(x))


def takes_adamw(layer, name):
    """Whether the layer's only parameter does, by the function for its library."""
    if layer.startswith("nn."):
        model, x = Named(layer, name), jnp.ones((1, 5, 5, 4))
        params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
        numbers = linen_dimension_numbers(model, x)(params)
        return set(jax.tree.leaves(numbers, is_leaf=is_resolvable)) == {None}
    built = LAYERS[layer](nnx.Rngs(0))
    if layer.startswith("nnx."):
        model = nnx.Dict({name: built})
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        numbers = nnx_dimension_numbers(model)(params)
    else:
        of = haliax_numbers if layer.startswith("hax.") else equinox_numbers
        params = eqx.filter({name: built}, eqx.is_inexact_array)
        numbers = of({name: built})(params)
    return set(jax.tree.leaves(numbers, is_leaf=is_resolvable)) == {None}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_name_changes_the_optimizer_of_a_known_layer_only_if_it_is_a_heads(layer):
    table = "Embed" in layer
    hidden = {name for name in HIDDEN if takes_adamw(layer, name)}
    assert hidden == (set(HIDDEN) if table else set())
    assert all(takes_adamw(layer, name) for name in OUTPUT)


class Own(nnx.Module):
    def __init__(self, name):
        setattr(self, name, nnx.Param(jnp.ones((4, 6))))


def test_names_decide_where_no_type_does():
    for name in ("pos_embed", "scale", "lm_head"):
        found = nnx_dimension_numbers(model := Own(name))
        assert found(nnx.to_pure_dict(nnx.state(model))) == {name: None}
    with pytest.raises(ValueError, match="'mix' of shape"):
        nnx_dimension_numbers(Own("mix"))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(99, 8, rngs=rngs)
        self.output = nnx.Linear(8, 99, rngs=rngs)


def test_a_name_beside_another_says_that_a_layer_is_a_head():
    numbers = nnx_dimension_numbers(model := Decoder(nnx.Rngs(0)))
    optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
    rows = describe(nnx.state(model, nnx.Param), optimizer).rows
    assert {row.rule for row in rows} == {"adamw"}


@pytest.mark.parametrize("layers", ["mlp.Dense_0 mlp.Dense_1", "dense out_proj", "0 3"])
def test_all_layers_inside_of_a_head_are_the_heads(layers):
    tree = {f"classifier.{key}": {"weight": leaf(8, 8)} for key in layers.split()}
    tree |= {"encoder": {"0": {"weight": leaf(8, 8)}}}
    kinds = {row.path: (row.rule, row.kind) for row in describe(tree).rows}
    assert kinds.pop("encoder.0.weight") == ("matrix", "other")
    assert set(kinds.values()) == {("adamw", "head")}
