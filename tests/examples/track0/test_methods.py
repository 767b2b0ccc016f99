"""The four methods of examples.track0 against float64 NumPy.

The NumPy follows the published code, whose weights have the outputs first.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.track0.blend import blend_momentum, contra_muon, frobenius, spectral
from examples.track0.ema_nesterov import ema_nesterov, muon_ahead, without_lookahead
from examples.track0.mixed_emas import mixed_emas, two_timescales
from examples.track0.neuron_floor import neuron_floor, row_floor
from orscale_jax import orthogonalize, scale_by_shape
from tests import oracle
from tests.runs import step_of

STEPS, SWITCH, RATE = 50, 10, 0.02
SHAPES = {"tall": (12, 5), "wide": (4, 9), "stack": (3, 6, 8)}


def lerp(start, end, weight):
    return start + weight * (end - start)


class BiMaxwell:
    """Pull request 340, with another step for the switch."""

    def __init__(self):
        self.momentum, self.step = 0.0, 0

    def __call__(self, grad):
        if self.step <= SWITCH:
            effective = lerp(self.momentum, grad, 1 - 0.95)
            self.momentum = self.fast = self.slow = effective
        else:
            fast, slow = lerp(self.fast, grad, 1 - 0.85), lerp(self.slow, grad, 1 - 0.98)
            effective = 0.4385 * fast + (1 - 0.4385) * slow
            self.fast, self.slow = fast, slow
        self.step += 1
        return lerp(grad, effective, 0.95)


class KMaxwell:
    """Pull request 357: weights go from one set to another."""

    betas, first, last = (
        (0.5, 0.9, 0.99),
        np.array([0.2, 0.3, 0.5]),
        np.array([0.6, 0.3, 0.1]),
    )

    def __init__(self):
        self.emas, self.step = [0.0] * 3, 0

    def __call__(self, grad):
        pairs = zip(self.emas, self.betas, strict=True)
        self.emas = [lerp(m, grad, 1 - beta) for m, beta in pairs]
        fraction = self.step / STEPS
        weights = (1 - fraction) * self.first + fraction * self.last
        self.step += 1
        return lerp(
            grad, sum(w * m for w, m in zip(weights, self.emas, strict=True)), 0.95
        )


def operator_norm(x):
    """Pull request 275: five power steps from a vector of ones."""
    v = np.ones(x.shape[1]) / x.shape[1] ** 0.5
    for _ in range(5):
        u = x @ v
        v = x.T @ (u / np.linalg.norm(u))
        v /= np.linalg.norm(v)
    return np.linalg.norm(x @ v)


def contra(update, q, coefficient=0.4):
    """Pull request 275."""
    blended = q - coefficient / 2 * update / operator_norm(update)
    return blended * np.linalg.norm(q) / np.linalg.norm(blended)


def row_floor_of(update, weight, target):
    """Pull request 328."""
    weights, updates = (
        np.linalg.norm(x, axis=1, keepdims=True) for x in (weight, update)
    )
    return update * np.maximum(target * weights / updates, 1.0)


class Lookahead:
    """The wrapper of pull requests 308 and 328, around ``step(point)``."""

    def __init__(self, weight, betas):
        self.weight, self.betas, self.it = weight, betas, 0
        self.previous, self.buffer = weight.copy(), np.zeros_like(weight)

    @property
    def point(self):
        """Where the next gradient is taken."""
        return self.weight + self.betas[self.it] * self.buffer

    def step(self, update):
        self.weight = self.point + update(self.point)
        self.buffer = lerp(self.buffer, self.weight - self.previous, 1 - 0.99)
        self.previous = self.weight.copy()
        self.it += 1


def two_decays(step):
    return jnp.where(step <= SWITCH, jnp.full(2, 0.95), jnp.asarray([0.85, 0.98]))


BETAS = np.where((np.arange(STEPS + 1) >= 5) & (np.arange(STEPS + 1) < 40), 0.3, 0.0)


def tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: scale * rng.normal(size=shape) for name, shape in SHAPES.items()}


def matrices(*trees):
    """For every matrix of the leaves, that of each tree with its outputs first."""
    for name, shape in SHAPES.items():
        yield from zip(
            *(np.asarray(t[name]).reshape(-1, *shape[-2:]).mT for t in trees), strict=True
        )


NUMBERS = dict.fromkeys(SHAPES, optax.contrib.MuonDimensionNumbers(-2, -1))
polar = functools.partial(
    orthogonalize, ns_dtype=jnp.float64, weight_dimension_numbers=NUMBERS
)


@pytest.mark.parametrize("published", [BiMaxwell, KMaxwell])
def test_momentum(enable_x64, published):
    stage = mixed_emas(two_decays, (0.4385, 1 - 0.4385))
    if published is KMaxwell:
        weights = functools.partial(lerp, KMaxwell.first, KMaxwell.last)
        stage = mixed_emas(
            KMaxwell.betas, lambda step: weights(jnp.float64(step) / STEPS)
        )
    grads = np.random.default_rng(0).normal(size=(STEPS, 6, 4))
    state, expected = stage.init({"w": grads[0]}), published()
    update = jax.jit(stage.update)
    for grad in grads:
        found, state = update({"w": grad}, state)
        np.testing.assert_allclose(found["w"], expected(grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", [spectral, frobenius])
def test_blend(enable_x64, norm):
    """Contra-Muon, and dion's Soft-Muon (its pull request 92)."""
    share, keep = (-0.25, True) if norm is spectral else (0.3, False)
    stage, momentum = blend_momentum(polar(), share, norm, keep), tree(0)
    found, _ = jax.jit(stage.update)(momentum, stage.init(momentum))
    for blended, m in matrices(found, momentum):
        q = oracle.newton_schulz(m)
        soft = lerp(q, m / np.linalg.norm(m), 0.3)
        expected = contra(m, q) if norm is spectral else soft
        np.testing.assert_allclose(blended, expected, rtol=0, atol=1e-12)


def test_blend_of_momenta_that_are_zero_or_that_ones_do_not_see():
    stage = blend_momentum(orthogonalize(ns_steps=8), -0.25, spectral)
    w = jax.random.normal(jax.random.key(0), (6, 4))
    grads = {"zero": 0 * w, "unseen": w - w.mean(axis=0)[None]}  # Xᵀ1 = 0
    with jax.debug_nans(True):
        found, _ = stage.update(grads, stage.init(grads))
    assert not found["zero"].any()
    np.testing.assert_allclose(np.linalg.norm(found["unseen"]), 2, rtol=0.02)


def test_floor_of_neurons(enable_x64):
    stage, target = neuron_floor(0.35), 0.35
    updates, params = tree(0), tree(1)
    updates = {n: x * np.geomspace(0.1, 10, x.shape[-1]) for n, x in updates.items()}
    found, _ = jax.jit(stage.update)(updates, stage.init(params), params)
    raised = set()
    for rows, u, w in matrices(found, updates, params):
        expected = row_floor_of(u, w, target)
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-12)
        raised |= {*(expected != u).any(axis=1)}
    assert raised == {True, False}
    with jax.debug_nans(True):
        zero = optax.tree.zeros_like(params)
        assert not any(x.any() for x in stage.update(zero, (), params)[0].values())


def test_lookahead_of_any_optimizer():
    inner = optax.masked(optax.adamw(0.1), {"a": True, "b": False})
    optimizer = ema_nesterov(inner, 0.5)
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(())}
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert updates["a"].dtype == jnp.bfloat16
    plain, _ = inner.update(params, inner.init(params), params)
    np.testing.assert_allclose(state.average["b"], 0.01 * plain["b"], rtol=1e-5)
    behind = without_lookahead(state, optax.apply_updates(params, updates))
    np.testing.assert_allclose(behind["b"], params["b"] + plain["b"], rtol=1e-6)


@pytest.mark.extended
def test_50_steps_of_all_four(enable_x64):
    optimizer = ema_nesterov(
        optax.chain(
            mixed_emas(two_decays, (0.4385, 1 - 0.4385)),
            blend_momentum(polar(), -0.25, spectral),
            scale_by_shape(scale_mode="shape_scaling", weight_dimension_numbers=NUMBERS),
            neuron_floor(0.3825),
            optax.scale_by_learning_rate(RATE),
        ),
        lambda step: jnp.asarray(BETAS)[step],
    )
    params, noises = tree(0, 0.2), [tree(s + 1) for s in range(STEPS)]
    ends, state = params, optimizer.init(params)
    step = step_of(optimizer)
    for noise in noises:
        grads = jax.tree.map(lambda p, n: n + 0.1 * p, ends, noise)
        ends, state = step(ends, state, grads)
    ends = without_lookahead(state, ends)
    for start, end, *noise in matrices(params, ends, *noises):
        momentum, run = BiMaxwell(), Lookahead(start, BETAS)
        for n in noise:

            def update(point, n=n, momentum=momentum):
                m = momentum(n + 0.1 * point)
                d = contra(m, oracle.newton_schulz(m))
                d = d * max(1, d.shape[0] / d.shape[1]) ** 0.5
                return -RATE * row_floor_of(d, point, 0.3825)

            run.step(update)
        np.testing.assert_allclose(end, run.weight, rtol=0, atol=1e-11)


@pytest.mark.parametrize("make", [two_timescales, contra_muon, row_floor, muon_ahead])
def test_entries_train(make):
    """Each takes a rate and dimension numbers, and lowers a loss."""
    assert [*inspect.signature(make).parameters] == [
        "learning_rate", "weight_dimension_numbers",
    ]  # fmt: skip
    optimizer = make(0.1, NUMBERS)
    params = jax.tree.map(jnp.float32, tree(0))
    state, step = optimizer.init(params), step_of(optimizer)
    norms = [optax.tree.norm(params)]
    for _ in range(20):
        params, state = step(params, state, params)  # The gradient of ‖W‖² / 2.
        norms.append(optax.tree.norm(params))
    assert norms[-1] < 0.8 * norms[0]
