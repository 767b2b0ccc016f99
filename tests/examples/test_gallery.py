"""The programs of the gallery run at tiny sizes, and do what they say."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from examples.gallery import (
    cifar,
    equinox_gpt,
    haiku_lm,
    haliax_mlp,
    host_offload,
    learning_rates,
    linen_train_state,
    lora,
    maxtext_style,
    mixture_of_experts,
    sharded_gpt,
)
from orscale_jax.flax import nnx_dimension_numbers


def assert_same(found, wanted):
    """Compare two trees of arrays to the bit."""
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.extended
def test_sharded_gpt():
    (losses, state), (resumed_losses, resumed) = sharded_gpt.main(8, width=16, layers=1)
    assert losses[-1] < losses[0]
    assert resumed_losses == losses[4:]
    assert_same(resumed, state)
    model, optimizer = nnx.to_pure_dict(state).values()
    matrix = model["blocks"]["layers"][0]["up"]["kernel"]
    [momentum] = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(optimizer)
        if "trace" in (keys := jax.tree_util.keystr(path)) and "['up']" in keys
    ]
    for array in (matrix, momentum):
        assert array.sharding.spec == jax.P("fsdp")
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, 64)}


@pytest.mark.extended
def test_linen_train_state():
    losses, state = linen_train_state.main(steps=10, width=16, layers=1)
    assert losses[-1] < losses[0]
    [(_, ratios)] = optax.tree.get_all_with_path(state.opt_state, "trust_ratio")
    shapes = {name: ratios["Block_0"][name]["kernel"].shape for name in ("qkv", "up")}
    assert shapes == {"qkv": (3,), "up": ()}  # Of each matrix, a ratio.
    assert not jax.tree.leaves(ratios["token_embed"])  # The tied head takes AdamW.


def test_mixture_of_experts():
    errors, state = mixture_of_experts.main(steps=40, experts=4, hidden=16)
    assert errors[-1] < errors[0] / 2
    [(_, ratios)] = optax.tree.get_all_with_path(state, "trust_ratio")
    assert ratios["up"].shape == ratios["down"].shape == (4,)
    assert len(set(ratios["down"].tolist())) == 4
    assert not jax.tree.leaves(ratios["router"])


@pytest.mark.extended
def test_mixture_of_experts_input_by_input():
    params = mixture_of_experts.init(jax.random.key(0), experts=4, hidden=8)
    x, _ = mixture_of_experts.batch(jax.random.key(1), count=10)
    y, _ = mixture_of_experts.mixture(params, x)
    for x_n, y_n in zip(x, y, strict=True):
        p = np.exp(x_n @ params["router"])
        best = np.argsort(p)[-2:]
        wanted = sum(
            p[e] * jax.nn.gelu(x_n @ params["up"][e]) @ params["down"][e] for e in best
        )
        np.testing.assert_allclose(y_n, wanted / p[best].sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_cifar(tmp_path):
    images, labels = cifar.draw(np.random.default_rng(1), 1500)
    planes = images.transpose(0, 3, 1, 2).reshape(1500, -1)
    path = tmp_path / "data_batch_1.bin"
    np.concatenate([labels[:, None], planes], axis=1).tofile(path)
    for found, wanted in zip(cifar.read(path), (images, labels), strict=True):
        np.testing.assert_array_equal(found, wanted)
    losses, accuracy, model = cifar.main(steps=60, width=8, path=path)
    assert losses[-1] < losses[0] / 2 and accuracy > 0.5  # Chance: 0.1.
    numbers = nnx_dimension_numbers(model)(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    kernels = [layer["kernel"] for layer in numbers["convolutions"].values()]
    assert kernels == [MuonDimensionNumbers((0, 1, 2), 3)] * 3
    assert numbers["head"]["kernel"] is None


def test_lora():
    losses, seen, model = lora.main(steps=60, width=16, rank=2)
    assert losses[-1] < losses[0] / 2
    assert seen[0] == (0, np.inf)  # A waits for B, which has no initial scale.
    assert 0 < seen[1].a < np.inf
    assert set(seen[1:]) == {seen[1]}
    fresh = lora.MLP(16, 2, nnx.Rngs(0))
    assert_same(*(nnx.state(m, nnx.Not(nnx.LoRAParam)) for m in (model, fresh)))


@pytest.mark.extended
def test_learning_rates():
    table = learning_rates.main(steps=40, width=8, rates=3)
    assert table.keys() == {"rate", "orscale", "muon", "adamw"}
    alone = learning_rates.train("orscale", float(table["rate"][1]), 40, 8)
    np.testing.assert_allclose(table["orscale"][1], alone, rtol=1e-4)
    for name in learning_rates.OPTIMIZERS:
        assert table[name].min() < table[name][0]  # The smallest rate is too small.


@pytest.mark.extended
def test_equinox_gpt():
    losses, model, state = equinox_gpt.main(steps=30, width=16, layers=3)
    assert losses[-1] < losses[0]
    [(_, ratios)] = optax.tree.get_all_with_path(state, "trust_ratio")
    assert ratios.blocks.attention.query_proj.weight.shape == (3,)  # A ratio per layer.
    assert not jax.tree.leaves((ratios.blocks.norms, ratios.token_embed, ratios.head))
    one = equinox_gpt.Block(16, jax.random.key(0)).mlp.layers[0].weight
    assert model.blocks.mlp.layers[0].weight.shape == (3, *one.shape)


@pytest.mark.extended
@pytest.mark.skipif(
    not hasattr(jax.core, "is_constant_dim"), reason="haliax.dot needs an older JAX"
)
def test_haliax_mlp():
    losses, model, state = haliax_mlp.main(steps=30, hidden=16, layers=2)
    assert losses[-1] < losses[0] / 2
    [(_, ratios)] = optax.tree.get_all_with_path(state, "trust_ratio")
    assert jax.tree.leaves(ratios.stack.weight)[0].shape == (2,)
    assert model.stack.weight.resolve_axis("layers").size == 2


@pytest.mark.extended
def test_haiku_lm():
    losses, params, state = haiku_lm.main(steps=10, width=16, layers=2)
    assert losses[-1] < losses[0]
    [(_, ratios)] = optax.tree.get_all_with_path(state, "trust_ratio")
    matrices = {
        name.rsplit("/", 1)[-1]: node["w"].shape
        for name, node in ratios.items()
        if "w" in node and jax.tree.leaves(node["w"])
    }
    assert matrices == dict.fromkeys(
        ["query", "key", "value", "linear", "up", "down"], (2,)
    )
    assert params["language_model/linear"]["w"].shape == (16, haiku_lm.LETTERS)
    assert not jax.tree.leaves(ratios["language_model/linear"])  # The head takes AdamW.


@pytest.mark.extended
def test_maxtext_style():
    losses, state = maxtext_style.main(steps=10, width=16, layers=2)
    assert losses[-1] < losses[0]
    attention = state.params["layers"]["self_attention"]
    query, out = attention["query"].value, attention["out"].value
    assert (query.shape, query.sharding.spec) == (
        (16, 2, 4, 4),
        jax.P("fsdp", None, "tensor", None),
    )
    assert (out.shape, out.sharding.spec) == (
        (4, 2, 4, 16),
        jax.P("tensor", None, None, "fsdp"),
    )
    [(_, trace)] = optax.tree.get_all_with_path(state.opt_state, "trace")
    momentum = trace["layers"]["self_attention"]["query"].value
    assert momentum.sharding.spec == query.sharding.spec
    [(_, ratios)] = optax.tree.get_all_with_path(state.opt_state, "trust_ratio")
    assert {leaf.shape for leaf in jax.tree.leaves(ratios)} == {
        (2,)
    }  # A ratio per layer.


@pytest.mark.extended
def test_host_offload():
    runs = host_offload.main(steps=3, width=16)
    (losses, state), *others = runs.values()
    assert host_offload.bytes_by_memory(state).keys() == {"device"}
    for other, on_host in others:
        assert other == losses
        assert_same(on_host, state)
    momentum, everything = (host_offload.bytes_by_memory(s) for _, s in others)
    assert momentum["pinned_host"] > 10 * momentum["device"]
    assert everything.keys() == {"pinned_host"}
