"""Fused attention as it is written out, and where which of them is taken."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from examples.pretrain.models import attention, dense
from examples.pretrain.models.attention import Choice, causal_attention, choose

B, T, N, H, U = 2, 256, 2, 24, 16  # Values are narrower, as Moonlight's are.
XLA = functools.partial(jax.nn.dot_product_attention, implementation="xla")
ON_TPU = functools.partial(attention.splash_attention, interpret=True)

# As a model of the training program has them: batches over data, heads over tensor.
RULES = (
    ("batch", ("data", "expert")),
    ("length", None),
    ("heads", "tensor"),
    ("kv", None),
)


def mesh_of(kind):
    axes = ("data", "tensor", "expert")
    return jax.make_mesh((2, 2, 2), axes, axis_types=(kind,) * 3)


def arrays(dtype, batch=B, length=T):
    """Queries and keys in two parts, the second of which the heads share, and values."""
    draw = np.random.default_rng(0)
    shapes = (
        *((batch, length, N, U), (batch, length, N, H - U)),
        *((batch, length, N, U), (batch, length, H - U), (batch, length, N, U)),
    )
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


def value_and_grads(*inputs):
    def loss(*inputs):
        mixed = causal_attention(inputs[:2], inputs[2:4], inputs[4])
        return jnp.sum(jnp.sin(mixed.astype("float32"))), mixed

    argnums = range(len(inputs))
    (_, mixed), grads = jax.value_and_grad(loss, tuple(argnums), has_aux=True)(*inputs)
    return [np.asarray(x, "float64") for x in (mixed, *grads)]


def take(kernel, monkeypatch):
    monkeypatch.setattr(attention, "choose", lambda *_: Choice(kernel, ""))
    if kernel is attention.cudnn:  # What it calls, by another implementation.
        monkeypatch.setattr(
            jax.nn, "dot_product_attention", lambda *x, **options: XLA(*x, is_causal=True)
        )


@pytest.mark.quick_first_case
@pytest.mark.parametrize("dtype, error", [("float32", 2e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("kernel", [attention.cudnn, ON_TPU], ids=["gpu", "tpu"])
def test_fused_attention_is_that_which_is_written_out(kernel, dtype, error, monkeypatch):
    """The mixed values, and the gradients of queries, keys and values."""
    exact = value_and_grads(*(x.astype("float32") for x in arrays(dtype)))
    take(kernel, monkeypatch)
    found = value_and_grads(*arrays(dtype))
    for x, wanted in zip(found, exact, strict=True):
        assert np.linalg.norm(x - wanted) < error * np.linalg.norm(wanted)


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_each_device_of_a_mesh_has_its_sequences_and_heads(kind, monkeypatch):
    inputs, shapes = arrays("float32", batch=4, length=8), []
    wanted = value_and_grads(*inputs)

    def kernel(q, k, v):
        shapes.append(q.shape)
        return attention.written_out([q], [k], v)

    take(kernel, monkeypatch)

    def loss(*x):
        return jnp.sum(jnp.sin(causal_attention(x[:2], x[2:4], x[4])))

    run = jax.jit(jax.grad(loss, 4))
    if kind == AxisType.Explicit:
        run = jax.sharding.auto_axes(run, out_sharding=jax.P())
    with jax.set_mesh(mesh_of(kind)), nnx.logical_axis_rules(RULES):
        found = run(*inputs)
    np.testing.assert_allclose(found, wanted[-1], rtol=1e-5, atol=1e-6)
    assert set(shapes) == {(1, 8, 1, H)}


@pytest.mark.parametrize(
    "on, dtype, length, why",
    [
        ("cpu", "bfloat16", 128, "written out: there is no fused kernel for the .* cpu"),
        ("gpu", "float32", 128, "written out: fused kernels take 16-bit .* are float32"),
        ("tpu", "float64", 128, "written out: fused kernels take 16-bit .* are float64"),
        (
            "tpu",
            "bfloat16",
            127,
            "written out: splash .* multiple of 128 tokens, not 127",
        ),
        ("tpu", "bfloat16", 384, r"splash attention, in bfloat16\."),
        # Where no plugin for CUDA is installed, or with it: too many features.
        ("gpu", "bfloat16", 128, "written out: cuDNN refuses heads of 513 features: "),
    ],
)
def test_what_is_taken_and_why(on, dtype, length, why, monkeypatch):
    monkeypatch.setattr(attention, "platform", lambda: on)
    found = choose(dtype, length, 513, 513)
    assert re.match(f"Attention is {why}", found.why)
    assert (found.kernel is None) == ("written out" in why)


def test_the_platform_is_that_of_the_mesh(monkeypatch):
    """And not that of the process, which may compile for others."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        assert choose("bfloat16", 8, 8, 8).why.endswith("the platform cpu.")
    assert choose("float32", 8, 8, 8).why.endswith("these are float32.")


def losses(steps):
    """Of a small decoder in training."""
    config = dense.DenseConfig(vocab_size=32, width=32, layers=2, heads=2)
    graph, params = nnx.split(dense.Dense(config, nnx.Rngs(0)), nnx.Param)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 129)))
    optimizer = optax.adam(3e-3)

    def loss(params):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    def step(held, _):
        value, grads = jax.value_and_grad(loss)(held[0])
        updates, state = optimizer.update(grads, held[1])
        return (optax.apply_updates(held[0], updates), state), value

    run = jax.jit(lambda held: jax.lax.scan(step, held, length=steps)[1])
    return np.asarray(run((params, optimizer.init(params))))


@pytest.mark.extended
def test_fifty_steps_with_fused_attention_have_the_same_losses(monkeypatch):
    wanted = losses(50)
    take(ON_TPU, monkeypatch)
    np.testing.assert_allclose(losses(50), wanted, rtol=2e-4)
    assert wanted[-1] < 0.8 * wanted[0]
