import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.pretrain.model import Decoder, cross_entropy, rotate
from examples.pretrain.train import initial_model
from tests.examples.pretrain import tiny

VOCAB, WIDTH, LAYERS, HEADS = 11, 16, 2, 2


@pytest.fixture(scope="module")
def model():
    return Decoder(
        vocab_size=VOCAB, width=WIDTH, layers=LAYERS, heads=HEADS, rngs=nnx.Rngs(0)
    )


def tokens(length=12, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (2, length))


def test_a_later_token_changes_no_earlier_logit(model):
    before = tokens()
    after = before.copy()
    after[:, 7] = (after[:, 7] + 1) % VOCAB
    a, b = model(jnp.asarray(before)), model(jnp.asarray(after))
    np.testing.assert_array_equal(a[:, :7], b[:, :7])
    assert np.all(np.max(np.abs(a[:, 7:] - b[:, 7:]), axis=-1) > 0)


def test_every_earlier_token_reaches_the_last_logit(model):
    before = tokens()
    last = model(jnp.asarray(before))[:, -1]
    for position in range(before.shape[1]):
        after = before.copy()
        after[:, position] = (after[:, position] + 1) % VOCAB
        assert np.all(np.any(model(jnp.asarray(after))[:, -1] != last, axis=-1)), position


def test_the_parameters_are_those_of_the_paper(model):
    _, params = nnx.split(model, nnx.Param)
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(nnx.to_pure_dict(params))
    }
    per_block = 4 * WIDTH**2 + 2 * 4 * WIDTH**2 + 2 * WIDTH
    expected = VOCAB * WIDTH + LAYERS * per_block + WIDTH
    assert sum(np.prod(shape) for shape in flat.values()) == expected
    assert flat["blocks.1.attention.query.kernel"] == (WIDTH, WIDTH)
    assert flat["blocks.0.mlp.up.kernel"] == (WIDTH, 4 * WIDTH)
    assert flat["embed.embedding"] == (VOCAB, WIDTH)
    assert not any("bias" in name or "head" in name for name in flat)


def test_initial_weights_scale_with_fan_in():
    _, params = initial_model(tiny.config(width=64), vocab_size=256)
    mlp = params["blocks"][0]["mlp"]
    for name, fan_in in (("up", 64), ("down", 256)):
        rms = np.sqrt(np.mean(np.square(mlp[name]["kernel"])))
        assert rms == pytest.approx(fan_in**-0.5, rel=0.05)


def test_rotation_is_seen_only_as_distance():
    T, H = 16, 8
    query, key = np.random.default_rng(0).normal(size=(2, H)).astype(np.float32)

    def everywhere(x):
        return rotate(jnp.broadcast_to(x, (1, T, 1, H)))[0, :, 0]

    scores = np.asarray(everywhere(query) @ everywhere(key).T)
    for offset in range(-T + 1, T):
        diagonal = np.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(scores[0]) > 0.5
    np.testing.assert_allclose(np.diagonal(scores), query @ key, atol=1e-5)


def test_queries_and_keys_are_both_rotated(model, monkeypatch):
    seen = []
    attention = jax.nn.dot_product_attention

    def spy(query, key, value, **options):
        seen.append((query, key, value))
        return attention(query, key, value, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    model(jnp.zeros((1, 9), jnp.int32))  # The same token everywhere.
    for query, key, value in seen:
        scores = np.einsum("qh,kh->qk", query[0, :, 1], key[0, :, 1])
        for offset in range(-8, 9):
            diagonal = np.diagonal(scores, offset)
            np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
        assert np.ptp(scores[0]) > 0.05
        np.testing.assert_allclose(value[0], value[0, :1].repeat(9, axis=0), atol=1e-6)
    assert len(seen) == LAYERS


def test_rotation_is_that_of_complex_numbers():
    T, H = 5, 6
    x = np.random.default_rng(1).normal(size=(1, T, 2, H)).astype(np.float32)
    pairs = x[..., : H // 2] + 1j * x[..., H // 2 :]
    angle = np.arange(T)[:, None] * 10_000.0 ** (-2 * np.arange(H // 2) / H)
    turned = pairs * np.exp(1j * angle)[None, :, None, :]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x)), expected, atol=1e-5)


def test_cross_entropy_is_the_mean_of_minus_log_probability():
    logits = np.random.default_rng(0).normal(size=(2, 3, VOCAB))
    targets = tokens(3)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, targets[..., None], axis=-1)).mean()
    got = cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(targets))
    assert float(got) == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_of_the_next_token():
    """What the model sees is one shorter than the window, and shifted against targets."""
    loss_fn, params = initial_model(tiny.config(), vocab_size=VOCAB)
    window = jnp.asarray(tokens(9))
    model = Decoder(vocab_size=VOCAB, width=16, layers=1, heads=2, rngs=nnx.Rngs(0))
    expected = cross_entropy(model(window[:, :-1]), window[:, 1:])
    assert float(loss_fn(params, window)) == pytest.approx(float(expected), rel=1e-6)
