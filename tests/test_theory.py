"""What the paper's section 4 and appendix A say about the ratio, measured on the package.

Predictions are computed in NumPy (SVDs, norms, the bounds), and compared with what the
optimizers do: their steps and their logged ratios.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

from orscale_jax import (
    muon,
    orscale,
    orthogonalize,
    polar_factor,
    scale_by_calibrated_trust_ratio,
    scale_by_shape,
)
from tests import oracle, runs
from tests.runs import readout

pytestmark = pytest.mark.usefixtures("enable_x64")

# The theory takes Q to be the polar factor. 16 steps bring normalised singular values
# from 1e-4 to 1 within rounding, and multiply those that are rounded zeros by 1e6.
EXACT = {"ns_steps": 16, "ns_dtype": jnp.float64}
# Assumption (A4), s = 1 and c = 1: the update of Theorem 1.


def gaussian(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def nuclear(x):
    return np.linalg.norm(x, "nuc", axis=(-2, -1))


def with_singular_values(values, shape, seed):
    """A matrix with these singular values, and its polar factor."""
    u, _, vt = np.linalg.svd(gaussian(seed, *shape), full_matrices=False)
    u, vt = u[:, : len(values)], vt[: len(values)]
    return u * np.asarray(values) @ vt, u @ vt


# Matrix, polar factor and rank. Below full rank, singular values are zero up to rounding,
# and the steps raise 1e-16 to less than 1e-9. Zeros around the block are exact, and stay.
POLAR = {
    "tall": (*with_singular_values([3.0, 1.0, 0.5, 0.1], (9, 4), 0), 4),
    "wide": (*with_singular_values([1e3, 1e2, 10.0, 1.0], (4, 9), 1), 4),
    "square": (*with_singular_values([1.0, 1.0, 0.9, 0.2, 0.1, 0.03], (6, 6), 2), 6),
    "rank 1": (*with_singular_values([1e-3], (9, 4), 3), 1),
    "rank 2": (*with_singular_values([5.0, 0.7], (6, 6), 4), 2),
}
BLOCK = with_singular_values([2.0, 1.0, 0.3], (3, 3), 5)
POLAR["block"] = (*(np.pad(x, ((0, 3), (2, 1))) for x in BLOCK), 3)


def exact_polar(a):
    return np.asarray(polar_factor(jnp.asarray(a), steps=16, dtype=jnp.float64))


@pytest.mark.parametrize("name", POLAR)
def test_polar_factor_algebra(name):
    """The lemma: (i) ⟨A, Q⟩ = ‖A‖_*, (iii) the norms of Q, (ii) the dual bound."""
    a, expected, rank = POLAR[name]
    q = exact_polar(a)
    np.testing.assert_allclose(q, expected, atol=1e-9)
    np.testing.assert_allclose(np.sum(a * q), nuclear(a), rtol=1e-9)
    values = np.linalg.svd(q, compute_uv=False)
    np.testing.assert_allclose(values, np.arange(len(values)) < rank, rtol=0, atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(q), np.sqrt(rank), rtol=1e-9)
    if name == "block":  # Exact zeros stay.
        assert not q[3:].any() and not q[:, :2].any() and not q[:, 5:].any()
    b = gaussian(7, 200, *a.shape)
    spikes = b[:, :, :1] * b[:, :1, :]  # Rank one: the nearest that random B come.
    for others in (b, spikes):
        inner = np.abs(np.sum(others * q, axis=(-2, -1)))
        assert (inner <= nuclear(others) * (1 + 1e-9)).all()
    u, sigma, vt = np.linalg.svd(a, full_matrices=False)
    sigma = np.where(sigma > 1e-9 * sigma[0], np.abs(gaussian(8, len(sigma))), 0)
    attained = u * sigma @ vt
    np.testing.assert_allclose(np.sum(attained * q), nuclear(attained), 1e-8)


# W − W*: in general, and with all singular values 1.


# One multiplier, smoothness constant and ‖∇f‖_* per block.


@functools.partial(jax.jit, static_argnums=0)
def trajectory(build, level):
    """The weights after each of 12 steps with momentum and weight decay."""
    shapes = {"a": (6, 4), "b": (4, 7), "c": (5, 5)}
    start = {name: jnp.asarray(3 * gaussian(0, *shape)) for name, shape in shapes.items()}
    grads = {name: gaussian(1, 12, *shape) for name, shape in shapes.items()}
    optimizer = BUILDS[build](level)

    def step(carry, gradient):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(step, (start, optimizer.init(start)), grads)[1]


BUILDS = {
    "relabeled": lambda level: muon(level * 0.02, **EXACT),
    "constant": lambda level: orscale(0.02, r_min=level, r_max=level, **EXACT),
    "saturated": lambda most: orscale(
        0.02, calibrate=False, r_min=0.05, r_max=most, **EXACT
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "build, level",
    [("constant", 0.4), ("constant", 1.0), ("constant", 3.0), ("saturated", 0.3)],
)
def test_collapse_of_unit_inconsistent_ratios(build, level):
    """The theorem; ratios that saturate stay beyond the clip by themselves."""
    found, expected = trajectory(build, level), trajectory("relabeled", level)
    for name, weights in found.items():
        np.testing.assert_allclose(weights, expected[name], rtol=0, atol=1e-12)
    if build == "saturated":
        free = trajectory(build, 99.0)
        assert all(np.abs(free[name] - found[name]).max() > 0.05 for name in found)


@jax.jit
def first_ratio(weight, gradient, decay, eps):
    optimizer = orscale(1.0, weight_decay=decay, eps=eps, r_min=0.0, r_max=99.0, **EXACT)
    params = {"w": weight}
    _, state = optimizer.update({"w": gradient}, optimizer.init(params), params)
    return readout(state, "raw_trust_ratio")["w"], readout(state, "calibration")["w"]


@jax.jit
def early_training(decay):
    """‖W_t‖ and r_t over 30 steps of noise around a drift."""
    optimizer = orscale(5e-3, weight_decay=decay, eps=0.0, **EXACT)
    start = {"w": jnp.asarray(0.02 * gaussian(0, 32, 16))}

    def step(carry, gradient):
        params, state = carry
        updates, state = optimizer.update({"w": gradient}, state, params)
        seen = jnp.linalg.norm(params["w"]), readout(state, "raw_trust_ratio")["w"]
        return (optax.apply_updates(params, updates), state), seen

    grads = gaussian(1, 32, 16) + gaussian(2, 30, 32, 16)
    return jax.lax.scan(step, (start, optimizer.init(start)), grads)[1]


@pytest.mark.extended
class TestCalibratedRatio:
    """Corollary 'properties of the calibrated ratio'."""

    scales = st.floats(-4, 4).map(lambda x: 10.0**x)

    @given(scales, scales, st.floats(0, 1), st.floats(-12, -2).map(lambda x: 10.0**x))
    def test_anchor(self, weight_scale, gradient_scale, decay, eps):
        """(i): |1/r_0 − 1| ≤ ε max(1/‖D‖, 1/‖W‖), at every scale of W and G."""
        w, g = weight_scale * gaussian(0, 6, 10), gradient_scale * gaussian(1, 6, 10)
        direction = decay * w + 0.2 * np.sqrt(10) * oracle.svd_polar(g)
        w_norm, d_norm = np.linalg.norm(w), np.linalg.norm(direction)
        ratio, c = first_ratio(w, g, decay, eps)
        np.testing.assert_allclose(c, w_norm / (d_norm + eps), rtol=1e-9)
        assert abs(1 / ratio - 1) <= eps * max(1 / d_norm, 1 / w_norm) + 1e-12

    def test_width_invariance(self):
        """(ii): at the anchor r = 1 and every entry moves by 0.2 η, at every width."""
        wide = [(16, 64), (4096, 64), (64, 16), (64, 4096), (256, 256)]
        # Weights of RMS 1/√fan-in, and gradients that shrink with the width.
        params = [jnp.float32(gaussian(0, m, n) / m**0.5) for m, n in wide]
        grads = [jnp.float32(gaussian(1, m, n) / (m * n)) for m, n in wide]
        optimizer = orscale(1e-2, weight_decay=0.0, ns_steps=14)
        step = jax.jit(optimizer.update)
        updates, state = step(grads, optimizer.init(params), params)
        for update, ratio in zip(updates, readout(state, "raw_trust_ratio"), strict=True):
            np.testing.assert_allclose(ratio, 1, atol=1e-5)
            rms = np.sqrt(np.mean(np.square(update)))
            np.testing.assert_allclose(rms, 0.2 * 1e-2, rtol=2e-3)

    @staticmethod
    @jax.jit
    def ratios(weights, grads, decay):
        """The raw ratio at these weights and gradients, and c."""
        optimizer = orscale(1.0, weight_decay=decay, eps=0.0, **EXACT)

        def step(state, at):
            _, state = optimizer.update({"w": at[1]}, state, {"w": at[0]})
            return state, readout(state, "raw_trust_ratio")["w"]

        state, r = jax.lax.scan(step, optimizer.init({"w": weights[0]}), (weights, grads))
        return r, readout(state, "calibration")["w"]

    @pytest.mark.parametrize("decay", [0.01, 0.1, 1.0])
    @pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
    def test_ceiling(self, shape, decay):
        """(iii): |1/(c λ r) − 1| ≤ s√p/(λ‖W‖), whatever the gradients."""
        growth = 10.0 ** np.arange(9)
        weights = np.multiply.outer(growth, gaussian(0, *shape))
        r, c = self.ratios(weights, gaussian(1, 9, *shape), decay)
        norms = np.linalg.norm(weights, axis=(1, 2))
        rate = 0.2 * np.sqrt(12) * np.sqrt(5) / (decay * norms)
        assert (np.abs(1 / (c * decay * r) - 1) <= rate * (1 + 1e-9) + 1e-12).all()
        np.testing.assert_allclose(r[-1], 1 / (c * decay), rtol=1e-5)

    def test_the_rate_of_approach_to_the_ceiling(self):
        """Lemma 'ceiling': O(1/‖W‖) is attained, with ⟨W, sQ⟩/(λ‖W‖²) in front."""
        w, decay, growth = gaussian(0, 12, 5), 0.1, 10.0 ** np.arange(9)
        r, c = self.ratios(np.multiply.outer(growth, w), np.stack([w] * 9), decay)
        leading = 0.2 * np.sqrt(12) * nuclear(w) / (decay * np.linalg.norm(w) ** 2)
        found = growth * (1 / (c * decay * r) - 1)
        np.testing.assert_allclose(found[3:], leading, rtol=1e-2)
        np.testing.assert_allclose(found[6], leading, rtol=1e-5)

    @pytest.mark.parametrize("decay", [0.0, 0.1])
    def test_early_signal(self, decay):
        """(iv): r_t = ‖W_t‖/‖W_0‖ up to λ‖W‖/(s√p), along a trajectory."""
        norms, r = early_training(decay)
        growth = norms / norms[0]
        part = decay * norms / (0.2 * np.sqrt(32) * np.sqrt(16))
        assert growth[-1] > 2 and part.max() < 0.1
        assert (r / growth <= (1 + part[0]) / (1 - part) + 1e-12).all()
        assert (r / growth >= (1 - part[0]) / (1 + part) - 1e-12).all()


@pytest.mark.extended
class TestCoupledDecay:
    """Proposition 'coupled-WD extension': ‖W‖ is bounded, by s√p/λ if η r̂ λ ≤ 1."""

    DECAY, RATE = 0.5, 0.05
    CEILING = 0.2 * np.sqrt(6) * np.sqrt(4) / DECAY

    def norms(self, optimizer, sizes):
        """‖W_t‖ over 600 steps, from each ‖W_0‖ of ``sizes`` on, pushed away from 0."""
        start = gaussian(0, 6, 4)
        start = np.multiply.outer(sizes, start / np.linalg.norm(start))

        def step(carry, _):
            params, state = carry
            gradient = jax.tree.map(jnp.negative, params)
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), jnp.linalg.norm(params["w"])

        def run(w):
            carry = {"w": w}, optimizer.init({"w": w})
            return jax.lax.scan(step, carry, length=600)[1]

        return np.asarray(jax.jit(jax.vmap(run))(start))

    def orscale(self, **arguments):
        return orscale(self.RATE, weight_decay=self.DECAY, **EXACT, **arguments)

    def test_weights_grow_or_shrink_to_the_ceiling(self):
        *small, large = self.norms(self.orscale(), [0.1, 1.0, 10 * self.CEILING])
        assert np.max(small) <= self.CEILING * (1 + 1e-9)
        assert (np.diff(large) <= 1e-9).all()
        for norms in (*small, large):
            np.testing.assert_allclose(norms[-1], self.CEILING, rtol=1e-2)

    def test_without_decay_there_is_none(self):
        [norms] = self.norms(orscale(self.RATE, weight_decay=0.0, **EXACT), [1.0])
        assert norms[-1] > 5 * self.CEILING

    def test_the_coupling_bounds_without_the_clip(self):
        """Section 3: decoupled decay does not scale with r and lets W run away."""
        coupled = self.orscale(r_min=0.0, r_max=np.inf)
        assert self.norms(coupled, [0.5]).max() < 1.2 * self.CEILING
        decoupled = optax.chain(
            orthogonalize(**EXACT), scale_by_shape(0.2),
            scale_by_calibrated_trust_ratio(r_min=0.0, r_max=np.inf),
            optax.add_decayed_weights(self.DECAY),
            optax.scale_by_learning_rate(self.RATE),
        )  # fmt: skip
        assert self.norms(decoupled, [0.5])[0, -1] > 1e3 * self.CEILING


@pytest.mark.extended
class TestOtherTrustRatios:
    """Sections 2 and 3: the template over SGD is LARS, and over Adam LAMB."""

    def ratio(self):
        return scale_by_calibrated_trust_ratio(
            calibrate=False, r_min=-np.inf, r_max=np.inf, eps=0.0
        )

    def assert_same(self, ours, theirs):
        start = {
            "a": jnp.asarray(gaussian(0, 6, 4)),
            "b": jnp.asarray(5 * gaussian(1, 3, 8)),
        }

        def gradients(seed):
            return {name: gaussian(seed, *w.shape) for name, w in start.items()}

        both = (runs.run(optimizer, start, 6, gradients) for optimizer in (ours, theirs))
        for (found, _), (expected, _) in zip(*both, strict=True):
            runs.assert_close(found, expected, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_lars(self, momentum):
        """Optax's applies the momentum after the ratio."""
        ours = optax.chain(
            optax.add_decayed_weights(0.1), self.ratio(),
            optax.scale_by_learning_rate(0.05), optax.trace(momentum),
        )  # fmt: skip
        theirs = optax.lars(
            0.05, weight_decay=0.1, trust_coefficient=1.0, eps=0.0, momentum=momentum
        )
        self.assert_same(ours, theirs)

    def test_lamb(self):
        ours = optax.chain(
            optax.scale_by_adam(b1=0.8, b2=0.99, eps=1e-6),
            optax.add_decayed_weights(0.1), self.ratio(),
            optax.scale_by_learning_rate(0.05),
        )  # fmt: skip
        self.assert_same(ours, optax.lamb(0.05, b1=0.8, b2=0.99, weight_decay=0.1))
