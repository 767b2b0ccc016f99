"""The programs of the gallery run at tiny sizes, and do what they say."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from examples.gallery import (
    accumulation,
    cifar,
    equinox_gpt,
    estimate,
    from_pytorch,
    haiku_lm,
    haliax_mlp,
    host_offload,
    learning_rates,
    linen_train_state,
    lora,
    maxtext_style,
    mixture_of_experts,
    rates_by_class,
    sharded_gpt,
    switched_schedule,
)
from orscale_jax import describe, orscale
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


@pytest.mark.extended
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


@pytest.mark.extended
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


@pytest.mark.extended
def test_accumulation():
    code, resumed, whole = accumulation.main()
    assert code == -signal.SIGKILL
    assert_same(resumed, whole)
    first = accumulation.evaluate(accumulation.initial_state()["params"])
    for params in (whole["params"], whole["average"]):
        assert accumulation.evaluate(params) < first / 2


def test_accumulation_is_the_step_of_the_whole_batch():
    """The mean over micro-batches is the gradient of the whole batch, and is clipped."""
    state = accumulation.initial_state()
    params = jax.tree.map(jnp.copy, state["params"])
    keys = jax.random.split(jax.random.key(3), accumulation.MICRO_BATCHES)

    def loss_of_all(params):
        return jnp.mean(jax.vmap(accumulation.loss_fn, (None, 0))(params, keys))

    grads = jax.grad(loss_of_all)(params)
    updates, _ = accumulation.OPTIMIZER.update(grads, state["opt"], params)
    wanted = optax.apply_updates(params, updates)
    after, loss = accumulation.train_step(state, 3)
    np.testing.assert_allclose(loss, loss_of_all(params), rtol=1e-5)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(after["params"][name], leaf, atol=1e-4)
        average = accumulation.EMA_DECAY * params[name] + 0.1 * after["params"][name]
        np.testing.assert_allclose(after["average"][name], average, atol=1e-6)


@pytest.mark.extended
def test_rates_by_class():
    losses, before, after, description = rates_by_class.main(steps=150)
    assert losses[-1] < losses[0] / 2
    np.testing.assert_array_equal(before["embed"], after["embed"])
    factors = {row.path: row.multipliers[0] for row in description.rows}
    assert factors["attention.query"] == 1 and factors["mlp.up"] == 2
    assert factors["norm.scale"] == factors["lm_head"] == 0.5
    [frozen] = description.select("embed").rows
    assert (frozen.rule, frozen.state_bytes) == ("stateless", 0)
    decays = rates_by_class.decays(before)
    assert decays["lm_head"] and decays["mlp"]["up"] and not decays["norm"]["scale"]


@pytest.mark.extended
def test_rates_by_class_are_those_of_each_class():
    params = rates_by_class.init(jax.random.key(0), 8)
    optimizer = rates_by_class.make_optimizer(0.01, 10)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    # Without a gradient AdamW's parameters only decay; matrices wait for their first one.
    np.testing.assert_allclose(updates["lm_head"], -0.0005 * params["lm_head"], rtol=1e-4)
    grads = jax.grad(rates_by_class.loss_fn)(params, jax.random.key(1))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    norms = jax.tree.map(jnp.linalg.norm, updates)
    alone, _ = orscale(0.01, weight_decay=0.1).update(
        grads, orscale(0.01, weight_decay=0.1).init(params), params
    )
    alone = jax.tree.map(jnp.linalg.norm, alone)
    for name, factor in (("attention", 1.0), ("mlp", 2.0)):
        for matrix, norm in norms[name].items():
            np.testing.assert_allclose(norm, factor * alone[name][matrix], rtol=1e-4)


@pytest.mark.extended
def test_switched_schedule():
    losses, rates, switched = switched_schedule.main(width=8)
    assert 0 < switched < len(losses) == len(rates)
    assert len(rates) - switched == switched_schedule.COOLDOWN
    np.testing.assert_allclose(rates[: switched + 1], switched_schedule.RATE, rtol=1e-6)
    falls = np.diff(rates[switched:])
    np.testing.assert_allclose(falls, falls[0], rtol=1e-3)
    assert falls[0] < 0
    assert np.mean(losses[-10:]) < np.mean(losses[switched - 10 : switched])
    assert switched_schedule.train_step._cache_size() == 1


@pytest.mark.extended
def test_from_pytorch():
    losses, before, after = from_pytorch.main(steps=150)
    assert losses[-1] < losses[0] / 2
    assert [x.shape for x in after.values()] == [before[name].shape for name in after]
    rows = {row.path: row for row in describe(before, from_pytorch.NUMBERS).rows}
    counts = {name: row.matrices for name, row in rows.items() if row.rule == "matrix"}
    assert counts == {
        "attn.in_proj_weight": 3,
        "attn.out_proj.weight": 1,
        "conv.weight": 1,
        "mlp.fc1.weight": 1,
        "mlp.fc2.weight": 1,
    }
    assert (rows["conv.weight"].m, rows["conv.weight"].n) == (12, 16)  # Inputs, outputs.


@pytest.mark.extended
def test_estimate():
    one = estimate.estimate(
        orscale(1e-3, weight_dimension_numbers=estimate.NUMBERS), (1, 1, 1)
    )
    matrices = estimate.LAYERS * 12 * estimate.WIDTH**2
    table, norms = estimate.VOCABULARY * estimate.WIDTH, estimate.LAYERS * estimate.WIDTH
    assert one.weights == 4 * (matrices + table + norms)
    # Momentum of the matrices, two moments of all else; besides, some scalars per matrix.
    assert 0 <= one.state - 4 * (matrices + 2 * (table + norms)) < 5_000
    assert one.sent == 0
    found = estimate.main()
    for lengths, of_device in found.items():
        parts = lengths[1] * lengths[2]
        assert of_device.weights == 4 * ((matrices + table) / parts + norms)
    by_hand = (matrices * 2 / 64) * (63 / 64) * 2  # bfloat16, to a whole matrix and back.
    np.testing.assert_allclose(found[1, 64, 1].sent, by_hand, rtol=0.2)
