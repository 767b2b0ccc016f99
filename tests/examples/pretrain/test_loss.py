"""The cross-entropy by hand, in chunks of the vocabulary, and what it keeps in memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pretrain.loss import cross_entropy, of_narrow

B, T, D, V = 4, 6, 8, 64


def inputs(dtype="float64"):
    draw = np.random.default_rng(0)
    hidden = jnp.asarray(5 * draw.normal(size=(B, T, D)), dtype)
    head = jnp.asarray(draw.normal(size=(D, V)), dtype)
    return hidden, head, jnp.asarray(draw.integers(0, V, (B, T)))


@functools.partial(jax.jit, static_argnums=3)
def value_and_grad(hidden, head, targets, chunks):
    def loss(hidden, head):
        if chunks == 1:
            return cross_entropy(hidden, lambda x: x @ head, targets)
        return cross_entropy(hidden, head, targets, chunks)

    return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)


def by_hand(hidden, head, targets):
    """The mean of minus the log-probabilities, and its gradient."""
    logits = np.asarray(hidden) @ np.asarray(head)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.eye(V)[np.asarray(targets)]
    error = (p - wanted) / targets.size
    loss = -np.log((p * wanted).sum(-1)).mean()
    gradients = error @ np.asarray(head).T, np.einsum("btd,btv->dv", hidden, error)
    return loss, gradients


assert_equal = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
)


@pytest.mark.quick_first_case
@pytest.mark.usefixtures("enable_x64")
@pytest.mark.parametrize("chunks", [1, 2, 16, V])
def test_the_loss_and_its_gradient_are_those_by_hand(chunks):
    found = value_and_grad(*inputs(), chunks)
    assert_equal(found, by_hand(*inputs()))


@pytest.mark.usefixtures("enable_x64")
def test_a_vocabulary_over_devices_gives_the_same():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    specs = jax.P("data"), jax.P(None, "tensor"), jax.P("data")
    on_mesh = [
        jax.device_put(x, jax.NamedSharding(mesh, spec))
        for x, spec in zip(inputs(), specs, strict=True)
    ]
    found = value_and_grad(*on_mesh, 4)
    assert_equal(found, by_hand(*inputs()))


@pytest.mark.usefixtures("enable_x64")
def test_large_logits_do_not_overflow():
    hidden, head, targets = inputs()
    loss, gradients = value_and_grad(1000 * hidden, head, targets, 4)
    wanted, _ = value_and_grad(1000 * hidden, head, targets, 1)
    assert loss == pytest.approx(float(wanted), rel=1e-12)
    assert all(np.isfinite(leaf).all() for leaf in gradients)


@pytest.mark.quick_first_case
@pytest.mark.parametrize("chunks", [1, 4])
def test_logits_of_bfloat16_are_summed_in_float32(chunks):
    hidden, head, targets = inputs("bfloat16")
    found, gradients = value_and_grad(hidden, head, targets, chunks)
    assert found.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in gradients} == {"bfloat16"}
    wanted, _ = by_hand(*(np.asarray(x, "float32") for x in (hidden, head)), targets)
    assert found == pytest.approx(float(wanted), rel=0.02)


def test_narrow_logits_have_the_gradient_of_those_in_float32():
    """To the rounding of its entries, at any position's weight."""
    hidden, head, targets = inputs("float32")
    logits, weights = (hidden @ head).astype("bfloat16"), jnp.arange(1.0, 1 + B * T)

    def loss(losses_of, logits):
        return jnp.vdot(losses_of(logits, targets), weights.reshape(B, T))

    wanted, gradient = jax.value_and_grad(
        lambda x: loss(optax.softmax_cross_entropy_with_integer_labels, x)
    )(logits.astype("float32"))
    found, narrow = jax.value_and_grad(lambda x: loss(of_narrow, x))(logits)
    assert found == pytest.approx(float(wanted), rel=1e-6)
    assert (narrow == gradient.astype("bfloat16")).all()


def largest_array(chunks):
    """Entries of the largest array of the compiled program."""
    compiled = value_and_grad.lower(*inputs("float32"), chunks).compile()
    shapes = re.findall(r"\b(?:f32|pred|s32)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.compiled
def test_no_array_has_all_logits():
    """Neither in the forward nor in the backward pass."""
    assert largest_array(chunks=1) >= B * T * V
    assert largest_array(chunks=4) == max(B * T * V // 4, D * V)


def test_chunks_that_do_not_divide_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"loss_chunks=7 does not divide .* of 64"):
        cross_entropy(*inputs("float32"), chunks=7)
