"""Stages of modded-nanogpt's track 3, against float64 NumPy.

The NumPy follows the published code, whose weights have the outputs first.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import (
    blend_momentum,
    ema_nesterov,
    mixed_emas,
    neuron_floor,
    orthogonalize,
    scale_by_calibrated_trust_ratio,
    scale_by_shape,
    state_shardings,
    without_lookahead,
)
from tests import leaves, oracle
from tests.runs import AUTO, EXPLICIT, mesh_of, placed, step_of

STEPS, SWITCH, RATE = 50, 10, 0.02
NAMES = ("tall", "convolution", "out", "experts", "grouped_query", "equal_rows")
TREE, NUMBERS = leaves.some(*NAMES)


def lerp(start, end, weight):
    return start + weight * (end - start)


class BiMaxwell:
    """Pull request 340, with another step for the switch."""

    def __init__(self, rounded=lambda x: x):
        self.momentum, self.step, self.rounded = 0.0, 0, rounded

    def __call__(self, grad):
        if self.step <= SWITCH:
            effective = lerp(self.momentum, grad, 1 - 0.95)
            self.momentum = self.fast = self.slow = self.rounded(effective)
        else:
            fast, slow = lerp(self.fast, grad, 1 - 0.85), lerp(self.slow, grad, 1 - 0.98)
            effective = 0.4385 * fast + (1 - 0.4385) * slow
            self.fast, self.slow = self.rounded(fast), self.rounded(slow)
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


def row_floor(update, weight, target):
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


two_timescales = functools.partial(mixed_emas, two_decays, (0.4385, 1 - 0.4385))
BETAS = np.where((np.arange(STEPS + 1) >= 5) & (np.arange(STEPS + 1) < 40), 0.3, 0.0)


def record(ns_dtype=None, numbers=NUMBERS, **momentum):
    """The four stages in one chain."""
    numbers = {"weight_dimension_numbers": numbers}
    return ema_nesterov(
        optax.chain(
            two_timescales(**momentum, **numbers),
            blend_momentum(orthogonalize(ns_dtype=ns_dtype, **numbers), -0.25, **numbers),
            scale_by_shape(scale_mode="shape_scaling", **numbers),
            neuron_floor(0.3825, **numbers),
            optax.scale_by_learning_rate(RATE),
        ),
        lambda step: jnp.asarray(BETAS)[step],
    )


def gradients(params, noise):
    return jax.tree.map(lambda p, n: n + 0.1 * p, params, noise)


@functools.partial(jax.jit, static_argnums=0)
def trained(optimizer, params, noises):
    """The parameters and the state after a step for each of the noises."""

    def step(carry, noise):
        return step_of(optimizer)(*carry, gradients(carry[0], noise)), None

    return jax.lax.scan(step, (params, optimizer.init(params)), noises)[0]


def stacked(tree, steps=STEPS, **given):
    return jax.tree.map(
        lambda *x: jnp.stack(x), *[tree(s + 1, **given) for s in range(steps)]
    )


@pytest.mark.parametrize("published", [BiMaxwell, KMaxwell])
def test_momentum(enable_x64, published):
    stage = two_timescales()
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


def test_8_bit_momentum(enable_x64):
    """Each average is rounded on its way into the state, in blocks of 32 rows."""

    def rounded(x):
        blocks = [x[:32], x[32:]]
        scales = [
            np.abs(b).max(axis=0).astype(ml_dtypes.bfloat16).astype(float) for b in blocks
        ]
        return np.concatenate(
            [s * np.rint(127 * b / s) / 127 for s, b in zip(scales, blocks, strict=True)]
        )

    stage, expected = two_timescales(mu_dtype="int8"), BiMaxwell(rounded)
    grads = np.random.default_rng(0).normal(size=(STEPS, 40, 4))
    state, update = stage.init({"w": grads[0]}), jax.jit(stage.update)
    assert [x.trace["w"].dtype for x in state.averages] == [jnp.int8, jnp.int8]
    for grad in grads:
        found, state = update({"w": grad}, state)
        np.testing.assert_allclose(found["w"], expected(grad), rtol=0, atol=1e-12)


def each_matrix(*trees):
    """For every matrix of the leaves, that of each tree with its outputs first."""
    for name in NAMES:
        yield from zip(
            *([m.T for m in leaves.matrices(name, t[name])] for t in trees), strict=True
        )


@pytest.mark.parametrize("norm", ["spectral", "frobenius"])
def test_blend(enable_x64, norm):
    """Contra-Muon, and dion's Soft-Muon (its pull request 92)."""
    given = {"weight_dimension_numbers": NUMBERS}
    arguments = {"spectral": (-0.25,), "frobenius": (0.3,)}[norm]
    kept = {"norm": norm, "keep_norm": norm == "spectral"}
    direction = orthogonalize(ns_dtype=jnp.float64, **given)
    stage = blend_momentum(direction, *arguments, **kept, **given)
    momentum = jax.tree.map(np.float64, TREE(0))
    found, _ = jax.jit(stage.update)(momentum, stage.init(momentum))
    for blended, m in each_matrix(found, momentum):
        q = oracle.newton_schulz(m)
        soft = lerp(q, m / np.linalg.norm(m), 0.3)
        expected = contra(m, q) if norm == "spectral" else soft
        np.testing.assert_allclose(blended, expected, rtol=0, atol=1e-12)


def test_blend_of_any_scale_and_of_momenta_that_ones_do_not_see():
    stage = blend_momentum(orthogonalize(ns_steps=8), -0.25)
    w = jax.random.normal(jax.random.key(0), (6, 4))
    unseen = w - w.mean(axis=0)[None]  # Its columns add up to zero, as Xᵀ1 does.
    grads = {"w": w, "zero": 0 * w, "small": 2.0**-100 * w, "large": 2.0**100 * w}
    grads["unseen"] = unseen
    with jax.debug_nans(True):
        found, _ = stage.update(grads, stage.init(grads))
    assert not found["zero"].any()
    for name in ("small", "large"):
        np.testing.assert_allclose(found[name], found["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found["unseen"]), 2, rtol=0.02)


def test_a_schedule_of_the_share():
    schedule = optax.linear_schedule(-0.25, 0.0, 1)
    stage = optax.inject_hyperparams(blend_momentum)(orthogonalize(), schedule)
    momentum = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
    state, found = stage.init(momentum), []
    for _ in range(2):
        updates, state = stage.update(momentum, state)
        found.append(updates["w"])
    plain, _ = orthogonalize().update(momentum, optax.EmptyState())
    contra, _ = blend_momentum(orthogonalize(), -0.25).update(
        momentum, optax.EmptyState()
    )
    np.testing.assert_allclose(found, [contra["w"], plain["w"]], rtol=1e-5)


def test_floors(enable_x64):
    """Of neurons; and of matrices (pull request 274), which is a ratio with c = 1."""
    given, target = {"weight_dimension_numbers": NUMBERS}, 0.35
    ratio = scale_by_calibrated_trust_ratio(
        calibrate=False, r_min=1 / target, r_max=jnp.inf, eps=0.0, **given
    )
    stages = neuron_floor(target, **given), optax.chain(ratio, optax.scale(target))
    scale = np.geomspace(0.1, 10, 40)
    updates, params = (jax.tree.map(np.float64, TREE(seed)) for seed in (0, 1))
    updates = {n: x * scale[: x.shape[-1]] for n, x in updates.items()}
    rows, whole = (
        jax.jit(stage.update)(updates, stage.init(params), params)[0] for stage in stages
    )
    raised = set()
    for of_rows, of_whole, u, w in each_matrix(rows, whole, updates, params):
        expected = row_floor(u, w, target)
        np.testing.assert_allclose(of_rows, expected, rtol=0, atol=1e-12)
        factor = max(1.0, target * np.linalg.norm(w) / np.linalg.norm(u))
        np.testing.assert_allclose(of_whole, factor * u, rtol=0, atol=1e-12)
        raised |= {*(expected != u).any(axis=1)}
    assert raised == {True, False}
    zero = jax.tree.map(jnp.zeros_like, updates)
    with jax.debug_nans(True):
        found, _ = stages[0].update(zero, stages[0].init(params), params)
    assert not any(x.any() for x in jax.tree.leaves(found))


@pytest.mark.extended
def test_50_steps_of_all_four(enable_x64):
    optimizer = record(jnp.float64)
    params = jax.tree.map(lambda x: np.float64(0.2 * x), TREE(0))
    noises = jax.tree.map(np.float64, stacked(TREE))
    ends, state = trained(optimizer, params, noises)
    ends = without_lookahead(state, ends)
    every_step = [jax.tree.map(lambda x, i=i: x[i], noises) for i in range(STEPS)]
    for start, end, *noise in each_matrix(params, ends, *every_step):
        momentum, run = BiMaxwell(), Lookahead(start, BETAS)
        for n in noise:

            def update(point, n=n, momentum=momentum):
                m = momentum(n + 0.1 * point)
                d = contra(m, oracle.newton_schulz(m))
                d = d * max(1, d.shape[0] / d.shape[1]) ** 0.5
                return -RATE * row_floor(d, point, 0.3825)

            run.step(update)
        assert leaves.relative_error(end, run.weight) < 1e-12


@pytest.mark.extended
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("mu_dtype", [None, "int8"])
def test_all_four_on_a_mesh(kind, mu_dtype):
    """Three steps in float32, with the shardings that `state_shardings` gives."""
    shapes = {"up": (64, 16), "layers": (3, 32, 16), "down": (16, 40)}
    numbers = {"up": Dims(0, 1), "layers": Dims(1, 2), "down": Dims(0, 1)}
    specs = {"up": P("a", "b"), "layers": P(None, "b", "a"), "down": P("b")}
    optimizer = record(jnp.float32, numbers, mu_dtype=mu_dtype)

    def tree(seed, scale=1.0):
        rng = np.random.default_rng(seed)
        return {n: np.float32(scale * rng.normal(size=s)) for n, s in shapes.items()}

    noises = [tree(seed) for seed in range(1, 4)]
    mesh = mesh_of({"a": 2, "b": 4}, kind)
    alone, sharded = tree(0, 0.2), placed(tree(0, 0.2), mesh, specs)
    expected = optimizer.init(alone)
    of_state = state_shardings(optimizer, sharded)
    where = jax.tree.map(lambda x: x.sharding, sharded)
    with jax.set_mesh(mesh):
        state = jax.jit(optimizer.init, out_shardings=of_state)(sharded)
        step = step_of(optimizer, out_shardings=(where, of_state))
        for noise in noises:
            alone, expected = step_of(optimizer)(alone, expected, noise)
            sharded, state = step(sharded, state, placed(noise, mesh, specs))
    for name in shapes:
        assert sharded[name].sharding.spec == specs[name]
        assert state.average[name].sharding.is_equivalent_to(
            where[name], len(shapes[name])
        )
        assert leaves.relative_error(sharded[name], alone[name]) < 1e-5


def test_lookahead_of_any_optimizer():
    """Of other parameters, in bfloat16, and with a mask."""
    inner = optax.masked(optax.adamw(0.1), {"a": True, "b": False})
    optimizer = ema_nesterov(inner, 0.5)
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(())}
    state = optimizer.init(params)
    assert state.average["a"].dtype == jnp.float32
    updates, state = jax.jit(optimizer.update)(params, state, params)
    assert updates["a"].dtype == jnp.bfloat16
    plain, _ = inner.update(params, inner.init(params), params)
    np.testing.assert_allclose(state.average["b"], 0.01 * plain["b"], rtol=1e-5)
    moved = optax.apply_updates(params, updates)
    behind = without_lookahead((state, ()), moved)
    np.testing.assert_allclose(behind["b"], params["b"] + plain["b"], rtol=1e-6)
    with pytest.raises(ValueError, match="0 EMANesterovState instead of one"):
        without_lookahead(inner.init(params), params)
    other = params | {"b": jnp.ones(4)}  # To which the average would be broadcast.
    for call in (lambda: optimizer.update(other, state, other),
                 lambda: without_lookahead(state, other)):  # fmt: skip
        with pytest.raises(ValueError, match=r"average .* 'b' has shape \(\), but"):
            call()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: mixed_emas((0.9, 1.0), (0.5, 0.5)), r"decays=1.0 .* \[0, 1\)"),
        (
            lambda: mixed_emas((0.9,), (0.5, 0.5)),
            "weights=.* is not valid: pass 1, as of",
        ),
        (lambda: mixed_emas((0.9,), (1,), gradient_share=1), "gradient_share=1 is not"),
        (
            lambda: mixed_emas((0.9,), (1,), mu_dtype="int4"),
            "mu_dtype='int4' is not valid",
        ),
        (lambda: blend_momentum(0.1, 0.1), "direction is of type float"),
        (lambda: blend_momentum(orthogonalize(), 1), "share=1 is not valid"),
        (
            lambda: blend_momentum(orthogonalize(), 0.1, norm="op"),
            "norm='op' is not valid",
        ),
        (lambda: neuron_floor(-1), "ratio=-1 is not valid"),
        (lambda: ema_nesterov(1, 0.1), "inner is of type int"),
        (lambda: ema_nesterov(optax.sgd(0.1), -1), "lookahead=-1 is not valid"),
        (lambda: ema_nesterov(optax.sgd(0.1), 0.1, decay=1), "decay=1 is not valid"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
