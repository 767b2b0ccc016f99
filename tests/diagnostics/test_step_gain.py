"""The gain along a step, where it is known and where a line search finds it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import by_path, muon, orscale, polar_factor
from orscale_jax.diagnostics import read, step_gain
from tests import leaves

SHAPES = {"a": (6, 4), "b": (3, 5, 5), "c": (4, 8)}
NUMBERS = {"a": Dims(0, 1), "b": Dims(1, 2), "c": Dims(0, 1)}
RATIOS = {"a": 1.5, "b": np.array([0.5, 1.0, 2.0]), "c": 0.8}
SIZE = sum(np.prod(shape) for shape in SHAPES.values())


def flat(tree):
    return jnp.concatenate([jnp.ravel(tree[name]) for name in SHAPES])


def hessian(rng):
    """Positive, with terms between all matrices."""
    root = rng.normal(size=(SIZE, SIZE)) / SIZE**0.5
    return root @ root.T + 0.1 * np.eye(SIZE)


def quadratic(params, batch):
    """One function of all problems, compiled once."""
    x, (noise, curvature) = flat(params), batch
    return 0.5 * x @ curvature @ x + jnp.sum(noise * x)


def moonlight(m, n):
    return 0.2 * max(m, n) ** 0.5


def steps(gradient, ratios, scale):
    """r̂sQ in float64, with Q by an SVD."""
    moved = []
    for name, shape in SHAPES.items():
        matrices = gradient[name].reshape(-1, *shape[-2:])
        of_leaf = np.broadcast_to(np.ravel(ratios[name]), len(matrices))
        for matrix, r in zip(matrices, of_leaf, strict=True):
            u, _, vt = np.linalg.svd(matrix, full_matrices=False)
            moved.append(r * scale(*matrix.shape) * (u @ vt).ravel())
    return np.concatenate(moved)


def exact(params, curvature, scale=moonlight):
    """κ and the two learning rates, in float64."""
    gradient = curvature @ np.float64(flat(params))
    sizes = np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
    parts = np.split(gradient, sizes)
    tree = {n: p.reshape(s) for (n, s), p in zip(SHAPES.items(), parts, strict=True)}
    ones = dict.fromkeys(SHAPES, 1.0)
    found = []
    for ratios in (RATIOS, ones):
        step = steps(tree, ratios, scale)
        slope, bend = gradient @ step, step @ curvature @ step
        found.append((slope**2 / bend, slope / bend))
    (ours, rate), (muons, muon_rate) = found
    return ours / muons, rate, muon_rate


def problem(seed, noise, count=16):
    rng = np.random.default_rng(seed)
    curvature = hessian(rng)
    params = {
        name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in SHAPES.items()
    }
    noise = noise * rng.normal(size=(count, SIZE)).astype(np.float32)
    batches = [(draw, np.float32(curvature)) for draw in noise]
    return quadratic, params, batches, curvature


def test_without_noise_it_is_the_closed_form():
    loss_fn, params, batches, curvature = problem(0, 0.0, 4)
    given = loss_fn, params, batches, RATIOS, NUMBERS
    for scale, mode in (
        (moonlight, "spectral"),
        (lambda m, n: (n / m) ** 0.5, "unit_rms_norm"),
    ):
        found, expected = (
            step_gain(*given, scale_mode=mode),
            exact(params, curvature, scale),
        )
        # Q is that of eight steps of Newton–Schulz, not of an SVD.
        values = [estimated.value for estimated in found]
        np.testing.assert_allclose(values, expected, rtol=1e-3)
    own = {"a": jnp.float32(1), "b": jnp.ones(3), "c": jnp.float32(1)}
    assert step_gain(loss_fn, params, batches, own, NUMBERS).kappa.value == 1


@pytest.mark.extended
def test_with_noise_within_standard_errors():
    deviations = []
    for seed in range(20):
        loss_fn, params, batches, curvature = problem(seed, 0.2)
        kappa = step_gain(loss_fn, params, batches, RATIOS, NUMBERS).kappa
        deviations.append((kappa.value - exact(params, curvature)[0]) / kappa.stderr)
    assert np.mean(np.abs(deviations) < 2) >= 0.8
    assert abs(np.mean(deviations)) < 1


@pytest.mark.extended
def test_terms_between_matrices_count():
    """Two matrices whose curvature is all between them: the model sees none of it."""

    def loss_fn(params, batch):
        a, b = params["a"], params["b"]
        between = jnp.sum((a + b) ** 2)
        return 10 * between + 0.1 * jnp.sum(a**2) + jnp.sum(batch * a) + jnp.sum(a + b)

    params = {"a": 0.1 * jnp.eye(4), "b": 0.1 * jnp.eye(4)}
    batches = jnp.zeros((4, 4, 4))
    ratios = {"a": jnp.float32(1.5), "b": jnp.float32(0.5)}
    kappa = step_gain(loss_fn, params, batches, ratios).kappa.value
    q = polar_factor(jax.grad(loss_fn)(params, batches[0])["a"], steps=8)
    losses = {}
    for name, (a, b) in {"muon": (1, 1), "ours": (1.5, 0.5)}.items():
        rates = np.linspace(0, 2, 20001)
        moved = jax.vmap(
            lambda rate, a=a, b=b: loss_fn(
                {"a": params["a"] - rate * a * q, "b": params["b"] - rate * b * q},
                batches[0],
            )
        )(rates)
        losses[name] = float(moved[0] - moved.min())
    assert kappa == pytest.approx(losses["ours"] / losses["muon"], rel=0.02)


@pytest.mark.extended
def test_a_blocked_leaf():
    numbers = {"fused": leaves.DIMENSIONS["fused"], "bias": None}
    params = {name: leaves.random_tree(0)[name] for name in numbers}
    target = leaves.random_tree(1)["fused"]

    def loss_fn(params, batch):
        return jnp.mean((params["fused"] - target + 0.1 * batch) ** 2) + params["bias"][0]

    batches = jax.random.normal(jax.random.key(0), (4, *target.shape))
    ratios = {"fused": jnp.ones(3), "bias": optax.MaskedNode()}
    found = step_gain(loss_fn, params, batches, ratios, numbers)
    assert found.kappa.value == 1 and found.learning_rate.value > 0


class TestReadings:
    """The ratios of a reading."""

    def reading(self):
        params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
        optimizer = orscale(0.1, weight_dimension_numbers=NUMBERS)
        reading = jax.jit(lambda: read(optimizer.init(params), params, NUMBERS))()
        ratios = jax.tree.map(jnp.float32, RATIOS)
        return reading._replace(trust_ratio=ratios)

    def test_the_ratios_come_from_the_reading(self):
        loss_fn, params, batches, _ = problem(0, 0.1, 4)
        by_hand = step_gain(loss_fn, params, batches, RATIOS, NUMBERS)
        found = step_gain(loss_fn, params, batches, self.reading(), NUMBERS)
        assert found.kappa.value == by_hand.kappa.value

    @pytest.mark.extended
    def test_matrices_without_ratios_have_those_of_muon(self):
        kinds = {"a": orscale(1e-2), "b": muon(1e-2)}
        optimizer = optax.partition(kinds, {"a": "a", "b": "b"})
        params, batches = {"a": jnp.eye(4), "b": 2 * jnp.eye(4)}, jnp.arange(8.0) / 100
        reading = read(optimizer.init(params), params)
        ratios = reading.trust_ratio | {"a": jnp.float32(3)}
        reading = reading._replace(trust_ratio=ratios)

        def loss_fn(params, batch):
            return jnp.sum((params["a"] - batch) ** 2) + 3 * jnp.sum(params["b"] ** 2)

        found = step_gain(loss_fn, params, batches, reading)
        expected = step_gain(
            loss_fn, params, batches, {"a": jnp.float32(3), "b": jnp.float32(1)}
        )
        assert found.kappa.value == expected.kappa.value != 1

    @pytest.mark.parametrize("numbers", [None, by_path({"a": "matrix"})])
    def test_parameters_of_other_optimizers_stay_where_they_are(self, numbers):
        alone, others = {"a": jnp.eye(4)}, {"b": jnp.eye(4), "conv": jnp.ones((3, 3, 4))}
        params, batches = alone | others, jnp.arange(8.0) / 100
        kinds = {"a": orscale(1e-2), "b": optax.set_to_zero(), "conv": optax.adamw(1e-2)}
        optimizer = optax.partition(kinds, {name: name for name in params})
        reading = read(optimizer.init(params), params)

        def loss_fn(params, batch):
            moved = {"b": jnp.eye(4), "conv": jnp.ones((3, 3, 4))} | params
            a, b = moved["a"], moved["b"]
            return jnp.sum((a - batch) ** 2) + jnp.sum((a + b) ** 4) + moved["conv"].sum()

        found = step_gain(loss_fn, params, batches, reading, numbers)
        expected = step_gain(loss_fn, alone, batches, {"a": jnp.float32(1)})
        np.testing.assert_array_equal(found, expected)

    def test_what_contradicts_it_is_refused(self):
        loss_fn, params, batches, _ = problem(0, 0.1, 4)
        other = NUMBERS | {"b": Dims((0, 1), 2)}
        scalars = {"a": 1.0, "b": 1.0, "c": 1.0}
        for ratios, numbers in ((self.reading(), other), (scalars, NUMBERS)):
            with pytest.raises(ValueError, match="but in trust_ratio matrices of batch"):
                step_gain(loss_fn, params, batches, ratios, numbers)
        with pytest.raises(ValueError, match="trust_ratio has no matrices"):
            step_gain(loss_fn, params, batches, {}, NUMBERS)
        of_muon = self.reading()._replace(trust_ratio=None)
        with pytest.raises(ValueError, match="the reading has no trust ratios"):
            step_gain(loss_fn, params, batches, of_muon, NUMBERS)


def test_too_few_batches():
    loss_fn, params, batches, _ = problem(0, 0.1, 3)
    with pytest.raises(ValueError, match="has 3 micro-batches: pass at least 4"):
        step_gain(loss_fn, params, batches, RATIOS, NUMBERS)


@pytest.mark.extended
def test_negative_curvature_has_no_best_step():
    def loss_fn(params, batch):
        return -jnp.sum(params["a"] ** 2) + jnp.sum(batch)

    batches = jnp.zeros((4, 1))
    found = step_gain(loss_fn, {"a": jnp.eye(3)}, batches, {"a": jnp.float32(2)})
    assert np.isnan(found.kappa.value)
