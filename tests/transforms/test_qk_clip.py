"""QK-Clip against NumPy, by the attention logits that it caps."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import AxisType, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import AttentionHeads, QKClipState, QueryKey, orscale, qk_clip

INPUTS, HEADS, FEATURES, ROTARY, TOKENS = 12, 4, 6, 4, 9
PLAIN = QueryKey("query.kernel", "key.kernel")
BIASED = QueryKey(("query.kernel", "query.bias"), ("key.kernel", "key.bias"))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def projections(heads=HEADS, key_heads=HEADS, seed=0):
    """Queries and keys as Flax has them, in float64."""
    return {
        name: {
            "kernel": normal(seed + i, INPUTS, count, FEATURES),
            "bias": normal(seed + 10 + i, count, FEATURES),
        }
        for i, (name, count) in enumerate([("query", heads), ("key", key_heads)])
    }


def rotate(x):
    """Rotary position embedding of (tokens, heads, features), by halves."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] / 10.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention_logits(params, position=lambda x: x):
    """(query heads, tokens, tokens) of multi-head or grouped-query attention."""
    x = 3 * normal(100, TOKENS, INPUTS)
    q, k = (
        position(np.einsum("ti,ihf->thf", x, p["kernel"]) + p["bias"])
        for p in (params["query"], params["key"])
    )
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return np.einsum("thf,shf->hts", q, k) / np.sqrt(q.shape[-1])


def latent_params(seed=0):
    """Up-projections and the shared rotary key of latent attention."""
    return {
        "q_up": normal(seed, INPUTS, HEADS, FEATURES + ROTARY),
        "kv_up": normal(seed + 1, INPUTS, HEADS, FEATURES + 3),
        "k_rotary": normal(seed + 2, INPUTS, ROTARY),
    }


LATENT = QueryKey(
    query=AttentionHeads("q_up", part=(0, FEATURES)),
    key=AttentionHeads("kv_up", part=(0, FEATURES)),
    rotary_query=AttentionHeads("q_up", part=(FEATURES, FEATURES + ROTARY)),
)


def latent_logits(params):
    x = 3 * normal(100, TOKENS, INPUTS)
    q = np.einsum("ti,ihf->thf", x, params["q_up"])
    k = np.einsum("ti,ihf->thf", x, params["kv_up"])[..., :FEATURES]
    shared = rotate((x @ params["k_rotary"])[:, None])
    logits = np.einsum("thf,shf->hts", q[..., :FEATURES], k)
    logits += np.einsum("thf,sf->hts", rotate(q[..., FEATURES:]), shared[:, 0])
    return logits / np.sqrt(FEATURES + ROTARY)


def per_head(logits):
    return logits.max(axis=(-2, -1))


def between(max_logits):
    """A threshold that half of the heads exceed."""
    low, high = np.sort(max_logits)[len(max_logits) // 2 - 1 :][:2]
    return float(low + high) / 2


def as_jax(tree, dtype=None):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def as_numpy(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def step(transform, params, max_logits, updates=None):
    """New parameters, updates and state of one step."""
    if updates is None:
        updates = optax.tree.zeros_like(params)
    updates, state = jax.jit(transform.update)(
        updates, transform.init(params), params, max_logits=max_logits
    )
    return optax.apply_updates(params, updates), updates, state


def assert_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Logits after the clip.


@pytest.mark.parametrize("alpha", [0.5, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("position", [lambda x: x, rotate], ids=["plain", "rotary"])
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_clipped_heads_end_at_the_threshold(enable_x64, key_heads, position, alpha):
    """Multi-head, grouped-query, multi-query: gamma scales every logit of its head."""
    params = projections(key_heads=key_heads)
    before = attention_logits(params, position)
    threshold = between(per_head(before))
    transform = qk_clip(BIASED, threshold=threshold, alpha=alpha)
    after, _, state = step(transform, as_jax(params), per_head(before))
    gamma = np.minimum(1, threshold / per_head(before))
    assert (gamma < 1).sum() == HEADS // 2
    found = attention_logits(as_numpy(after), position)
    np.testing.assert_allclose(found, gamma[:, None, None] * before, rtol=1e-12)
    np.testing.assert_allclose(per_head(found)[gamma < 1], threshold, rtol=1e-12)
    np.testing.assert_allclose(found[gamma == 1], before[gamma == 1], rtol=1e-12)
    np.testing.assert_allclose(state.qk_clip_factor, gamma, rtol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0])
def test_latent_attention(enable_x64, alpha):
    params = latent_params()
    before = latent_logits(params)
    threshold = between(per_head(before))
    transform = qk_clip(LATENT, threshold=threshold, alpha=alpha)
    after, updates, _ = step(transform, as_jax(params), per_head(before))
    gamma = np.minimum(1, threshold / per_head(before))
    after = as_numpy(after)
    np.testing.assert_allclose(
        latent_logits(after), gamma[:, None, None] * before, rtol=1e-11
    )
    # Each part has its own share; the values and the shared key are the same to the bit.
    q, kv = after["q_up"] / params["q_up"], after["kv_up"] / params["kv_up"]
    for ratio, factor in (
        (q[..., :FEATURES], gamma**alpha),
        (q[..., FEATURES:], gamma),
        (kv[..., :FEATURES], gamma ** (1 - alpha)),
    ):
        expected = np.broadcast_to(factor[:, None], ratio.shape)
        np.testing.assert_allclose(ratio, expected, rtol=1e-12)
    assert not updates["kv_up"][..., FEATURES:].any()
    assert not updates["k_rotary"].any()


@pytest.mark.quick_first_case
@pytest.mark.parametrize("alpha", [0.5, 0.25])
def test_the_split_between_queries_and_keys(alpha):
    params = as_jax(projections())
    gamma = np.array([0.25, 1.0, 0.04, 1.0])
    after, _, _ = step(
        qk_clip(BIASED, alpha=alpha), params, jnp.array([400.0, 100.0, 2500.0, -3.0])
    )
    for name, power in (("query", alpha), ("key", 1 - alpha)):
        factor = (gamma**power)[:, None]
        for leaf in ("kernel", "bias"):
            np.testing.assert_allclose(
                after[name][leaf], factor * np.asarray(params[name][leaf]), rtol=2e-6
            )


@pytest.mark.extended
def test_a_shared_key_takes_the_strongest_clip():
    """The queries of its other heads grow by as much as the key shrinks."""
    params = as_jax(projections(key_heads=2))
    max_logits = jnp.array([400.0, 60.0, 99.0, 100.0])
    after, updates, _ = step(qk_clip(BIASED), params, max_logits)
    ratios = {
        name: np.asarray(after[name]["kernel"] / params[name]["kernel"]).mean((0, 2))
        for name in ("query", "key")
    }
    np.testing.assert_allclose(ratios["key"], [0.5, 1], rtol=1e-6)
    np.testing.assert_allclose(ratios["query"], [0.5, 2, 1, 1], rtol=1e-6)
    assert not updates["query"]["kernel"][:, 2:].any()


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "params_dtype, updates_dtype, rtol",
    [
        (jnp.float32, jnp.float32, 1e-6),
        (jnp.float32, jnp.bfloat16, 2**-8),
        (jnp.bfloat16, jnp.float32, 1e-6),
        (jnp.bfloat16, jnp.bfloat16, 2**-8),
        (jnp.float16, jnp.float16, 2**-10),
    ],
)
def test_updates_against_numpy(params_dtype, updates_dtype, rtol):
    """u' = factor (W + u) - W, rounded once."""
    params = as_jax(projections(key_heads=2), params_dtype)
    updates = as_jax(projections(key_heads=2, seed=50), updates_dtype)
    max_logits = jnp.array([400.0, 60.0, 150.0, 300.0])
    _, found, state = step(qk_clip(BIASED, alpha=0.25), params, max_logits, updates)
    gamma = np.minimum(1, 100 / np.asarray(max_logits, np.float64))
    key = gamma.reshape(2, 2).min(1) ** 0.75
    factors = {"query": gamma / key.repeat(2), "key": key}
    for name, factor in factors.items():
        for leaf in ("kernel", "bias"):
            w, u = (as_numpy(tree[name][leaf]) for tree in (params, updates))
            assert found[name][leaf].dtype == updates_dtype
            np.testing.assert_allclose(
                as_numpy(found[name][leaf]),
                factor[:, None] * (w + u) - w,
                rtol=rtol,
                atol=1e-6,
            )
    assert state.qk_clip_factor.dtype == jnp.float32


def test_float64_is_computed_in_float64(enable_x64):
    params = as_jax(projections())
    _, updates, state = step(qk_clip(PLAIN), params, jnp.full(HEADS, 300.0))
    expected = (np.sqrt(1 / 3) - 1) * params["key"]["kernel"]
    np.testing.assert_allclose(updates["key"]["kernel"], expected, rtol=1e-14)
    assert state.qk_clip_factor.dtype == jnp.float32


# Nothing to clip.


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_at_or_below_the_threshold_updates_pass_to_the_bit(dtype):
    params, updates = (as_jax(projections(seed=s), dtype) for s in (0, 50))
    max_logits = jnp.array([100.0, 99.9, 0.0, -1e30])
    _, found, state = step(qk_clip(BIASED), params, max_logits, updates)
    assert_bits(found, updates)
    assert (state.qk_clip_factor == 1).all()


def test_other_heads_and_parameters_pass_to_the_bit():
    params, updates = (
        as_jax(projections(seed=s) | {"out": normal(s, 3, 2), "absent": None})
        for s in (0, 50)
    )
    max_logits = jnp.array([100.0, 100.1, 3.0, 1e30])
    _, found, _ = step(qk_clip(PLAIN), params, max_logits, updates)
    assert found["absent"] is None
    assert_bits(found["out"], updates["out"])
    for name in ("query", "key"):
        assert_bits(found[name]["bias"], updates[name]["bias"])
        same = (found[name]["kernel"] == updates[name]["kernel"]).all(axis=(0, 2))
        np.testing.assert_array_equal(same, [True, False, True, False])


# Logits that are not finite.


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_give_nan(bad, alpha):
    params = as_jax(projections(key_heads=2))
    max_logits = jnp.array([bad, 10.0, 200.0, 10.0])
    after, _, state = step(qk_clip(BIASED, alpha=alpha), params, max_logits)
    np.testing.assert_array_equal(np.isnan(state.qk_clip_factor), [1, 0, 0, 0])
    for name, concerned in (("query", [1, 1, 0, 0]), ("key", [1, 0])):
        for leaf in ("kernel", "bias"):
            found = np.isnan(np.moveaxis(after[name][leaf], -2, 0).reshape(-1, FEATURES))
            expected = np.repeat(concerned, len(found) // len(concerned))
            np.testing.assert_array_equal(
                found, expected[:, None] & np.ones(FEATURES, int)
            )


def test_a_factor_that_underflows_is_not_zero():
    """A factor of zero would erase the head for good."""
    params = as_jax(projections())
    transform = qk_clip(BIASED, threshold=1e-12)
    after, _, _ = step(transform, params, jnp.full(HEADS, 1e38))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(after))


def test_debug_nans():
    with jax.debug_nans(True):
        step(qk_clip(BIASED), as_jax(projections()), jnp.array([0.0, 400.0, -1.0, 1.0]))


# Positions of the heads.


FACTOR = np.array([0.5, 1.0, 0.2, 1.0])
LOGITS = jnp.array([400.0, 100.0, 2500.0, 0.0])


@pytest.mark.quick_first_case
@pytest.mark.parametrize(
    "shape, heads, blocks",
    [
        # inputs × (heads features), as in Haiku; (heads features) × inputs, as in Torch.
        (
            (5, 12),
            {"axis": -1, "heads": 4},
            {(1, h): slice(3 * h, 3 * h + 3) for h in range(4)},
        ),
        (
            (12, 5),
            {"axis": 0, "heads": 4},
            {(0, h): slice(3 * h, 3 * h + 3) for h in range(4)},
        ),
        ((4, 3, 5), {"axis": 0}, {(0, h): h for h in range(4)}),
        # Heads of queries, then of values.
        ((5, 9, 3), {"span": (2, 6)}, {(1, h): h + 2 for h in range(4)}),
        (
            (5, 20),
            {"axis": 1, "heads": 4, "span": (8, 16)},
            {(1, h): slice(8 + 2 * h, 10 + 2 * h) for h in range(4)},
        ),
    ],
    ids=["flat", "torch", "first", "span", "flat span"],
)
def test_layouts(shape, heads, blocks):
    params = {"q": normal(0, *shape), "k": normal(1, 2, 4, 3)}
    entry = QueryKey(AttentionHeads("q", **heads), "k")
    after, _, _ = step(qk_clip(entry), as_jax(params), LOGITS)
    expected = params["q"].copy()
    for (axis, head), block in blocks.items():
        np.moveaxis(expected, axis, 0)[block] *= FACTOR[head]
    np.testing.assert_allclose(after["q"], expected, rtol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("flat", [False, True])
def test_a_part_of_each_head(flat):
    """k and v in one projection, with heads on a separate axis or not."""
    whole = normal(0, 5, 4, 8)
    expected = whole.copy()
    expected[..., 2:5] *= FACTOR[:, None]
    layout = {"axis": -1, "heads": 4} if flat else {}
    params = {"kv": whole.reshape(5, 32) if flat else whole, "q": normal(1, 5, 4, 2)}
    entry = QueryKey("q", AttentionHeads("kv", part=(2, 5), **layout))
    after, updates, _ = step(qk_clip(entry), as_jax(params), LOGITS)
    np.testing.assert_allclose(
        after["kv"], expected.reshape(after["kv"].shape), rtol=1e-5
    )
    outside = updates["kv"].reshape(5, 4, 8)[..., [0, 1, 5, 6, 7]]
    assert not outside.any()


def test_queries_keys_and_values_in_one_parameter():
    params = {"qkv": normal(0, 5, 3, 4, 2)}
    entry = QueryKey(
        *(AttentionHeads("qkv", part=(i, i + 1), part_axis=1) for i in range(2))
    )
    after, updates, _ = step(qk_clip(entry), as_jax(params), LOGITS)
    expected = params["qkv"] * np.stack([FACTOR, FACTOR, np.ones(4)])[..., None]
    np.testing.assert_allclose(after["qkv"], expected, rtol=1e-5)
    assert not updates["qkv"][:, 2].any()


@pytest.mark.extended
@pytest.mark.parametrize("layer_axis", [0, 1, -1])
def test_stacked_layers_equal_the_layers_alone(layer_axis):
    layers = [as_jax(projections(key_heads=2, seed=s)) for s in (0, 20, 40)]
    max_logits = jnp.asarray(200 * normal(3, 3, HEADS))
    axis = layer_axis % 4

    def stack(name, leaf):
        at = axis if leaf == "kernel" else 0
        return jnp.stack([layer[name][leaf] for layer in layers], axis=at)

    params = {
        name: {leaf: stack(name, leaf) for leaf in ("kernel", "bias")}
        for name in ("query", "key")
    }
    # The head axis counts from the end, and the layers may come after it.
    head_axis = -3 if layer_axis == -1 else -2

    def entry(name):
        kernel = AttentionHeads(f"{name}.kernel", head_axis, layer_axes=(layer_axis,))
        return kernel, f"{name}.bias"

    stacked = QueryKey(entry("query"), entry("key"), layer_axes=(0,))
    after, _, state = step(qk_clip(stacked), params, max_logits)
    assert state.qk_clip_factor.shape == (3, HEADS)
    for i, layer in enumerate(layers):
        alone, _, one = step(qk_clip(BIASED), layer, max_logits[i])
        np.testing.assert_allclose(state.qk_clip_factor[i], one.qk_clip_factor)
        for name in ("query", "key"):
            kernel = jnp.take(after[name]["kernel"], i, axis=axis)
            np.testing.assert_allclose(kernel, alone[name]["kernel"], rtol=1e-6)
            np.testing.assert_allclose(
                after[name]["bias"][i], alone[name]["bias"], rtol=1e-6
            )


def test_two_layer_axes_in_any_order():
    kernel = normal(0, 3, 5, 4, 2, 6)  # stages, inputs, heads, blocks, features
    params = as_jax({"q": kernel, "k": kernel})
    entry = QueryKey(
        AttentionHeads("q", axis=2), AttentionHeads("k", axis=2), layer_axes=(3, 0)
    )
    max_logits = jnp.asarray(100 + 300 * np.abs(normal(1, 2, 3, 4)))
    after, _, _ = step(qk_clip(entry), params, max_logits)
    factor = np.sqrt(100 / np.asarray(max_logits)).transpose(1, 2, 0)[:, None, ..., None]
    np.testing.assert_allclose(after["q"], kernel * factor, rtol=1e-5)


class Attention(NamedTuple):
    query: dict
    key: dict


class Block(nnx.Module):
    def __init__(self):
        self.attention = nnx.MultiHeadAttention(
            HEADS, 8, decode=False, rngs=nnx.Rngs(0), use_bias=False
        )


@pytest.mark.parametrize("container", ["dict", "frozen", "namedtuple", "list", "nnx"])
def test_containers(container):
    inner = as_jax(projections())
    params, prefix = {
        "dict": ({"attention": inner}, "attention."),
        "frozen": (FrozenDict({"attention": inner}), "attention."),
        "namedtuple": (Attention(**inner), ""),
        "list": ([inner], "0."),
        "nnx": (nnx.state(Block(), nnx.Param), "attention."),
    }[container]
    entry = QueryKey(f"{prefix}query.kernel", f"{prefix}key.kernel")
    after, updates, _ = step(qk_clip(entry), params, jnp.full(HEADS, 400.0))
    assert jax.tree.structure(after) == jax.tree.structure(params)
    moved = [
        "".join(str(getattr(k, "key", getattr(k, "name", ""))) + "." for k in path)
        for path, leaf in jax.tree.flatten_with_path(updates)[0]
        if leaf.any()
    ]
    assert len(moved) == 2
    assert all("kernel" in path for path in moved)
    assert "query" in "".join(moved) and "key" in "".join(moved)


@pytest.mark.extended
def test_several_modules_as_any_tree_or_a_callable():
    params = {"a": as_jax(projections()), "b": [as_jax(projections(key_heads=1, seed=7))]}
    attentions = {
        "a": QueryKey("a.query.kernel", "a.key.kernel"),
        "b": (QueryKey("b.0.query.kernel", "b.0.key.kernel"),),
    }
    max_logits = {"a": jnp.full(HEADS, 400.0), "b": (jnp.full(HEADS, 10.0),)}
    transform = qk_clip(attentions)
    after, updates, state = step(transform, params, max_logits)
    assert jax.tree.structure(state.qk_clip_factor) == jax.tree.structure(max_logits)
    assert (optax.tree.get(state, "qk_clip_factor")["a"] == 0.25).all()
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates["b"]))
    called, _, _ = step(qk_clip(lambda tree: attentions), params, max_logits)
    assert_bits(called, after)


# In a chain.


@pytest.mark.extended
@pytest.mark.parametrize(
    "optimizer",
    [
        orscale(
            1e-2,
            weight_dimension_numbers={
                name: {"kernel": Dims(0, (1, 2)), "bias": None}
                for name in ("query", "key")
            },
        ),
        optax.adamw(1e-2),
    ],
    ids=["orscale", "adamw"],
)
def test_last_link_of_a_chain(optimizer):
    """The result is the optimizer's own step, then scaled by the factors."""
    params, grads = as_jax(projections()), as_jax(projections(seed=50))
    chain = optax.chain(optimizer, qk_clip(BIASED))
    after, _, state = step(chain, params, LOGITS, grads)
    moved, _ = optimizer.update(grads, optimizer.init(params), params)
    moved = optax.apply_updates(params, moved)
    expected = jax.tree.map(lambda leaf: np.asarray(leaf) * FACTOR[:, None], moved)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, after, expected)
    found = optax.tree.get(state, "qk_clip_factor")
    np.testing.assert_allclose(found, FACTOR**2, rtol=1e-6)


@pytest.mark.extended
def test_multi_steps_clips_when_it_steps():
    params, grads = as_jax(projections()), as_jax(projections(seed=50))
    chain = optax.chain(optax.sgd(0.1), qk_clip(BIASED))
    optimizer = optax.MultiSteps(chain, every_k_schedule=2)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    updates, state = update(grads, state, params, max_logits=100 * LOGITS)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    updates, state = update(grads, state, params, max_logits=LOGITS)
    _, expected, _ = step(chain, params, LOGITS, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), updates, expected
    )


@pytest.mark.extended
def test_apply_if_finite_looks_at_gradients():
    params, grads = as_jax(projections()), as_jax(projections(seed=50))
    chain = optax.chain(optax.sgd(0.1), qk_clip(BIASED))
    optimizer = optax.apply_if_finite(chain, 3)
    _, expected, _ = step(chain, params, LOGITS, grads)
    after, updates, state = step(optimizer, params, LOGITS, grads)
    assert_bits(updates, expected)
    bad = grads | {"key": jax.tree.map(lambda g: g * jnp.nan, grads["key"])}
    after, _, state = step(optimizer, params, jnp.full(HEADS, jnp.nan), bad)
    assert_bits(after, params)
    assert (optax.tree.get(state, "qk_clip_factor") == 1).all()


@pytest.mark.extended
def test_injected_hyperparameters():
    injected = optax.inject_hyperparams(qk_clip)(attentions=BIASED, threshold=100.0)
    params = as_jax(projections())
    state = injected.init(params)
    update = jax.jit(injected.update)
    for threshold in (100.0, 50.0):
        state.hyperparams["threshold"] = jnp.float32(threshold)
        state.hyperparams["alpha"] = jnp.float32(0.25)
        found, _ = update(params, state, params, max_logits=LOGITS)
        plain = qk_clip(BIASED, threshold=threshold, alpha=0.25)
        _, expected, _ = step(plain, params, LOGITS, params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected
        )
    assert update._cache_size() == 1


# The compiled program.


def test_donation_and_one_compilation():
    optimizer = optax.chain(optax.adamw(1e-3), qk_clip(BIASED))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, grads, max_logits):
        updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
        return optax.apply_updates(params, updates), state

    params = as_jax(projections())
    state = jax.jit(optimizer.init)(params)
    signature = jax.tree.map(jax.typeof, state)
    for seed in range(4):
        old = jax.tree.leaves(params)
        max_logits = jnp.asarray(200 * normal(seed, HEADS), jnp.float32)
        params, state = train_step(
            params, state, as_jax(projections(seed=seed)), max_logits
        )
        assert all(leaf.is_deleted() for leaf in old)
    assert train_step._cache_size() == 1
    assert jax.tree.map(jax.typeof, state) == signature


@pytest.mark.extended
def test_scan_equals_the_loop_and_vmap_equals_each():
    optimizer = optax.chain(optax.sgd(0.1), qk_clip(BIASED))
    grads = as_jax(projections(seed=50))
    max_logits = jnp.asarray(300 * normal(1, 4, HEADS), jnp.float32)

    def one(carry, logits):
        params, state = carry
        updates, state = optimizer.update(grads, state, params, max_logits=logits)
        return (optax.apply_updates(params, updates), state), None

    params = as_jax(projections())
    carry = params, optimizer.init(params)
    looped = carry
    for logits in max_logits:
        looped, _ = one(looped, logits)
    scanned, _ = jax.lax.scan(one, carry, max_logits)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, scanned, looped)
    batched = jax.vmap(lambda logits: one(carry, logits)[0])(max_logits)
    for i, logits in enumerate(max_logits):
        jax.tree.map(lambda a, b: close(a[i], b), batched, one(carry, logits)[0])


@pytest.mark.compiled
def test_nothing_of_float64_or_of_the_host_in_the_program():
    params = as_jax(projections())
    transform = qk_clip(BIASED)
    lowered = jax.jit(transform.update).lower(
        params, transform.init(params), params, max_logits=LOGITS
    )
    assert "f64" not in lowered.as_text() and "callback" not in lowered.as_text()


@pytest.mark.parametrize("logits_dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_strict_dtype_promotion(logits_dtype):
    params = as_jax(projections(), jnp.bfloat16)
    updates = as_jax(projections(seed=50), jnp.float32)
    with jax.numpy_dtype_promotion("strict"):
        _, found, state = step_eager(params, updates, LOGITS.astype(logits_dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("f4")}
    assert state.qk_clip_factor.dtype == jnp.float32


def step_eager(params, updates, max_logits):
    transform = qk_clip(BIASED)
    state = transform.init(params)
    return params, *transform.update(updates, state, params, max_logits=max_logits)


def test_state_maps():
    params = as_jax(projections())
    for transform in (qk_clip({"a": BIASED}), qk_clip(lambda _: {"a": BIASED})):
        state = transform.init(params)
        mapped = optax.tree.map_params(transform, lambda leaf: leaf, state)
        assert_bits(mapped, state)
    transform = qk_clip({"a": BIASED})
    mapped = optax.tree.map_params(
        transform, lambda leaf: leaf + 1, transform.init(params)
    )
    assert isinstance(mapped, QKClipState)
    assert (mapped.qk_clip_factor["a"] == 1).all()  # Not a parameter's shape.
    abstract = jax.eval_shape(transform.init, params)
    assert abstract.qk_clip_factor["a"].shape == (HEADS,)


@pytest.mark.extended
def test_sharding_types_are_kept():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    params, updates = (as_jax(projections(seed=seed)) for seed in (0, 50))
    _, expected, _ = step(qk_clip(BIASED), params, LOGITS, updates)
    specs = {"kernel": P("a", "b"), "bias": P("b")}

    def shard(tree):
        return {
            name: {
                leaf: jax.device_put(tree[name][leaf], jax.NamedSharding(mesh, spec))
                for leaf, spec in specs.items()
            }
            for name in tree
        }

    with jax.set_mesh(mesh):
        sharded = shard(params)
        max_logits = jax.device_put(LOGITS, jax.NamedSharding(mesh, P("b")))
        _, found, state = step(qk_clip(BIASED), sharded, max_logits, shard(updates))
        before = jax.jit(qk_clip(BIASED).init)(sharded)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, sharded)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, before)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected
    )


# Refused arguments.


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: qk_clip(PLAIN, threshold=0.0), "threshold=0.0 .* above 0"),
        (lambda: qk_clip(PLAIN, threshold=-1.0), "threshold=-1.0 .* above 0"),
        (lambda: qk_clip(PLAIN, threshold="100"), "threshold='100'"),
        (lambda: qk_clip(PLAIN, threshold=np.inf), "threshold=inf"),
        (lambda: qk_clip(PLAIN, alpha=1.5), r"alpha=1.5 .* \[0, 1\]"),
        (lambda: qk_clip(PLAIN, alpha=np.nan), "alpha=nan"),
        (lambda: qk_clip({"a": "query.kernel"}), "attentions='query.kernel' .* QueryKey"),
        (lambda: qk_clip({}), "attentions={} .* QueryKey"),
        (lambda: qk_clip(None), "attentions=None .* QueryKey"),
        (lambda: QueryKey((), "k"), r"query=\(\) .* path"),
        (lambda: QueryKey("q", 3), "key=3 .* path"),
        (lambda: QueryKey("q", "k", layer_axes=0), r"layer_axes=0 .* \(0,\)"),
        (lambda: AttentionHeads(""), "path='' .* dotted"),
        (lambda: AttentionHeads(3), "path=3 .* dotted"),
        (lambda: AttentionHeads("q", axis=(0,)), r"axis=\(0,\) .* whole number"),
        (lambda: AttentionHeads("q", part_axis=True), "part_axis=True"),
        (lambda: AttentionHeads("q", heads=0), "heads=0 .* at least 1"),
        (lambda: AttentionHeads("q", part=(3, 3)), r"part=\(3, 3\) .* start < stop"),
        (lambda: AttentionHeads("q", span=4), r"span=4 .* start < stop"),
        (lambda: AttentionHeads("q", layer_axes=[0]), "layer_axes"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


SHAPES = {
    "q": (2, 5, 4, 6),
    "k": (2, 5, 2, 6),
    "three": (2, 5, 3, 6),
    "flat": (2, 5, 24),
    "bias": (4,),
    "whole": {"kernel": (5, 4, 6), "bias": (4, 6)},
}


@pytest.mark.parametrize(
    "query, key, message",
    [
        (
            "quarry",
            "k",
            "query of the attention: no parameter is called 'quarry'.*nearest",
        ),
        ("q", "whole", "'whole' is the name of several parameters, such as 'whole.bias'"),
        ("q", "bias", r"'bias' of shape \(4,\).* it has 1 axes, so pass another axis"),
        ("q", "ints", "'ints' .* int32: only real floating-point"),
        ("q", "three", r"4 query heads \(in 'q'\), which 3 key heads \(in 'three'\)"),
        ("k", "q", "2 query heads .* 4 key heads"),
        (("q", "three"), "k", "'three' of the attention has 3 heads .* have 4"),
        ("q", ("k", "three"), "'three' of the attention has 3 heads .* have 2"),
        ("q", AttentionHeads("k", layer_axes=(1,)), r"'k' .* layers of shape \(5,\)"),
        ("q", AttentionHeads("k", layer_axes=(2,)), "one axis twice"),
        ("q", AttentionHeads("k", layer_axes=(4,)), "pass another layer_axes than 4"),
        ("q", AttentionHeads("k", part=(0, 7)), "part ends at 7, and there are 6"),
        ("q", AttentionHeads("k", span=(0, 3)), "span ends at 3, and there are 2"),
        ("q", AttentionHeads("k", part=(0, 1), part_axis=0), "among the layer_axes"),
        ("q", AttentionHeads("k", part=(0, 1), part_axis=9), "another part_axis than 9"),
        ("q", AttentionHeads("flat", axis=-1, heads=5), "5 heads do not divide the 24"),
        (
            "q",
            AttentionHeads("flat", axis=-1, heads=4, part=(0, 7)),
            "part ends at 7, and there are 6",
        ),
        ("q", "q", "'q' is named twice"),
        (("q", AttentionHeads("q", part=(5, 6))), "k", "'q' is named twice"),
    ],
)
def test_heads_that_do_not_fit(query, key, message):
    params = jax.tree.map(
        lambda shape: jnp.ones(shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    params["ints"] = jnp.ones((2, 5, 4, 6), jnp.int32)
    transform = qk_clip(QueryKey(query, key, layer_axes=(0,)))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(transform.init, params)


def test_errors_name_the_module():
    entry = QueryKey("query.kernel", "typo.kernel")
    with pytest.raises(
        ValueError, match=r"key of attention 'blocks\.1': .*'typo\.kernel'"
    ):
        qk_clip({"blocks": [PLAIN, entry]}).init(as_jax(projections()))
    with pytest.raises(ValueError, match=r"attentions='query\.kernel'"):
        qk_clip(lambda _: "query.kernel").init(as_jax(projections()))


def test_a_name_of_two_parameters():
    params = {
        "a.b": jnp.ones((2, 3)),
        "a": {"b": jnp.ones((2, 3))},
        "k": jnp.ones((2, 3)),
    }
    with pytest.raises(ValueError, match=r"'a\.b' is the name of several"):
        qk_clip(QueryKey("a.b", "k")).init(params)


@pytest.mark.parametrize(
    "max_logits, message",
    [
        (None, "pass them to update, as in .*max_logits="),
        ({"b": LOGITS}, "structure of attentions"),
        ([LOGITS], "structure of attentions"),
        ({"a": None}, "attention 'a' is a NoneType: pass an array"),
        ({"a": {"b": LOGITS}}, "attention 'a' is a dict"),
        ({"a": 100.0}, "attention 'a' is a float"),
        ({"a": LOGITS[:3]}, r"'a' has shape \(3,\) .* = \(4,\)"),
        ({"a": LOGITS[None]}, r"shape \(1, 4\) .* maximum over batch"),
        ({"a": jnp.float32(3)}, r"shape \(\)"),
        ({"a": LOGITS > 0}, "dtype bool"),
    ],
)
def test_bad_max_logits(max_logits, message):
    params = as_jax(projections())
    transform = optax.chain(optax.sgd(0.1), qk_clip({"a": BIASED}))
    state = transform.init(params)
    given = {} if max_logits is None else {"max_logits": max_logits}
    with pytest.raises(ValueError, match=message):
        transform.update(params, state, params, **given)


@pytest.mark.extended
def test_bad_params_and_updates():
    params = as_jax(projections())
    transform = qk_clip(BIASED)
    state = transform.init(params)
    with pytest.raises(ValueError, match="params"):
        transform.update(params, state, max_logits=LOGITS)
    frozen = params | {"key": {"kernel": params["key"]["kernel"], "bias": None}}
    with pytest.raises(ValueError, match=r"'key\.bias' has no update"):
        transform.update(frozen, state, params, max_logits=LOGITS)
    misfit = params | {"key": params["key"] | {"bias": jnp.ones((1, FEATURES))}}
    with pytest.raises(ValueError, match=r"'key\.bias' has shape \(1, 6\)"):
        transform.update(misfit, state, params, max_logits=LOGITS)


# In training.


def test_keeps_the_logits_of_a_training_run_down():
    """The loss favours ever sharper attention: without QK-Clip the logits grow."""
    x = jax.random.normal(jax.random.key(0), (16, 8))
    threshold = 5.0

    def loss(params):
        q, k = (jnp.einsum("ti,ihf->thf", x, params[name]["kernel"]) for name in params)
        logits = jnp.einsum("thf,shf->hts", q, k)
        chance = jax.nn.log_softmax(logits)[:, jnp.arange(16), jnp.arange(16)]
        return -chance.mean(), logits.max((1, 2))

    def largest(optimizer):
        params = {
            name: {"kernel": 0.3 * jax.random.normal(jax.random.key(seed), (8, 2, 4))}
            for seed, name in enumerate(["query", "key"])
        }

        def train_step(carry, _):
            params, state = carry
            grads, max_logits = jax.grad(loss, has_aux=True)(params)
            updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
            return (optax.apply_updates(params, updates), state), max_logits

        carry = params, optimizer.init(params)
        return jax.lax.scan(train_step, carry, length=200)[1]

    base = optax.with_extra_args_support(optax.adam(0.01))
    without = largest(base)
    clipped = largest(optax.chain(base, qk_clip(PLAIN, threshold=threshold)))
    assert without[-1].min() > 4 * threshold
    # The clip uses the logits of the step before.
    assert clipped.max() < 1.2 * threshold
    assert clipped[-1].min() > 0.8 * threshold
