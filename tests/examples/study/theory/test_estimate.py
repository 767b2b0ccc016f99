"""Signal, noise and smoothness, where the truth is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from examples.study.theory import curvature, estimate
from examples.study.theory.estimate import nuclear_norm
from orscale_jax import BlockDimensionNumbers as Blocks
from tests import oracle
from tests.runs import AUTO, EXPLICIT, assert_close, mesh_of, placed

# Name: shape, dimension numbers, batch shape, and the matrices written out by hand.
LEAVES = {
    "plain": ((8, 6), Dims(0, 1), (), lambda x: [x]),
    "heads": ((6, 2, 4), Dims(0, (1, 2)), (), lambda x: [x.reshape(6, 8)]),
    "experts": ((3, 6, 5), Dims(1, 2), (3,), list),
    "fused": (
        (6, 12),
        Blocks(0, 1, block_axis=1, blocks=(6, 4, 2)),
        (3,),
        lambda x: [x[:, :6], x[:, 6:10], x[:, 10:]],
    ),
}
NUMBERS = {name: numbers for name, (_, numbers, _, _) in LEAVES.items()} | {"bias": None}
OPTIONS = {"weight_dimension_numbers": NUMBERS}
COUNT, SEEDS = 16, 20

RNG = np.random.default_rng(0)
L = {name: np.exp(RNG.normal(size=batch)) for name, (_, _, batch, _) in LEAVES.items()}
# The noise in the gradient and in the smoothness of a micro-batch.
SIGMA = {name: 1.5 * np.exp(0.3 * RNG.normal(size=x.shape)) for name, x in L.items()}
OF_SMOOTHNESS = 0.05


def spread(name, scalars):
    """One scalar per matrix, for every entry of its leaf."""
    shape, _, batch, _ = LEAVES[name]
    if name == "fused":
        return np.broadcast_to(np.repeat(scalars, (6, 4, 2)), shape)
    return np.broadcast_to(
        np.reshape(scalars, batch + (1,) * (len(shape) - len(batch))), shape
    )


def matrices(name, leaf):
    return [np.asarray(x, np.float64) for x in LEAVES[name][3](np.asarray(leaf))]


def of_matrices(fn, *trees):
    """``fn`` of the matrices of each leaf, written out by hand."""
    found = {}
    for name, (_, _, batch, _) in LEAVES.items():
        parts = zip(*(matrices(name, tree[name]) for tree in trees), strict=True)
        found[name] = np.reshape([fn(*part) for part in parts], batch)
    return found


def nuclear(x):
    return np.linalg.norm(x, "nuc")


SMOOTHNESS = {name: spread(name, value).astype(np.float32) for name, value in L.items()}
OPTIMUM = {
    name: RNG.normal(size=shape).astype(np.float32)
    for name, (shape, _, _, _) in LEAVES.items()
}
PARAMS = {name: np.zeros_like(leaf) for name, leaf in OPTIMUM.items()} | {
    "bias": np.ones(3, np.float32)
}
GRADIENT = {name: -SMOOTHNESS[name] * OPTIMUM[name] for name in LEAVES}
SIGNAL = of_matrices(nuclear, GRADIENT)


def quadratic(params, batch):
    """Σ (1 + z) L/2 ‖W − W*‖² + ⟨ξ, W⟩, of which batches bring z and ξ."""
    z, noise = batch
    return jnp.sum(params["bias"] ** 2) + sum(
        jnp.sum(
            (1 + z[name])
            * SMOOTHNESS[name]
            / 2
            * jnp.square(params[name] - OPTIMUM[name])
        )
        + jnp.sum(noise[name] * params[name])
        for name in LEAVES
    )


def draw(seed):
    """Micro-batches whose noise has E‖ξ‖² = σ²."""
    rng = np.random.default_rng(seed)

    def noise(name):
        size = of_matrices(np.size, PARAMS)[name]
        scale = spread(name, SIGMA[name] / np.sqrt(size))
        return (scale * rng.normal(size=(COUNT, *scale.shape))).astype(np.float32)

    z = {name: OF_SMOOTHNESS * rng.normal(size=COUNT) for name in LEAVES}
    return z, {name: noise(name) for name in LEAVES}


@functools.cache
def runs():
    return [estimate(quadratic, PARAMS, draw(seed), **OPTIONS) for seed in range(SEEDS)]


def noise_of_gradient():
    """σ² with the gradient's share of the noise in the smoothness."""
    square = of_matrices(lambda g: np.sum(g**2), GRADIENT)
    return {
        name: np.sqrt(SIGMA[name] ** 2 + OF_SMOOTHNESS**2 * square[name])
        for name in LEAVES
    }


@pytest.mark.extended
@pytest.mark.parametrize(
    "field, truth",
    [("smoothness", L), ("signal", SIGNAL), ("noise", noise_of_gradient())],
)
def test_estimates_are_within_their_errors_of_the_truth(field, truth):
    """Over 20 seeds: each by two standard errors, and their mean by two of its own."""
    deviations, errors = [], []
    for run in runs():
        estimated = getattr(run, field)
        assert isinstance(estimated.value["bias"], optax.MaskedNode)
        for name, value in truth.items():
            assert estimated.value[name].shape == value.shape
            deviations.append(np.ravel(estimated.value[name] - value))
            errors.append(np.ravel(estimated.stderr[name]))
    deviations, errors = (
        np.concatenate(x).reshape(SEEDS, -1) for x in (deviations, errors)
    )
    scores = deviations / errors
    assert np.mean(np.abs(scores) < 2) > 0.9
    # Neither do the errors claim too little: a normal one has a spread of 1.
    assert 0.7 < np.std(scores) < 1.3
    of_mean = np.abs(deviations.mean(0)) / np.sqrt(np.mean(errors**2, 0) / SEEDS)
    assert np.mean(of_mean < 2) >= 0.75 and of_mean.max() < 3.5


SPECTRA = {
    "flat": np.ones(16),
    "power law": 1 / np.arange(1, 17),
    "low rank": np.repeat([1.0, 0.0], [2, 14]),
    "zero": np.zeros(16),
}


@pytest.mark.parametrize("noise", [0.03, 0.3, 1.0])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_bias_that_remains_is_what_the_docstring_says(spectrum, noise):
    rng = np.random.default_rng(1)
    sigma, repeats, count = SPECTRA[spectrum], 40, 8
    u, _, vt = np.linalg.svd(rng.normal(size=(20, 16)), full_matrices=False)
    g = u * sigma @ vt + noise * rng.normal(size=(count, repeats, 20, 16))
    others = (g.sum(0) - g) / (count - 1)
    u, raised, vt = np.linalg.svd(others, full_matrices=False)
    projections = np.einsum("...mk,...mn,...kn->...k", u, g, vt)
    found = nuclear_norm(jnp.asarray(raised), jnp.asarray(projections))
    error = np.asarray(found.value) - sigma.sum()
    naive = np.mean(nuclear_norms(g.mean(0))) - sigma.sum()
    between = np.mean((raised - projections).sum(-1))
    sampling = error.std() / np.sqrt(repeats)
    bound = {"flat": 0.27, "power law": 0.2, "low rank": 0.07, "zero": 0.07}[spectrum]
    assert abs(error.mean()) < bound * between + 3 * sampling
    assert abs(error.mean()) < 0.45 * naive + 3 * sampling
    assert np.mean(np.abs(error) < 2 * found.stderr) > 0.7


def nuclear_norms(x):
    return np.linalg.svd(x, compute_uv=False).sum(-1)


@pytest.mark.extended
def test_descent_along_the_polar_factor_is_a_lower_signal():
    """``exact=False``: below the nuclear norm, and near it where the noise is small."""
    cheap = [
        estimate(quadratic, PARAMS, draw(seed), exact=False, **OPTIONS) for seed in (0, 1)
    ]
    for name, truth in SIGNAL.items():
        found = np.mean([run.signal.value[name] for run in cheap], 0)
        error = np.max([run.signal.stderr[name] for run in cheap], 0)
        assert (found < truth + 2 * error).all() and (found > 0.8 * truth).all()
        np.testing.assert_allclose(
            cheap[0].noise.value[name], runs()[0].noise.value[name], rtol=1e-5
        )


def without_noise(fn):
    """A loss of micro-batches that are all the same."""
    return lambda params, batch: fn(params) + 0 * jnp.sum(batch)


SAME = jnp.zeros((3, 1))
LEFT, RIGHT = (x @ x.T / 5 for x in (RNG.normal(size=(n, n)) for n in (6, 4)))
TARGET = RNG.normal(size=(6, 4))


@without_noise
def unequal(params):
    """½⟨W − W*, A(W − W*)B⟩, whose Hessian is no multiple of the identity."""
    w = params["w"]
    left, right, target = (jnp.asarray(x, w.dtype) for x in (LEFT, RIGHT, TARGET))
    x = w - target
    return jnp.sum(x * (left @ x @ right)) / 2


def along(step):
    return np.sum(step * (LEFT @ step @ RIGHT)) / np.sum(step**2)


@pytest.mark.extended
@pytest.mark.parametrize("scale", [1.0, -1e-4])
def test_smoothness_is_that_along_the_step(scale, enable_x64):
    params = {"w": jnp.zeros((6, 4), jnp.float64)}
    step = RNG.normal(size=(6, 4))
    found = estimate(unequal, params, SAME, directions={"w": scale * step})
    np.testing.assert_allclose(found.smoothness.value["w"], along(step), rtol=1e-10)
    own = oracle.svd_polar(LEFT @ TARGET @ RIGHT)
    found = estimate(unequal, params, SAME)
    np.testing.assert_allclose(found.smoothness.value["w"], along(own), rtol=1e-2)


@pytest.mark.extended
def test_equal_samples_claim_no_more_than_rounding():
    found = estimate(unequal, {"w": jnp.zeros((6, 4))}, SAME)
    truth = nuclear(LEFT @ TARGET @ RIGHT)
    assert abs(found.signal.value["w"] - truth) < 2 * found.signal.stderr["w"]
    assert found.signal.stderr["w"] < 1e-4 * truth


COUPLING = 0.7


@without_noise
def coupled(params):
    return (
        jnp.sum(params["a"] ** 2)
        + 2 * jnp.sum(params["b"] ** 2)
        + COUPLING * jnp.sum(params["a"] * params["b"])
    )


@pytest.mark.extended
def test_the_joint_smoothness_has_the_cross_terms():
    """And adds up to ⟨Δ, HΔ⟩; without them it is that of the blocks on the diagonal."""
    params = {name: jnp.ones((5, 5)) for name in "ab"}
    rng = np.random.default_rng(5)  # Own draws: whichever tests run before.
    step = {name: rng.normal(size=(5, 5)) for name in "ab"}
    squares = {name: np.sum(x**2) for name, x in step.items()}
    cross = COUPLING * np.sum(step["a"] * step["b"])
    joint = estimate(coupled, params, SAME, directions=step).smoothness
    assert abs(cross / squares["a"]) > 0.05
    without = step | {"a": jnp.zeros((5, 5))}
    found = estimate(coupled, params, SAME, directions=without).smoothness.value
    assert np.isnan(found["a"]) and np.isfinite(found["b"])
    for name, own in (("a", 2), ("b", 4)):
        expected = own + cross / squares[name]
        np.testing.assert_allclose(joint.value[name], expected, rtol=1e-5)
    batches = jnp.zeros((32, 1))  # 32 draws of signs.
    block = estimate(
        coupled, params, batches, directions=step, cross_terms=False
    ).smoothness
    for name, own in (("a", 2), ("b", 4)):
        assert abs(block.value[name] - own) < 2 * block.stderr[name]
        np.testing.assert_allclose(
            block.stderr[name], abs(cross) / squares[name] / np.sqrt(31), rtol=0.1
        )


def test_curvature_is_smoothness_times_rank():
    p = of_matrices(lambda x: min(x.shape), PARAMS)
    found = curvature(L | {"bias": optax.MaskedNode()}, PARAMS, NUMBERS)
    for name in LEAVES:
        np.testing.assert_allclose(found[name], L[name] * p[name], rtol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(2,\) for matrices of shape \(\)"):
        curvature({"w": jnp.ones(2)}, {"w": jnp.ones((3, 4))})


@pytest.mark.parametrize("form", ["list", "iterator", "dict"])
def test_micro_batches_come_in_several_forms(form):
    z, noise = draw(3)
    listed = [jax.tree.map(lambda x: x[i], (z, noise)) for i in range(COUNT)]
    forms = {"list": listed, "iterator": iter(listed), "dict": {"z": z, "noise": noise}}
    loss = quadratic
    if form == "dict":
        loss = lambda params, batch: quadratic(params, (batch["z"], batch["noise"]))  # noqa: E731
    found = estimate(loss, PARAMS, forms[form], **OPTIONS)
    np.testing.assert_allclose(
        found.signal.value["plain"], runs()[3].signal.value["plain"], rtol=1e-6
    )


@pytest.mark.extended
def test_two_micro_batches_have_no_error_of_their_noise():
    batches = jax.tree.map(lambda x: x[:2], draw(0))
    found = estimate(quadratic, PARAMS, batches, **OPTIONS)
    assert np.isnan(found.noise.stderr["plain"]) and found.noise.value["plain"] > 0
    assert np.isfinite(found.signal.stderr["plain"])


def test_boxes_and_narrow_dtypes():
    """Results have no boxes, and are float32."""
    boxed = {"w": linen.Partitioned(jnp.ones((6, 4), jnp.bfloat16), names=("x", None))}

    def loss(params, batch):
        w = params["w"].value
        assert w.dtype == jnp.bfloat16
        return jnp.sum(w.astype(jnp.float32) ** 2) + 0 * jnp.sum(batch)

    for field in estimate(loss, boxed, SAME, directions=boxed):
        assert field.value["w"].shape == () and field.value["w"].dtype == jnp.float32
        assert np.isfinite(field.value["w"])


def shared(params, batch):
    return sum(jnp.sum(w**2) for w in params.values()) + 0 * jnp.sum(batch)


@pytest.mark.extended
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_matrices_may_be_shared_by_devices(axis_type, exact):
    mesh = mesh_of({"x": 4, "y": 2}, axis_type)
    specs = {"experts": P("x", None, "y"), "up": P("x", "y")}
    numbers = {"experts": Dims(1, 2), "up": Dims(0, 1)}
    params = {"experts": RNG.normal(size=(4, 6, 8)), "up": RNG.normal(size=(8, 6))}
    params = jax.tree.map(jnp.float32, params)
    options = {"weight_dimension_numbers": numbers, "exact": exact}
    expected = estimate(shared, params, SAME, **options)
    with jax.set_mesh(mesh):
        found = estimate(shared, placed(params, mesh, specs), SAME, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours.value, theirs.value, rtol=1e-4, atol=1e-4)


def square(params, batch):
    return jnp.sum(params["w"] ** 2) + 0 * jnp.sum(batch)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batches": SAME[:1]}, "batches has 1 micro-batches: pass at least 2"),
        ({"batches": {"x": np.ones((4, 2)), "y": np.ones(3)}}, r"\(4, 2\).*\(3,\)"),
        ({"batches": [np.ones(4), np.ones(3)]}, "must have the same shapes"),
        ({"batches": 3.0}, "a list of micro-batches"),
        ({"loss_fn": lambda params, batch: params["w"][0]}, "must return one scalar"),
        ({"loss_fn": lambda params, batch: (1.0, 2.0)}, "must return one scalar"),
        ({"directions": {"w": np.ones((4, 3))}}, r"directions has shape \(4, 3\)"),
        ({"directions": {"w": optax.MaskedNode()}}, "directions has MaskedNode"),
        ({"directions": {}}, "directions must be a tree of the parameters' structure"),
        ({"exact": 1}, "exact=1 is not valid"),
        ({"cross_terms": None}, "cross_terms=None is not valid"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"loss_fn": square, "params": {"w": jnp.ones((3, 4))}, "batches": SAME}
    with pytest.raises(ValueError, match=message):
        estimate(**given | change)
