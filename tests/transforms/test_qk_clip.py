"""QK-Clip against NumPy, by the attention logits that it caps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from orscale_jax import AttentionHeads, QKClipState, QueryKey, qk_clip
from tests.runs import assert_close, assert_same_bits

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
    np.testing.assert_allclose(found, gamma[:, None, None] * before, 1e-12, 1e-12)
    np.testing.assert_allclose(per_head(found)[gamma < 1], threshold, rtol=1e-12)
    np.testing.assert_allclose(found[gamma == 1], before[gamma == 1], rtol=1e-12)
    np.testing.assert_allclose(state.qk_clip_factor, gamma, rtol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0])
def test_latent_attention(enable_x64, alpha):
    params = {
        "q_up": normal(0, INPUTS, HEADS, FEATURES + ROTARY),
        "kv_up": normal(1, INPUTS, HEADS, FEATURES + 3),
        "k_rotary": normal(2, INPUTS, ROTARY),
    }
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
@pytest.mark.parametrize(
    "params_dtype, updates_dtype, logits_dtype, rtol",
    [
        ("float32", "float32", "float32", 1e-6),
        ("float32", "bfloat16", "float32", 2**-8),
        ("bfloat16", "float32", "float32", 1e-6),
        ("bfloat16", "float32", "bfloat16", 1e-6),
        ("bfloat16", "bfloat16", "float16", 2**-8),
        ("float16", "float16", "int32", 2**-10),
    ],
)
def test_updates_against_numpy(params_dtype, updates_dtype, logits_dtype, rtol):
    """u' = factor (W + u) - W, rounded once; a shared key takes the strongest clip."""
    params = as_jax(projections(key_heads=2), params_dtype)
    updates = as_jax(projections(key_heads=2, seed=50), updates_dtype)
    max_logits = jnp.array([400, 60, 150, 300], logits_dtype)
    with jax.numpy_dtype_promotion("strict"):
        transform = qk_clip(BIASED, alpha=0.25)
        found, state = jax.jit(transform.update)(
            updates, transform.init(params), params, max_logits=max_logits
        )
    gamma = np.minimum(1, 100 / np.asarray(max_logits, np.float64))
    key = gamma.reshape(2, 2).min(1) ** 0.75
    for name, factor in {"query": gamma / key.repeat(2), "key": key}.items():
        for leaf in ("kernel", "bias"):
            w, u = (as_numpy(tree[name][leaf]) for tree in (params, updates))
            assert found[name][leaf].dtype == updates_dtype
            expected = factor[:, None] * (w + u) - w
            np.testing.assert_allclose(
                as_numpy(found[name][leaf]), expected, rtol=rtol, atol=1e-6
            )
    assert state.qk_clip_factor.dtype == jnp.float32


# Nothing to clip.


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_heads_and_parameters_pass_to_the_bit(dtype):
    params, updates = (
        as_jax(projections(seed=s) | {"out": normal(s, 3, 2)}, dtype) | {"absent": None}
        for s in (0, 50)
    )
    max_logits = jnp.array([100.0, 101.0, -1e30, 1e30])
    _, found, state = step(qk_clip(PLAIN), params, max_logits, updates)
    assert found["absent"] is None
    assert_same_bits(found["out"], updates["out"])
    assert (state.qk_clip_factor[::2] == 1).all()
    for name in ("query", "key"):
        assert_same_bits(found[name]["bias"], updates[name]["bias"])
        kept, given = (tree[name]["kernel"] for tree in (found, updates))
        assert_same_bits(kept[:, ::2], given[:, ::2])
        assert (kept != given).any(axis=(0, 2)).tolist() == [False, True, False, True]


# Logits that are not finite.


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
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


def test_a_head_whose_logits_are_all_masked_is_not_clipped():
    """Its largest logit is that of ``jnp.max(..., initial=-jnp.inf)``."""
    params = as_jax(projections(key_heads=2))
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = jnp.array([-np.inf, 10.0, 200.0, -np.inf], dtype)
        found, _, state = step(qk_clip(BIASED), params, logits)
        wanted, _, _ = step(qk_clip(BIASED), params, jnp.maximum(logits, 0))
        assert_same_bits(found, wanted)
        np.testing.assert_array_equal(state.qk_clip_factor, [1, 1, 0.5, 1])


def test_a_factor_that_underflows_is_not_zero():
    """A factor of zero would erase the head for good."""
    params = as_jax(projections())
    transform = qk_clip(BIASED, threshold=1e-12)
    after, _, _ = step(transform, params, jnp.full(HEADS, 1e38))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(after))


# Positions of the heads.


FACTOR = np.array([0.5, 1.0, 0.2, 1.0])
LOGITS = jnp.array([400.0, 100.0, 2500.0, 0.0])


PART = np.where([0, 0, 1, 1, 1, 0, 0, 0], FACTOR[:, None], 1)
# The shape, where the heads lie, and the factor of each entry.
LAYOUTS = {
    # inputs × (heads features), as in Haiku; (heads features) × inputs, as in Torch.
    "flat": ((5, 12), {"axis": -1, "heads": 4}, FACTOR.repeat(3)),
    "torch": ((12, 5), {"axis": 0, "heads": 4}, FACTOR.repeat(3)[:, None]),
    "first": ((4, 3, 5), {"axis": 0}, FACTOR[:, None, None]),
    # Heads of queries, then of values.
    "span": ((5, 9, 3), {"span": (2, 6)}, np.r_[1, 1, FACTOR, 1, 1, 1][:, None]),
    "flat span": (
        *((5, 20), {"axis": 1, "heads": 4, "span": (8, 16)}),
        np.r_[np.ones(8), FACTOR.repeat(2), np.ones(4)],
    ),
    # A part of each head, with heads on a separate axis or not.
    "part": ((5, 4, 8), {"part": (2, 5)}, PART),
    "flat part": ((5, 32), {"axis": -1, "heads": 4, "part": (2, 5)}, PART.ravel()),
}


@pytest.mark.quick_first_case
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    shape, heads, factor = LAYOUTS[name]
    params = {"q": normal(0, *shape), "k": normal(1, 2, 4, 3)}
    entry = QueryKey(AttentionHeads("q", **heads), "k")
    after, updates, _ = step(qk_clip(entry), as_jax(params), LOGITS)
    np.testing.assert_allclose(after["q"], params["q"] * factor, rtol=1e-5)
    outside = np.broadcast_to(factor == 1, shape)
    assert not np.asarray(updates["q"])[outside].any()


def test_queries_keys_and_values_in_one_parameter():
    params = {"qkv": normal(0, 5, 3, 4, 2)}
    entry = QueryKey(
        *(AttentionHeads("qkv", part=(i, i + 1), part_axis=1) for i in range(2))
    )
    after, updates, _ = step(qk_clip(entry), as_jax(params), LOGITS)
    expected = params["qkv"] * np.stack([FACTOR, FACTOR, np.ones(4)])[..., None]
    np.testing.assert_allclose(after["qkv"], expected, rtol=1e-5)
    assert not updates["qkv"][:, 2].any()


# The shape, the axes of heads and of layers, and how factors of (layers, heads) lie.
STACKED = {
    "first": ((3, 5, 4, 6), -2, (0,), lambda f: f[:, None, :, None]),
    "after the heads": ((5, 4, 6, 3), -3, (-1,), lambda f: f.T[:, None]),
    "two, in any order": (
        *((3, 5, 4, 2, 6), 2, (3, 0)),
        lambda f: f.transpose(1, 2, 0)[:, None, ..., None],
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("case", STACKED)
def test_stacked_layers(case):
    shape, axis, layer_axes, in_place = STACKED[case]
    sizes = [shape[axis] for axis in layer_axes]
    params = {
        "q": normal(0, *shape), "bias": normal(1, *sizes, 4, 6),
        "k": normal(2, *sizes, 2, 6),
    }  # fmt: skip
    heads = AttentionHeads("q", axis, layer_axes=layer_axes)
    entry = QueryKey((heads, "bias"), "k", layer_axes=tuple(range(len(sizes))))
    max_logits = 50 + 300 * np.abs(normal(3, *sizes, 4))
    after, _, state = step(qk_clip(entry), as_jax(params), jnp.asarray(max_logits))
    gamma = np.minimum(1, 100 / max_logits)
    key = np.sqrt(gamma.reshape(*sizes, 2, 2).min(axis=-1))
    query = gamma / key.repeat(2, axis=-1)
    np.testing.assert_allclose(state.qk_clip_factor, gamma, rtol=1e-6)
    for name, factor in (
        ("q", in_place(query)),
        ("bias", query[..., None]),
        ("k", key[..., None]),
    ):
        np.testing.assert_allclose(after[name], params[name] * factor, rtol=1e-5)


class Attention(NamedTuple):
    query: dict
    key: dict


@pytest.mark.parametrize("container", ["namedtuple", "list", "nnx"])
def test_containers(container):
    inner = as_jax(projections())
    given = {"decode": False, "use_bias": False, "rngs": nnx.Rngs(0)}
    model = nnx.MultiHeadAttention(HEADS, 8, **given)
    params, prefix = {
        "namedtuple": (Attention(**inner), ""),
        "list": ([inner], "0."),
        "nnx": (nnx.state(model, nnx.Param), ""),
    }[container]
    entry = QueryKey(f"{prefix}query.kernel", f"{prefix}key.kernel")
    after, updates, _ = step(qk_clip(entry), params, jnp.full(HEADS, 400.0))
    assert jax.tree.structure(after) == jax.tree.structure(params)
    leaves = jax.tree.leaves_with_path(updates)
    moved = sorted(jax.tree_util.keystr(path) for path, leaf in leaves if leaf.any())
    assert len(moved) == 2 and all("kernel" in path for path in moved)
    assert "key" in moved[0] and "query" in moved[1]


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
    assert_same_bits(called, after)


# In a chain.


SGD = optax.chain(optax.sgd(0.1), qk_clip(BIASED))


@pytest.mark.extended
def test_wrappers_of_optax():
    """MultiSteps clips when it steps; apply_if_finite looks at gradients."""
    params, grads = as_jax(projections()), as_jax(projections(seed=50))
    _, expected, _ = step(SGD, params, LOGITS, grads)
    optimizer = optax.MultiSteps(SGD, every_k_schedule=2)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    updates, state = update(grads, state, params, max_logits=100 * LOGITS)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    updates, state = update(grads, state, params, max_logits=LOGITS)
    assert_close(updates, expected, atol=0)
    optimizer = optax.apply_if_finite(SGD, 3)
    assert_same_bits(step(optimizer, params, LOGITS, grads)[1], expected)
    bad = grads | {"key": jax.tree.map(lambda g: g * jnp.nan, grads["key"])}
    after, _, state = step(optimizer, params, jnp.full(HEADS, jnp.nan), bad)
    assert_same_bits(after, params)
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
        assert_close(found, expected, rtol=1e-6, atol=0)
    assert update._cache_size() == 1


# The compiled program.


@pytest.mark.compiled
def test_loops_donation_and_one_compilation():
    """Of a scan and of single steps."""
    optimizer = optax.chain(optax.sgd(1e-3), qk_clip(BIASED))
    grads = as_jax(projections(seed=50))
    max_logits = jnp.asarray(300 * normal(1, 4, HEADS), jnp.float32)

    def one(carry, logits):
        params, state = carry
        updates, state = optimizer.update(grads, state, params, max_logits=logits)
        return optax.apply_updates(params, updates), state

    def start():
        return as_jax(projections()), jax.jit(optimizer.init)(as_jax(projections()))

    step, carry = jax.jit(one, donate_argnums=0), start()
    for logits in max_logits:
        old = jax.tree.leaves(carry[0])
        carry = step(carry, logits)
        assert all(leaf.is_deleted() for leaf in old)
    assert step._cache_size() == 1
    scanned, _ = jax.lax.scan(lambda c, x: (one(c, x), None), start(), max_logits)
    assert_close(scanned, carry, atol=1e-6)


def test_state_maps():
    params = as_jax(projections())
    for given in (lambda _: {"a": BIASED}, {"a": BIASED}):
        transform = qk_clip(given)
        state = transform.init(params)
        mapped = optax.tree.map_params(transform, lambda leaf: leaf + 1, state)
        assert isinstance(mapped, QKClipState)
        assert_same_bits(mapped, state)  # It has no array of a parameter's shape.
    abstract = jax.eval_shape(transform.init, params)
    assert abstract.qk_clip_factor["a"].shape == (HEADS,)


# Refused arguments.


@pytest.mark.parametrize(
    "given, message",
    [
        ({"threshold": 0.0}, "threshold=0.0 is not valid"),
        ({"threshold": -1.0}, "threshold=-1.0 is not valid"),
        ({"threshold": "100"}, "threshold='100'"),
        ({"threshold": np.inf}, "threshold=inf"),
        ({"alpha": 1.5}, "alpha=1.5 is not valid"),
        ({"alpha": np.nan}, "alpha=nan"),
    ],
)
def test_bad_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        qk_clip(PLAIN, **given)


@pytest.mark.parametrize("given", [{"a": "query.kernel"}, {}, None, lambda _: "query"])
def test_bad_attentions(given):
    with pytest.raises(ValueError, match=r"attentions=.* is not valid: pass a QueryKey"):
        qk_clip(given).init(as_jax(projections()))


SHAPES = {
    "q": (2, 5, 4, 6),
    "k": (2, 5, 2, 6),
    "three": (2, 5, 3, 6),
    "flat": (2, 5, 24),
    "bias": (4,),
    "a.b": (2, 3),
    "a": {"b": (2, 3)},
    "whole": {"kernel": (5, 4, 6), "bias": (4, 6)},
}


@pytest.mark.parametrize(
    "query, key, message",
    [
        ("quarry", "k", "query of the attention: 'quarry' is the name of 0 .* such as"),
        ("q", "whole", "'whole' is the name of 2 .*'whole.bias', 'whole.kernel'"),
        ("q", "a.b", r"'a\.b' is the name of 2 parameters"),
        ("", "k", "'' is the name of 0 parameters"),
        ((), "k", r"query=\(\) .* path"),
        ("q", 3, "key of the attention=3 .* path"),
        ("q", "bias", r"'bias' of shape \(4,\).* it has 1 axis, so pass another axis"),
        ("q", "ints", "'ints' .* int32: only real floats"),
        ("q", "three", r"'q' .* = \(2, 4\), but .* first key \(2, 3\)"),
        (("q", "three"), "k", r"'three' .* = \(2, 3\), but .* first query has \(2, 4\)"),
        ("q", ("k", "three"), r"'three' .* = \(2, 3\), but .* first key \(2, 2\)"),
        ("q", AttentionHeads("k", layer_axes=(1,)), r"'k' .* = \(5, 2\)"),
        ("q", AttentionHeads("k", layer_axes=(2,)), "one axis twice"),
        ("q", AttentionHeads("k", layer_axes=(4,)), "pass another layer_axes than 4"),
        ("q", AttentionHeads("k", layer_axes=[0]), "layer_axes must be a tuple"),
        ("q", AttentionHeads("k", axis=(0,)), r"another axis than \(0,\)"),
        ("q", AttentionHeads("k", part=(0, 7)), r"pass part=\(start, stop\) .* <= 6"),
        ("q", AttentionHeads("k", part=(3, 3)), r"pass part=\(start, stop\) .* <= 6"),
        ("q", AttentionHeads("k", span=(0, 3)), r"pass span=\(start, stop\) .* <= 2"),
        ("q", AttentionHeads("k", span=4), r"pass span=\(start, stop\) .* <= 2"),
        ("q", AttentionHeads("k", part=(0, 1), part_axis=0), "among the layer_axes"),
        ("q", AttentionHeads("k", part=(0, 1), part_axis=9), "another part_axis than 9"),
        ("q", AttentionHeads("flat", axis=-1, heads=5), "5 heads do not divide the 24"),
        ("q", AttentionHeads("flat", axis=-1, heads=0), "0 heads do not divide the 24"),
        ("q", AttentionHeads("flat", axis=-1, heads=4, part=(0, 7)), "part=.* <= 6"),
        ("q", "q", "'q' is named twice"),
        (("q", AttentionHeads("q", part=(5, 6))), "k", "'q' is named twice"),
    ],
)
def test_heads_that_do_not_fit(query, key, message):
    params = jax.tree.map(jnp.ones, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
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


@pytest.mark.parametrize(
    "max_logits, message",
    [
        (None, "pass to update, as max_logits="),
        ({"b": LOGITS}, "does not fit .*: pass to update, as max_logits="),
        ({"a": None}, r"attention 'a' has shape \(\)"),
        ({"a": {"b": LOGITS}}, "attention 'a' has shape .* 'dict'"),
        ({"a": LOGITS[:3]}, r"'a' has shape \(3,\) .* = \(4,\)"),
        ({"a": [1.0, 2.0, 3.0, 4.0]}, r"'a' has shape \(4,\) and dtype .*list"),
        ({"a": LOGITS[None]}, r"shape \(1, 4\) .* over batch"),
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
