"""Dimension numbers from Haliax's module types and named axes."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax.nn import (
    Conv,
    ConvTranspose,
    Embedding,
    LayerNorm,
    Linear,
    MoELinear,
    RmsNorm,
    Stacked,
)
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import by_path, describe, orscale
from orscale_jax.haliax import NamedWeight, dimension_numbers
from orscale_jax.parameters.dimension_numbers import matrix_axes
from tests.derivatives import axes_by_derivatives

KEY = jax.random.key(0)
Embed, Heads, Size, Layers, Experts = hax.make_axes(
    embed=4, heads=2, size=3, layers=3, experts=5
)
In, Out, H, W = hax.make_axes(inputs=2, outputs=3, h=3, w=3)


def trained(model):
    return eqx.filter(model, eqx.is_inexact_array)


def numbers_of(model, **kwargs):
    return dimension_numbers(model, **kwargs)(trained(model))


LAYERS = {
    "linear": (lambda: Linear.init(In, Out, key=KEY), (In,)),
    "merge_heads": (lambda: Linear.init((Heads, Size), Embed, key=KEY), (Heads, Size)),
    "split_heads": (lambda: Linear.init(Embed, (Heads, Size), key=KEY), (Embed,)),
    "conv_transpose": (
        lambda: ConvTranspose.init((H, W), In, Out, 2, key=KEY),
        (In, H, W),
    ),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_by_its_derivatives(name):
    if "conv" not in name and not hasattr(jax.core, "is_constant_dim"):
        pytest.skip("haliax.dot needs an older JAX")
    build, axes = LAYERS[name]
    layer = build()
    x = jax.random.normal(jax.random.key(1), tuple(axis.size for axis in axes))

    def apply(weight, x):
        weight = hax.named(weight, layer.weight.axes)
        return eqx.tree_at(lambda layer: layer.weight, layer, weight)(
            hax.named(x, axes)
        ).array

    found = numbers_of(layer)
    weight = layer.weight.array
    axes_found = matrix_axes({"w": found.weight}, {"w": weight})["w"]
    expected = axes_by_derivatives(apply, weight, x)
    assert (axes_found.rows, axes_found.columns, axes_found.batch) == expected
    assert found.bias is None


@pytest.mark.extended
def test_layers_without_matrices():
    for layer in (
        Embedding.init(Experts, Embed, key=KEY),
        LayerNorm.init((Heads, Size)),
        RmsNorm.init((Heads, Size)),
        Linear.init(Embed, (), key=KEY),
        Conv.init("h", In, In, 2, groups=2, key=KEY),
    ):
        assert numbers_of(layer).weight is None
        assert getattr(numbers_of(layer), "bias", None) is None


@pytest.mark.extended
def test_experts_and_layers_are_a_batch():
    experts = numbers_of(MoELinear.init(Experts, In, Out, key=KEY))
    assert experts.weight == Dims(1, 2)
    build = lambda key: MoELinear.init(Experts, In, Out, key=key, out_first=True)  # noqa: E731
    stacked = hax.vmap(build, Layers)(jax.random.split(KEY, Layers.size))
    assert stacked.weight.array.shape == (3, 5, 3, 2)
    assert numbers_of(stacked).weight == Dims(3, 2)
    # In any order, since axes have names.
    moved = eqx.tree_at(
        lambda layer: layer.weight,
        stacked,
        stacked.weight.rearrange((Out, Layers, In, Experts)),
    )
    assert numbers_of(moved).weight == Dims(2, 0)


class Own(eqx.Module):
    mix: hax.NamedArray
    gain: hax.NamedArray
    plain: eqx.nn.Linear
    grouped: Conv

    def __init__(self):
        self.mix = hax.ones((Layers, Heads, Size))
        self.gain = hax.ones(Embed)
        self.plain = eqx.nn.Linear(3, 4, key=KEY)
        self.grouped = Conv.init("h", Embed, Out.resize(4), 2, groups=2, key=KEY)


def test_parameters_that_types_do_not_settle():
    with pytest.raises(ValueError, match="do not say which") as error:
        dimension_numbers(Own())
    text = str(error.value)
    assert f"'mix' of shape (3, 2, 3): there is no rule for it in {__name__}.Own" in text
    assert "'grouped.weight' of shape (4, 2, 2): it is split in 2 groups" in text
    assert "gain" not in text and "plain" not in text
    for kwargs in (
        {"overrides": {"^mix$": Dims(1, 2), "grouped": "adamw"}},
        {
            "overrides": {"grouped": "adamw"},
            "rules": {Own: lambda _: {"mix": NamedWeight("heads", Size)}},
        },
    ):
        found = numbers_of(Own(), **kwargs)
        assert found.mix == Dims(1, 2) and found.gain is None
        assert found.plain.weight == Dims(1, 0) and found.plain.bias is None
    rules = {Own: lambda _: {"mix": NamedWeight("rows", Size)}}
    with pytest.raises(ValueError, match=r"'mix' .* names \['rows'\], and its axes are"):
        dimension_numbers(Own(), overrides={"grouped": "adamw"}, rules=rules)


def test_a_leaf_of_other_axes_than_its_module_declares():
    layer = Linear.init(In, Out, key=KEY)
    layer = eqx.tree_at(lambda layer: layer.weight, layer, hax.ones((In, Out.resize(9))))
    with pytest.raises(ValueError, match=r"'weight' of shape \(2, 9\): its module names"):
        dimension_numbers(layer)


def test_abstract_parameters_and_heads():
    def build():
        return {
            "lm_head": Linear.init(In, Out, key=KEY),
            "readout": Linear.init(In, Out, key=KEY),
        }

    abstract = eqx.filter_eval_shape(build)
    found = dimension_numbers(abstract)(trained(build()))
    assert found["lm_head"].weight is None and found["readout"].weight == Dims(1, 0)
    numbers = dimension_numbers(abstract, overrides={"readout": "adamw"})
    assert numbers(abstract)["readout"].weight is None
    with pytest.raises(ValueError, match="'other' is no floating-point array"):
        dimension_numbers(abstract)({"other": jnp.asarray(np.ones(2))})


class Block(eqx.Module):
    norm: LayerNorm
    mlp: hax.nn.MLP

    @staticmethod
    def init(key):
        mlp = hax.nn.MLP.init(Embed, Embed.alias("embed_out"), Out, 1, key=key)
        return Block(LayerNorm.init(Embed), mlp)


def test_the_table_of_stacked_blocks():
    """The same by types and by path: norms and biases of a stack have two axes."""

    def build():
        return {
            "embeddings": Embedding.init(Experts, Embed, key=KEY),
            "blocks": Stacked.init(Layers, Block)(key=jax.random.split(KEY, 3)),
            "lm_head": Linear.init(Embed, Experts, key=KEY),
        }

    rules = {r"mlp\.layers\.\d\.weight": Dims(-1, -2), "blocks": "adamw"}
    with jax.numpy_rank_promotion("allow"):
        model = eqx.filter_eval_shape(build)
        for numbers in (dimension_numbers(model), by_path(rules)):
            optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
            rows = describe(model, optimizer).rows
            found = {r.path: (r.matrices, r.m, r.n) for r in rows if r.rule == "matrix"}
            assert found == {
                "blocks.stacked.mlp.layers.0.weight": (3, 4, 3),
                "blocks.stacked.mlp.layers.1.weight": (3, 3, 4),
            }
            assert {r.rule for r in rows if r.path not in found} == {"adamw"}
