"""The language models against recordings of the paper's, and by themselves."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers as Dims

from examples.pretrain.meshes import MeshConfig, make_mesh, rules_of
from examples.pretrain.models import dense, moonlight
from examples.pretrain.models.layers import count_parameters, rotate
from examples.pretrain.models.moonlight import MOONLIGHT_16B_A3B
from examples.pretrain.models.sharding import shardings
from orscale_jax import describe, orscale
from orscale_jax.flax import nnx_dimension_numbers
from tests.examples.pretrain import tiny
from tests.examples.pretrain.recorded_models import (
    expert_layers,
    parameters,
    recorded,
    recorded_dense,
    recorded_moonlight,
    split_tokens,
)
from tests.examples.recorded import assert_close

in_both_precisions = pytest.mark.parametrize("dtype", ["float32", "float64"])
scanned_or_not = pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])


@pytest.fixture(autouse=True)
def precision(request):
    """Double precision for tests with dtype="float64"."""
    arguments = getattr(request.node, "callspec", None)
    double = arguments and arguments.params.get("dtype") == "float64"
    with jax.enable_x64(bool(double)):
        yield


def log_likelihood_loss(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def by_path(tree):
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }


@pytest.mark.quick_first_case
@in_both_precisions
@scanned_or_not
@pytest.mark.parametrize("name", ["dense", "moe", "moe_six_experts"])
def test_a_model_is_the_recorded_one(name, scan, dtype):
    recording, mixture = recorded(name), name.startswith("moe")
    build = recorded_moonlight if mixture else recorded_dense
    model, place = build(name, scan, dtype, remat=scan)
    inputs, targets = split_tokens(recording)

    @nnx.jit
    def by_hidden_states(model):  # For a loss that never holds all logits.
        hidden = model.hidden(inputs)
        hidden = hidden[0] if mixture else hidden
        return model.logits(hidden), hidden @ model.head_DxV

    @nnx.jit
    def value_and_grad(model):
        def loss(model):
            out = model(inputs)
            logits, routing = out if mixture else (out, None)
            lm_loss = log_likelihood_loss(logits, targets)
            aux = routing.aux_loss if mixture else 0
            return lm_loss + aux, (lm_loss, logits, routing)

        return nnx.value_and_grad(loss, has_aux=True)(model)

    (_, (loss, logits, routing)), gradients = value_and_grad(model)
    assert logits.dtype == dtype
    for found in (logits, *by_hidden_states(model)):
        assert_close(found, recording["logits"], dtype)
    assert_close(loss, recording["lm_loss"], dtype)
    if mixture:
        assert_close(routing.aux_loss, recording["aux_loss"], dtype)
        layers = expert_layers(recording)
        fractions = [recording[f"fraction/{layer}"] for layer in layers]
        assert_close(routing.fraction, np.stack(fractions), dtype)
    recording.assert_same_gradients(nnx.to_pure_dict(gradients), place, dtype)


@pytest.mark.extended
def test_a_fused_qkv_is_query_key_and_value_side_by_side():
    config = dense.DenseConfig(vocab_size=11, width=16, layers=1, heads=2, scan=False)
    fused = dense.Dense(config, nnx.Rngs(0))
    apart = dense.Dense(dataclasses.replace(config, fused_qkv=False), nnx.Rngs(1))
    weights = parameters(fused)
    attention = weights["blocks"][0]["attention"]
    kernels = jnp.split(attention.pop("qkv")["kernel"], 3, axis=1)
    attention |= {
        name: {"kernel": kernel}
        for name, kernel in zip(("query", "key", "value"), kernels, strict=True)
    }
    nnx.update(apart, weights)
    tokens = jnp.arange(10)[None]
    np.testing.assert_allclose(apart(tokens), fused(tokens), atol=1e-5)


@pytest.mark.parametrize(
    "preset, total, without_embeddings",
    [
        ("125m", 123_587_328, 84_953_856),
        ("399m", 417_043_968, 339_777_024),
        ("545m", 629_689_088, 539_544_320),
        ("1.1b", 1_262_603_520, 1_146_703_104),
    ],
)
def test_parameters_of_the_dense_models(preset, total, without_embeddings):
    """125M is all of them; 545M and 1.1B are those without embeddings, to 4 %.

    399M is neither: its name is that of Moonlight's model of the same sizes.
    """
    config = dense.PRESETS[preset]
    assert (
        count_parameters(nnx.eval_shape(lambda: dense.Dense(config, nnx.Rngs(0))))
        == total
    )
    assert total - config.vocab_size * config.width == without_embeddings


@pytest.mark.quick_first_case
@pytest.mark.parametrize("scan", [True, False])
def test_parameters_of_moonlight_16b_a3b(scan):
    config = dataclasses.replace(MOONLIGHT_16B_A3B, scan=scan)
    model = nnx.eval_shape(lambda: moonlight.Moonlight(config, nnx.Rngs(0)))
    assert round(count_parameters(model) / 1e6, 1) == 15_958.1
    assert round(moonlight.count_active_parameters(model) / 1e6, 1) == 2_241.7
    assert "routing_bias" not in parameters(model)
    tokens = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    logits, routing = nnx.eval_shape(lambda model, x: model(x), model, tokens)
    assert logits.shape == (1, 8192, 163_840)
    assert routing.fraction.shape == (26, 64)


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (tiny.DENSE, {"heads": 3}, "width=64 with heads=3: the width has to be an even"),
        (tiny.MOONLIGHT, {"dense_layers": 3}, "dense_layers=3 of layers=3: at least one"),
        (tiny.MOONLIGHT, {"experts_per_token": 9}, "=9: choose between 1 and experts=8"),
        (tiny.MOONLIGHT, {"rope_dim": 15}, "rope_dim=15: rotary positions turn pairs"),
    ],
)
def test_sizes_that_make_no_model(config, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


# All of them

MODELS = {
    "dense": (dense.Dense, tiny.DENSE),
    "apart": (dense.Dense, dataclasses.replace(tiny.DENSE, fused_qkv=False)),
    "moonlight": (moonlight.Moonlight, tiny.MOONLIGHT),
}


def abstract(name, **changes):
    kind, config = MODELS[name]
    config = dataclasses.replace(config, **changes)
    return nnx.eval_shape(lambda: kind(config, nnx.Rngs(0)))


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", MODELS)
def test_activations_in_bfloat16_of_weights_in_float32(name):
    model = abstract(name, dtype="bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(parameters(model))} == {"float32"}
    out = nnx.eval_shape(lambda m: m(jnp.zeros((2, 8), jnp.int32)), model)
    if name == "moonlight":
        out, routing = out
        assert routing.fraction.dtype == routing.aux_loss.dtype == jnp.float32
    assert out.dtype == jnp.bfloat16


@pytest.mark.extended
def test_a_token_reaches_all_later_logits_and_no_earlier_one():
    """Moonlight's attention mixes values by the same function."""
    config = dataclasses.replace(tiny.DENSE, width=16)
    model, T = dense.Dense(config, nnx.Rngs(0)), 12
    before = np.random.default_rng(0).integers(0, 256, T)
    after = np.where(np.eye(T, dtype=bool), (before + 1) % 256, before)
    logits = np.asarray(nnx.jit(lambda m, x: m(x))(model, jnp.asarray([before, *after])))
    changes = np.abs(logits[1:] - logits[0]).max(-1)  # By changed token and position.
    reached = np.triu(np.ones((T, T), bool))
    assert changes[~reached].max() < 1e-5
    assert changes[reached].min() > 1e-3


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_scale_with_fan_in(name):
    """Weights of products do; for those of the embedding the width is the fan-in."""
    kind, config = MODELS[name]
    params = by_path(parameters(kind(config, nnx.Rngs(0))))
    for path, x in params.items():
        if path.endswith("scale"):
            assert (x == 1).all()
        else:
            fan_in = x.shape[-1 if path.startswith("embed") else -2]
            rms = np.sqrt(np.mean(np.square(x)))
            assert rms == pytest.approx(fan_in**-0.5, rel=0.1), path


def test_a_rotation_is_seen_only_as_distance():
    T, H = 16, 8
    query, key = np.random.default_rng(0).normal(size=(2, H)).astype(np.float32)

    def everywhere(x):
        return rotate(jnp.broadcast_to(x, (1, T, 1, H)), 10_000.0)[0, :, 0]

    scores = np.asarray(everywhere(query) @ everywhere(key).T)
    for offset in range(-T + 1, T):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(scores[0]) > 0.5
    np.testing.assert_allclose(np.diagonal(scores), query @ key, atol=1e-5)


def matrices(model, numbers):
    """The number and shape of the matrices of each parameter, in `describe`'s table."""
    rows = describe(
        parameters(model), orscale(1e-3, weight_dimension_numbers=numbers)
    ).rows
    return {
        re.sub(r"^(dense_)?blocks\.(\d+\.)?", "", row.path): (row.matrices, row.m, row.n)
        for row in rows
        if row.rule == "matrix"
    }


def test_matrices_of_dense_models():
    rest = {"attention.out.kernel": (2, 64, 64)}
    rest |= {"mlp.up.kernel": (2, 64, 256), "mlp.down.kernel": (2, 256, 64)}
    model, apart = abstract("dense"), abstract("apart")
    found = matrices(model, nnx_dimension_numbers(model))
    assert found == rest | {"attention.qkv.kernel": (2, 64, 192)}
    assert len(matrices(apart, nnx_dimension_numbers(apart))) == 6


@pytest.mark.quick_first_case
@scanned_or_not
def test_matrices_of_moonlight(scan):
    model = abstract("moonlight", scan=scan)
    numbers = moonlight.weight_dimension_numbers(model)
    layers = 2 if scan else 1  # In a parameter.
    found = matrices(model, numbers)
    assert {name: found[name] for name in found if name.startswith("mixture")} == {
        "mixture.router.kernel": (layers, 64, 8),
        "mixture.experts.gate": (8 * layers, 64, 64),
        "mixture.experts.up": (8 * layers, 64, 64),
        "mixture.experts.down": (8 * layers, 64, 64),
        "mixture.shared.gate.kernel": (layers, 64, 64),
        "mixture.shared.up.kernel": (layers, 64, 64),
        "mixture.shared.down.kernel": (layers, 64, 64),
    }
    latent = {name: shape[1:] for name, shape in found.items() if "kv" in name}
    assert latent == {
        "attention.kv_down.kernel": (64, 48),
        "attention.kv_up.kernel": (32, 128),
    }
    for_adamw = moonlight.weight_dimension_numbers(model, router="adamw")
    assert found.keys() - matrices(model, for_adamw) == {"mixture.router.kernel"}
    with pytest.raises(ValueError, match="router='sgd': choose one of matrix, adamw"):
        moonlight.weight_dimension_numbers(model, router="sgd")


def test_every_expert_of_every_layer_has_a_ratio_of_its_own():
    model = abstract("moonlight")
    numbers = moonlight.weight_dimension_numbers(model)
    optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
    state = jax.eval_shape(optimizer.init, parameters(model))
    [(_, ratios)] = optax.tree.get_all_with_path(state, "numbers")
    shapes = {path: leaf.shape for path, leaf in by_path(ratios).items()}
    assert shapes["blocks.mixture.experts.up"] == (7, 2, 8)
    assert shapes["blocks.mixture.router.kernel"] == (7, 2)
    assert shapes["dense_blocks.0.mlp.up.kernel"] == (7,)
    found = numbers(parameters(model))["blocks"]["mixture"]["experts"]["down"]
    assert found == Dims(2, 3)


# On meshes: what a run there comes to is in test_meshes.py.

MESH = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))


def test_names_of_axes_become_axes_of_the_mesh():
    state = nnx.state(abstract("moonlight"))
    where = by_path(nnx.to_pure_dict(shardings(state, rules_of(MESH), MESH)))
    specs = {path: sharding.spec for path, sharding in where.items()}
    assert specs["routing_bias"] == jax.P(None, None)
    assert specs["blocks.mixture.experts.up"] == jax.P(None, "expert", "fsdp", "tensor")
    assert specs["blocks.mixture.experts.down"] == jax.P(None, "expert", "tensor", "fsdp")
    assert specs["dense_blocks.0.mlp.down.kernel"] == jax.P("tensor", "fsdp")
    assert specs["embed.embedding"] == jax.P("tensor", "fsdp")
    ranks = {path: x.ndim for path, x in by_path(nnx.to_pure_dict(state)).items()}
    assert ranks == {path: len(spec) for path, spec in specs.items()}


def test_a_name_without_a_rule():
    rules = [rule for rule in rules_of(MESH) if rule[0] != "length"]
    with (
        jax.set_mesh(MESH),
        nnx.logical_axis_rules(rules),
        pytest.raises(ValueError, match="no rule for the logical axis 'length': add one"),
    ):
        nnx.eval_shape(lambda m: m(jnp.zeros((8, 8), jnp.int32)), abstract("dense"))
