"""The four methods of examples.track0 against NumPy.

It follows the published code, whose weights have the outputs first.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.track0.blend import blend_momentum, contra_muon
from examples.track0.ema_nesterov import ema_nesterov, muon_ahead, without_lookahead
from examples.track0.mixed_emas import mixed_emas, two_timescales
from examples.track0.neuron_floor import neuron_floor, row_floor
from orscale_jax import orthogonalize
from tests import oracle
from tests.runs import step_of

STEPS, RATE = 12, 0.2
SHAPES = {"tall": (12, 5), "wide": (4, 9), "stack": (3, 6, 8)}
NUMBERS = dict.fromkeys(SHAPES, optax.contrib.MuonDimensionNumbers(-2, -1))


def tree(seed):
    """Neurons of unequal norms."""
    rng = np.random.default_rng(seed)
    found = {
        n: np.geomspace(0.1, 4, s[-1]) * rng.normal(size=s) for n, s in SHAPES.items()
    }
    return jax.tree.map(jnp.float32, found)


def matrices(*trees):
    """For every matrix of the leaves, that of each tree with its outputs first."""
    for name, shape in SHAPES.items():
        leaves = (np.float64(t[name]).reshape(-1, *shape[-2:]).mT for t in trees)
        yield from zip(*leaves, strict=True)


def lerp(start, end, weight):
    return start + weight * (end - start)


def nesterov(grads):
    m = 0.0
    for grad in grads:
        m = 0.95 * m + grad
        yield 0.95 * m + grad


def scaled(q):
    return 0.2 * max(q.shape) ** 0.5 * q


def by_two_timescales(w, grads):
    """Pull request 340, after its switch."""
    fast = slow = 0.0
    for grad in grads:
        fast, slow = lerp(fast, grad, 1 - 0.85), lerp(slow, grad, 1 - 0.98)
        m = lerp(grad, 0.44 * fast + 0.56 * slow, 0.95)
        w = w - RATE * (scaled(oracle.newton_schulz(m)) + 0.1 * w)
    return w


def by_contra_muon(w, grads):
    """Pull request 275, where a power iteration begins with a vector of ones."""
    for m in nesterov(grads):
        q, v = oracle.newton_schulz(m), np.ones(m.shape[1])
        for _ in range(5):
            v = m.T @ (m @ v)
            v /= np.linalg.norm(v)
        d = 1.25 * q - 0.25 * m / np.linalg.norm(m @ v)
        d *= np.linalg.norm(q) / np.linalg.norm(d)
        w = w - RATE * (scaled(d) + 0.1 * w)
    return w


def by_row_floor(w, grads):
    """Pull request 328."""
    for m in nesterov(grads):
        u = scaled(oracle.newton_schulz(m))
        weights, updates = (np.linalg.norm(x, axis=1, keepdims=True) for x in (w, u))
        w = w - RATE * u * np.maximum(0.38 * weights / updates, 1.0)
    return w


def by_muon_ahead(w, grads):
    """The wrapper of pull requests 308 and 328; the last weights are ahead."""
    previous, buffer = w, 0.0
    for m in nesterov(grads):
        point = w + 0.3 * buffer
        w = point - RATE * (scaled(oracle.newton_schulz(m)) + 0.1 * point)
        buffer = lerp(buffer, w - previous, 1 - 0.99)
        previous = w
    return w + 0.3 * buffer


@pytest.mark.parametrize(
    ("make", "by_hand"),
    [
        (two_timescales, by_two_timescales),
        (contra_muon, by_contra_muon),
        (row_floor, by_row_floor),
        (muon_ahead, by_muon_ahead),
    ],
)
def test_entries(make, by_hand):
    optimizer = make(RATE, NUMBERS)
    start, grads = tree(0), [tree(seed) for seed in range(1, STEPS + 1)]
    end, state, step = start, optimizer.init(start), step_of(optimizer)
    for grad in grads:
        end, state = step(end, state, grad)
    for w, found, *each in matrices(start, end, *grads):
        np.testing.assert_allclose(found, by_hand(w, each), rtol=1e-5, atol=3e-5)


def test_momentum_whose_weights_change():
    """Pull request 357: weights go from one set to another."""
    decays, first, last = [0.5, 0.9, 0.99], np.array([2, 3, 5]), np.array([6, 3, 1])
    stage = mixed_emas(decays, lambda step: lerp(first, last, step / STEPS))
    grads = np.random.default_rng(0).normal(size=(STEPS, 6, 4))
    state = stage.init(grads[0])
    for grad in grads:
        found, state = stage.update(jnp.float32(grad), state)
    ages, weights = np.arange(STEPS)[::-1], lerp(first, last, 1 - 1 / STEPS)
    shares = sum(w * (1 - b) * b**ages for w, b in zip(weights, decays, strict=True))
    expected = lerp(grads[-1], np.tensordot(shares, grads, 1), 0.95)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_momenta_that_are_zero_or_that_ones_do_not_see():
    stage = blend_momentum(orthogonalize(), -0.25)
    w = jax.random.randint(jax.random.key(0), (3, 4), -9, 9).astype(jnp.float32)
    grads = {"zero": 0 * w, "unseen": jnp.concatenate([w, -w])}  # Xᵀ1 = 0
    larger = optax.tree.scale(1e3, grads)
    with jax.debug_nans(True):
        found, of_larger = (stage.update(g, stage.init(g))[0] for g in (grads, larger))
        raised, _ = neuron_floor(0.35).update(grads, optax.EmptyState(), grads)
    assert not found["zero"].any() and not raised["zero"].any()
    np.testing.assert_allclose(found["unseen"], of_larger["unseen"], atol=1e-5)


def test_lookahead_of_any_optimizer():
    inner = optax.masked(optax.adamw(0.1), {"a": True, "b": False})
    optimizer = ema_nesterov(inner, lambda step: 0.5)
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(())}
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert updates["a"].dtype == jnp.bfloat16
    plain, _ = inner.update(params, inner.init(params), params)
    np.testing.assert_allclose(state.average["b"], 0.01 * plain["b"], rtol=1e-5)
    behind = without_lookahead(state, optax.apply_updates(params, updates))
    np.testing.assert_allclose(behind["b"], params["b"] + plain["b"], rtol=1e-6)
