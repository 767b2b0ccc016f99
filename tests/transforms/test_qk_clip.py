"""QK-Clip against NumPy, by the attention logits that it caps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from orscale_jax import qk_clip
from tests.runs import assert_close, assert_same_bits

INPUTS, HEADS, FEATURES, ROTARY, TOKENS = 12, 4, 6, 4, 9
LOGITS = jnp.array([400.0, 100.0, 2500.0, 0.0])


def of_kernels(params, factors):
    """Of kernels (inputs, heads, features)."""
    params["query"]["kernel"] *= factors.query[None, :, None]
    params["key"]["kernel"] *= factors.key[None, :, None]
    return params


def of_all(params, factors):
    params["query"]["bias"] *= factors.query[:, None]
    params["key"]["bias"] *= factors.key[:, None]
    return of_kernels(params, factors)


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


def of_latent(params, factors):
    plain, rotary = jnp.s_[..., :FEATURES], jnp.s_[..., FEATURES:]
    q, kv = params["q_up"], params["kv_up"].at[plain].multiply(factors.key[None, :, None])
    q = q.at[plain].multiply(factors.query[None, :, None])
    return params | {
        "kv_up": kv,
        "q_up": q.at[rotary].multiply(factors.gamma[None, :, None]),
    }


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
    """New parameters and updates of one step."""
    if updates is None:
        updates = optax.tree.zeros_like(params)
    updates, _ = jax.jit(transform.update)(
        updates, transform.init(params), params, max_logits=max_logits
    )
    return optax.apply_updates(params, updates), updates


# Logits after the clip.


@pytest.mark.parametrize("alpha", [0.5, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("position", [lambda x: x, rotate], ids=["plain", "rotary"])
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_clipped_heads_end_at_the_threshold(enable_x64, key_heads, position, alpha):
    """Multi-head, grouped-query, multi-query: gamma scales every logit of its head."""
    params = projections(key_heads=key_heads)
    before = attention_logits(params, position)
    threshold = between(per_head(before))
    transform = qk_clip(of_all, key_heads=key_heads, threshold=threshold, alpha=alpha)
    after, _ = step(transform, as_jax(params), per_head(before))
    gamma = np.minimum(1, threshold / per_head(before))
    assert (gamma < 1).sum() == HEADS // 2
    found = attention_logits(as_numpy(after), position)
    np.testing.assert_allclose(found, gamma[:, None, None] * before, 1e-12, 1e-12)
    np.testing.assert_allclose(per_head(found)[gamma < 1], threshold, rtol=1e-12)
    np.testing.assert_allclose(found[gamma == 1], before[gamma == 1], rtol=1e-12)


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
    transform = qk_clip(of_latent, threshold=threshold, alpha=alpha)
    after, updates = step(transform, as_jax(params), per_head(before))
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
        transform = qk_clip(of_all, key_heads=2, alpha=0.25)
        found, _ = jax.jit(transform.update)(
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


# Nothing to clip.


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_heads_and_parameters_pass_to_the_bit(dtype):
    params, updates = (
        as_jax(projections(seed=s) | {"out": normal(s, 3, 2)}, dtype) | {"absent": None}
        for s in (0, 50)
    )
    max_logits = jnp.array([100.0, 101.0, -1e30, 1e30])
    _, found = step(qk_clip(of_kernels), params, max_logits, updates)
    assert found["absent"] is None
    assert_same_bits(found["out"], updates["out"])
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
    after, _ = step(qk_clip(of_all, key_heads=2, alpha=alpha), params, max_logits)
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
        clip = qk_clip(of_all, key_heads=2)
        found, _ = step(clip, params, logits)
        assert_same_bits(found, step(clip, params, jnp.maximum(logits, 0))[0])
        assert (found["query"]["kernel"][:, :2] == params["query"]["kernel"][:, :2]).all()


def test_a_factor_that_underflows_is_not_zero():
    """A factor of zero would erase the head for good."""
    params = as_jax(projections())
    transform = qk_clip(of_all, threshold=1e-12)
    after, _ = step(transform, params, jnp.full(HEADS, 1e38))
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(after))


def test_gammas_of_the_function():
    """Stacked layers, of which the function sees the factors."""
    seen = []

    def rescale(params, factors):
        seen.append(factors)
        q, k = (
            params[name] * getattr(factors["a"], of)[:, None, :, None]
            for name, of in (("q", "query"), ("k", "key"))
        )
        return {"q": q, "k": k}

    params = as_jax({"q": normal(0, 3, 5, 4, 6), "k": normal(1, 3, 5, 2, 6)})
    max_logits = 50 + 300 * np.abs(normal(3, 3, 4))
    transform = qk_clip(rescale, key_heads=2)
    zero = optax.tree.zeros_like(params)
    updates, state = transform.update(
        zero, transform.init(params), params, max_logits={"a": jnp.asarray(max_logits)}
    )
    gamma = np.minimum(1, 100 / max_logits)
    key = np.sqrt(gamma.reshape(3, 2, 2).min(axis=-1))
    for found, expected in zip(
        seen[0]["a"], (gamma / key.repeat(2, axis=-1), key, gamma), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for name, factor in (("q", gamma / key.repeat(2, axis=-1)), ("k", key)):
        expected = (factor[:, None, :, None] - 1) * params[name]
        np.testing.assert_allclose(updates[name], expected, atol=1e-5)
    assert state == optax.EmptyState()


def test_queries_keys_and_values_in_one_parameter():
    def rescale(params, factors):
        both = jnp.stack([factors.query, factors.key])[None, ..., None]
        return {"qkv": params["qkv"].at[:, :2].multiply(both)}

    params = {"qkv": normal(0, 5, 3, 4, 2)}
    after, updates = step(qk_clip(rescale), as_jax(params), LOGITS)
    factor = np.array([0.5, 1.0, 0.2, 1.0])
    expected = params["qkv"] * np.stack([factor, factor, np.ones(4)])[..., None]
    np.testing.assert_allclose(after["qkv"], expected, rtol=1e-5)
    assert not updates["qkv"][:, 2].any() and not updates["qkv"][..., 1::2, :].any()


def test_the_state_of_an_nnx_model():
    given = {"decode": False, "use_bias": False, "rngs": nnx.Rngs(0)}
    params = nnx.state(nnx.MultiHeadAttention(HEADS, 8, **given), nnx.Param)

    def rescale(params, factors):
        for name in ("query", "key"):
            kernel = params[name]["kernel"]
            kernel.set_value(kernel.get_value() * getattr(factors, name)[None, :, None])
        return params

    after, _ = step(qk_clip(rescale), params, jnp.full(HEADS, 400.0))
    assert jax.tree.structure(after) == jax.tree.structure(params)
    for name, factor in {"query": 0.5, "key": 0.5, "value": 1.0, "out": 1.0}.items():
        old, new = (tree[name]["kernel"].get_value() for tree in (params, after))
        np.testing.assert_allclose(new, factor * old, rtol=1e-6)


# In a chain.


SGD = optax.chain(optax.sgd(0.1), qk_clip(of_all))


@pytest.mark.extended
def test_wrappers_of_optax():
    """MultiSteps clips when it steps; apply_if_finite looks at gradients."""
    params, grads = as_jax(projections()), as_jax(projections(seed=50))
    _, expected = step(SGD, params, LOGITS, grads)
    optimizer = optax.MultiSteps(SGD, every_k_schedule=2)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    updates, state = update(grads, state, params, max_logits=100 * LOGITS)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    updates, state = update(grads, state, params, max_logits=LOGITS)
    assert_close(updates, expected, atol=0)
    optimizer = optax.apply_if_finite(SGD, 3)
    assert_same_bits(step(optimizer, params, LOGITS, grads)[1], expected)
    bad = grads | {"key": jax.tree.map(lambda g: g * jnp.nan, grads["key"])}
    after, _ = step(optimizer, params, jnp.full(HEADS, jnp.nan), bad)
    assert_same_bits(after, params)


@pytest.mark.extended
def test_injected_hyperparameters():
    injected = optax.inject_hyperparams(qk_clip, static_args="rescale")(
        rescale=of_all, threshold=100.0
    )
    params = as_jax(projections())
    state = injected.init(params)
    update = jax.jit(injected.update)
    for threshold in (100.0, 50.0):
        state.hyperparams["threshold"] = jnp.float32(threshold)
        state.hyperparams["alpha"] = jnp.float32(0.25)
        found, _ = update(params, state, params, max_logits=LOGITS)
        plain = qk_clip(of_all, threshold=threshold, alpha=0.25)
        _, expected = step(plain, params, LOGITS, params)
        assert_close(found, expected, rtol=1e-6, atol=0)
    assert update._cache_size() == 1


# The compiled program.


@pytest.mark.compiled
def test_loops_donation_and_one_compilation():
    """Of a scan and of single steps."""
    optimizer = optax.chain(optax.sgd(1e-3), qk_clip(of_all))
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
        ({"key_heads": 0}, "key_heads=0 is not valid"),
    ],
)
def test_bad_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        qk_clip(of_kernels, **given)


@pytest.mark.parametrize(
    "max_logits, message",
    [
        (None, "pass to update, as max_logits="),
        ({"a": None}, "pass to update, as max_logits="),
        (LOGITS[:3], r"shape \(3,\) .* a multiple of 2 key heads"),
        (1.0, r"shape \(\) and dtype .*float"),
        ([LOGITS, LOGITS > 0], "dtype bool"),
    ],
)
def test_bad_max_logits(max_logits, message):
    params = as_jax(projections())
    transform = optax.chain(optax.sgd(0.1), qk_clip(of_all, key_heads=2))
    given = {} if max_logits is None else {"max_logits": max_logits}
    with pytest.raises(ValueError, match=message):
        transform.update(params, transform.init(params), params, **given)


BIAS, RETURN = jnp.ones((1, FEATURES)), "rescale returned .*: return the tree"


@pytest.mark.parametrize(
    "rescale, message",
    [
        (lambda params, _: None, RETURN),
        (
            lambda params, _: {"key": params["key"]},
            "rescale returned .*: return the tree",
        ),
        (
            lambda params, _: params | {"key": params["key"] | {"bias": BIAS}},
            r"result of rescale .*'key\.bias' has shape \(1, 6\)",
        ),
    ],
    ids=["nothing", "a part", "another shape"],
)
def test_bad_results(rescale, message):
    params, clip = as_jax(projections()), qk_clip(rescale)
    with pytest.raises(ValueError, match=message):
        clip.update(params, clip.init(params), params, max_logits=LOGITS)


@pytest.mark.extended
def test_bad_params_and_updates():
    params = as_jax(projections())
    transform = qk_clip(of_all)
    state = transform.init(params)
    with pytest.raises(ValueError, match="params"):
        transform.update(params, state, max_logits=LOGITS)
    frozen = params | {"key": {"kernel": params["key"]["kernel"], "bias": None}}
    with pytest.raises(ValueError, match=r"'key\.bias' has no update"):
        transform.update(frozen, state, params, max_logits=LOGITS)
    found, _ = qk_clip(of_kernels).update(frozen, state, params, max_logits=LOGITS)
    assert found["key"]["bias"] is None
    misfit = params | {"key": params["key"] | {"bias": BIAS}}
    with pytest.raises(ValueError, match=r"'key\.bias' has shape \(1, 6\)"):
        transform.update(misfit, state, params, max_logits=LOGITS)
