"""Models from other packages, as these define them: types decide about the axes."""

import collections
import functools
import types

import equimo.models
import equinox as eqx
import flaxmodels
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from flaxmodels.gpt2.gpt2 import GPT2Block
from haliax.nn import LayerNorm, Linear, Stacked
from optax.contrib import MuonDimensionNumbers as Dims

import orscale_jax.equinox
import orscale_jax.haliax
from orscale_jax import by_path, describe, orscale
from orscale_jax.flax import linen_dimension_numbers
from tests.runs import squares, train

KEY = jax.random.key(0)
ADAMW = ("adamw", 0, 0, 0)


@pytest.fixture(autouse=True)
def broadcasting_as_libraries_do():
    with jax.numpy_rank_promotion("allow"):
        yield


def matrix(m, n, matrices=1):
    return ("matrix", matrices, m, n)


def adamw(*paths):
    return dict.fromkeys(paths, ADAMW)


def under(prefix, rows):
    return {f"{prefix}.{path}": row for path, row in rows.items()}


def layer_of(name, kernel, of=("kernel", "bias")):
    return {f"{name}.{of[0]}": kernel} | adamw(*(f"{name}.{rest}" for rest in of[1:]))


def norm_of(*names, of=("scale", "bias")):
    return adamw(*(f"{name}.{leaf}" for name in names for leaf in of))


def audit(params, numbers):
    rows = describe(params, orscale(1e-3, weight_dimension_numbers=numbers)).rows
    return {row.path: (row.rule, row.matrices, row.m, row.n) for row in rows}


def audit_and_train(params, loss, numbers, expected):
    """The table, then two steps."""
    assert audit(params, numbers) == expected
    train(params, loss, numbers)


def layers_of(table, of=("kernel", "bias")):
    """Matrices with biases: the name, and the matrix's two sides, or more."""
    rows = [layer_of(name, matrix(*sides), of) for name, sides in table.items()]
    return dict(collections.ChainMap(*rows))


def noise(*shape):
    return jax.random.normal(jax.random.key(1), shape)


# flaxmodels


def train_linen(module, args, expected):
    variables = module.init(KEY, *args)

    def loss(params):
        y, _ = module.apply(variables | {"params": params}, *args, mutable="batch_stats")
        return squares(y[0] if isinstance(y, tuple) else y)

    numbers = linen_dimension_numbers(module, *args)
    audit_and_train(variables["params"], loss, numbers, expected)


@pytest.mark.slow
def test_the_gpt2_block_of_flaxmodels():
    """Its whole GPT2Model needs an older JAX."""
    config = types.SimpleNamespace(
        n_positions=8, n_embd=8, n_head=2, n_inner=None, activation_function="gelu",
        layer_norm_epsilon=1e-5, attn_pdrop=0.0, resid_pdrop=0.0, scale_attn_weights=True,
    )  # fmt: skip
    expected = layers_of(
        {
            "GPT2SelfAttention_0.Dense_0": (8, 24),
            "GPT2SelfAttention_0.Dense_1": (8, 8),
            "GPT2MLP_0.Dense_0": (8, 32),
            "GPT2MLP_0.Dense_1": (32, 8),
        }
    ) | norm_of("LayerNorm_0", "LayerNorm_1")
    train_linen(GPT2Block(config=config), (noise(2, 5, 8),), expected)


@pytest.mark.extended
def test_the_table_of_resnet18_of_flaxmodels():
    module = flaxmodels.ResNet18(
        output="logits", pretrained=None, normalize=False, num_classes=5
    )
    x = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
    params = jax.eval_shape(functools.partial(module.init, train=True), KEY, x)["params"]
    expected = {"Conv_0.kernel": matrix(147, 64)} | norm_of("BatchNorm_0")
    expected |= layer_of("Dense_0", ADAMW)
    features = [64, 64, 128, 128, 256, 256, 512, 512]
    for i, (before, after) in enumerate(zip([64, *features], features, strict=False)):
        kernels = [(9 * before, after), (9 * after, after)]
        if after != before:
            kernels.append((before, after))  # The shortcut
        for j, shape in enumerate(kernels):
            expected[f"BasicBlock_{i}.Conv_{j}.kernel"] = matrix(*shape)
            expected |= norm_of(f"BasicBlock_{i}.BatchNorm_{j}")
    # The name does not say that it is the head: the trace does.
    numbers = linen_dimension_numbers(module, x, train=True)
    assert audit(params, numbers) == expected


# Equinox


WEIGHTS = ("weight", "bias")


def train_equinox(model, run, numbers, expected):
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(params):
        return squares(run(eqx.combine(params, rest)))

    audit_and_train(params, loss, numbers, expected)


@pytest.mark.slow
def test_a_vision_transformer_of_equimo():
    model = equimo.models.VisionTransformer(
        img_size=8, in_channels=3, dim=8, patch_size=4, num_heads=2, depths=[2],
        num_classes=5, reg_tokens=2, key=KEY,
    )  # fmt: skip
    sides = {"attn.qkv": (8, 24), "attn.proj": (8, 8)}
    sides |= {"mlp.fc1": (8, 32), "mlp.fc2": (32, 8)}
    block = layers_of(sides, WEIGHTS) | norm_of("prenorm", "norm", of=WEIGHTS)
    expected = (
        layer_of("patch_embed.proj", ADAMW, of=WEIGHTS)  # By its name
        | adamw("global_pos_embed.weight", "cls_token", "reg_tokens")
        | under("blocks.0.blocks.0", block)
        | under("blocks.0.blocks.1", block)
        | norm_of("norm", of=WEIGHTS)
        | layer_of("head", ADAMW, of=WEIGHTS)
    )
    numbers = orscale_jax.equinox.dimension_numbers(model)

    def run(model):
        x = noise(2, 3, 8, 8)
        return jax.vmap(lambda x: model(x, key=KEY, inference=True))(x)

    train_equinox(model, run, numbers, expected)


# Haliax


Embed, Mlp, Layers, Vocab = hax.make_axes(embed=8, mlp=16, layers=3, vocab=11)


class HaliaxBlock(eqx.Module):
    norm: LayerNorm
    mlp: hax.nn.MLP

    @staticmethod
    def init(key):
        mlp = hax.nn.MLP.init(Embed, Embed.alias("embed_out"), Mlp, 1, key=key)
        return HaliaxBlock(LayerNorm.init(Embed), mlp)


def test_the_table_of_haliax_stacked_blocks():
    keys = jax.random.split(KEY, Layers.size)
    model = {
        "embeddings": hax.nn.Embedding.init(Vocab, Embed, key=KEY),
        "blocks": Stacked.init(Layers, HaliaxBlock)(key=keys),
        "lm_head": Linear.init(Embed, Vocab, key=KEY),
    }
    block = norm_of("norm", of=WEIGHTS) | layers_of(
        {"mlp.layers.0": (8, 16, 3), "mlp.layers.1": (16, 8, 3)}, WEIGHTS
    )
    expected = {"embeddings.weight": ADAMW} | layer_of("lm_head", ADAMW, of=WEIGHTS)
    expected |= under("blocks.stacked", block)
    params = eqx.filter(model, eqx.is_inexact_array)
    assert audit(params, orscale_jax.haliax.dimension_numbers(model)) == expected
    # Without the types, by path: norms and biases of a stack have two axes.
    rules = {r"mlp\.layers\.\d\.weight": Dims(-1, -2), "blocks": "adamw"}
    assert audit(params, by_path(rules)) == expected
