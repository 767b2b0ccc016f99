"""The programs of the gallery run at tiny sizes, and do what they say."""

import functools
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
    explicit_fsdp,
    from_pytorch,
    haiku_lm,
    linen_train_state,
    lora,
    maxtext_style,
    mixture_of_experts,
    nnx_gpt,
    one_layer_at_a_time,
    sharded_gpt,
    two_momenta,
    vit,
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
def test_nnx_gpt():
    losses, description = nnx_gpt.main(steps=20, width=16, layers=1)
    assert all(curve[-1] < curve[0] for curve in losses.values())
    assert losses["AdamW"][0] == losses["muon"][0]  # The same weights and batch.
    rules = {row.path: row.rule for row in description.rows}
    assert (
        rules["blocks.0.attention.out.kernel"] == rules["blocks.0.up.kernel"] == "matrix"
    )
    assert rules["readout.kernel"] == rules["embed.embedding"] == "adamw"


@pytest.mark.extended
def test_linen_train_state():
    losses, state = linen_train_state.main(steps=10, width=16, layers=1)
    assert losses[-1] < losses[0]
    optimizer = orscale(1e-3, weight_dimension_numbers=linen_train_state.NUMBERS)
    rows = {row.path: row for row in describe(state.params, optimizer).rows}
    assert rows["0_qkv.kernel"].matrices == 3 and rows["0_up.kernel"].matrices == 1
    assert rows["token_embed.embedding"].rule == "adamw"  # The tied head, too.


@pytest.mark.extended
def test_explicit_fsdp():
    losses, on_four, model = explicit_fsdp.main(8)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(on_four, losses[4:], rtol=1e-4)
    for array in jax.tree.leaves(nnx.state(model)):
        assert jax.typeof(array).sharding.spec[0] == "fsdp"
        assert len(array.devices()) == 4


@pytest.mark.extended
def test_vit():
    losses, _, state = vit.main(steps=8, width=16, layers=1)
    assert losses[-1] < losses[0]
    rows = {row.path: row for row in describe(state.params, state.tx).rows}
    patch, token = rows["patch.kernel"], rows["cls_token"]
    assert (patch.rule, patch.matrices, patch.m, patch.n) == ("matrix", 1, 8 * 8 * 3, 16)
    assert token.rule == rows["pos_embed"].rule == "adamw"
    assert rows["readout.kernel"].rule == "adamw"  # No name says so: a trace does.


@pytest.mark.extended
def test_mixture_of_experts():
    errors, reading = mixture_of_experts.main(steps=40, experts=4, hidden=16)
    assert errors[-1] < errors[0] / 2
    ratios = reading.trust_ratio
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
def test_cifar():
    losses, accuracy, model = cifar.main(steps=60, width=8)
    assert losses[-1] < losses[0] / 2 and accuracy > 0.5  # Chance: 0.1.
    numbers = nnx_dimension_numbers(model)(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    kernels = [layer["kernel"] for layer in numbers["convolutions"].values()]
    assert kernels == [MuonDimensionNumbers((0, 1, 2), 3)] * 3
    assert numbers["head"]["kernel"] is None


@pytest.mark.extended
def test_lora(monkeypatch):
    monkeypatch.setattr(lora, "RATES", (3e-3,))
    found = lora.main(40, width=16, rank=2)
    assert [*found] == ["no training", "AdamW", "Muon", "OrScale"]
    _, _, base, _ = found["no training"]
    losses = [float(loss) for loss, *_ in found.values()]
    for _, rate, model, _ in [*found.values()][1:]:
        assert rate == 3e-3
        assert_same(*(nnx.state(m, lora.FROZEN) for m in (model, base)))
    assert max(losses[1:]) < losses[0]
    # A has waited for B, which has no initial scale.
    state = nnx.to_pure_dict(nnx.state(found["OrScale"][3]))["opt_state"]
    [(_, numbers)] = optax.tree.get_all_with_path(state, "numbers")
    adapter = numbers["layers"][0]["lora"]
    assert adapter["lora_a"][0] > 0 == adapter["lora_b"][0]


@pytest.mark.extended
def test_equinox_gpt():
    losses, model, state = equinox_gpt.main(steps=30, width=16, layers=3)
    assert losses[-1] < losses[0]
    [(_, momenta)] = optax.tree.get_all_with_path(state, "trace")
    one = equinox_gpt.Block(16, jax.random.key(0)).mlp.layers[0].weight
    assert momenta.blocks.mlp.layers[0].weight.shape == (3, *one.shape)
    assert not jax.tree.leaves((momenta.embeds, momenta.head))
    assert model.blocks.mlp.layers[0].weight.shape == (3, *one.shape)


@pytest.mark.extended
def test_haiku_lm():
    losses, params, state = haiku_lm.main(steps=10, width=16, layers=2)
    assert losses[-1] < losses[0]
    [(_, momenta)] = optax.tree.get_all_with_path(state, "trace")
    matrices = {
        name.rsplit("/", 1)[-1]: len(node["w"])
        for name, node in momenta.items()
        if "w" in node and jax.tree.leaves(node["w"])
    }
    names = ["query", "key", "value", "linear", "up", "down"]
    assert matrices == dict.fromkeys(names, 2)
    assert params["head"]["w"].shape == (16, 16)  # It takes AdamW.


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


@pytest.mark.extended
def test_accumulation():
    code, resumed, whole = accumulation.main()
    assert code == -signal.SIGKILL
    assert_same(resumed, whole)
    key = jax.random.key(accumulation.STEPS)
    first = accumulation.loss_fn(accumulation.initial_state()["params"], key)
    for params in (whole["params"], whole["average"]):
        assert accumulation.loss_fn(params, key) < first / 2


def test_accumulation_is_the_step_of_the_whole_batch():
    """The mean over micro-batches is the gradient of the whole batch, and is clipped."""
    state = accumulation.initial_state()
    params = state["params"]
    keys = jax.random.split(jax.random.key(3), accumulation.MICRO_BATCHES)

    def loss_of_all(params):
        return jnp.mean(jax.vmap(accumulation.loss_fn, (None, 0))(params, keys))

    grads = jax.grad(loss_of_all)(params)
    updates, _ = accumulation.OPTIMIZER.update(grads, state["opt"], params)
    wanted = optax.apply_updates(params, updates)
    after = accumulation.train_step(state, 3)
    for name, leaf in wanted.items():
        np.testing.assert_allclose(after["params"][name], leaf, atol=1e-4)
        average = accumulation.EMA_DECAY * params[name] + 0.1 * after["params"][name]
        np.testing.assert_allclose(after["average"][name], average, atol=1e-6)


@pytest.mark.extended
def test_from_pytorch():
    losses, before, after = from_pytorch.main(steps=150)
    assert losses[-1] < losses[0] / 2
    assert [x.shape for x in after.values()] == [before[name].shape for name in after]
    optimizer = orscale(1e-3, weight_dimension_numbers=from_pytorch.NUMBERS)
    rows = {row.path: row for row in describe(before, optimizer).rows}
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
def test_two_momenta():
    losses = two_momenta.main(steps=40, width=8)
    assert losses.keys() == {"muon", "two momenta"}
    assert max(losses.values()) < 2.5


@pytest.mark.extended
def test_one_layer_at_a_time():
    sizes = one_layer_at_a_time.Sizes(2, 32, 2, 1, 64, 64, 2)
    losses, params, state = one_layer_at_a_time.main(steps=40, sizes=sizes)
    assert losses[-1] < losses[0] - 1
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    [(_, trace)] = optax.tree.get_all_with_path(state["layers"], "trace")
    assert trace["query"].shape == params["layers"]["query"].shape == (2, 32, 32)
    for name, leaf in (("embedding", "embedding"), ("head", "lm_head")):
        [(_, mu)] = optax.tree.get_all_with_path(state[name], "mu")
        assert (mu[leaf].dtype, mu[leaf].shape) == (jnp.int8, (2, 32, 32))


@pytest.mark.extended
def test_one_layer_at_a_time_has_the_gradients_of_the_whole_loss():
    """Pieces and layers together: by the steps of gradient descent, in float32."""
    sizes = one_layer_at_a_time.Sizes(2, 32, 2, 1, 64, 64, 4)
    params = one_layer_at_a_time.init_params(sizes, jax.random.key(0))
    params = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    batch = jax.random.randint(jax.random.key(1), (3, 17), 0, 64)
    optimizer = optax.sgd(1.0)
    layer = functools.partial(one_layer_at_a_time.layer, sizes)
    state = one_layer_at_a_time.init_state(optimizer, params)
    step = functools.partial(one_layer_at_a_time.train_step, optimizer, layer)
    after, _, found, norm = jax.jit(step)(params, state, batch)

    @jax.jit
    def loss(params):
        tables = params["embedding"]["embedding"], params["head"]["lm_head"]
        embedding, head = (table.reshape(64, 32) for table in tables)
        x = embedding[batch[:, :-1]]
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])
        logits = one_layer_at_a_time.norm(params["norm"]["scale"], x) @ head.T
        return optax.losses.softmax_cross_entropy_with_integer_labels(
            logits, batch[:, 1:]
        ).mean()

    wanted, grads = jax.value_and_grad(loss)(params)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    jax.tree.map(
        lambda old, new, g: np.testing.assert_allclose(old - new, g, atol=1e-6),
        params,
        after,
        grads,
    )
    del grads["norm"]  # The norm is that of the layers and the pieces.
    np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=1e-5)
