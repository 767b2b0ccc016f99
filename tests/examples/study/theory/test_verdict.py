"""Verdicts: which case is which, with numbers recomputed in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers as Dims

from examples.study.theory import estimate, verdict
from examples.study.theory.estimate import Statistics
from examples.study.theory.gain import kappas
from examples.study.theory.verdict import _facts_of_gain
from examples.study.theory.verdict_rules import RULES
from orscale_jax import muon, orscale
from orscale_jax.diagnostics import Reading, StepGain, read
from orscale_jax.diagnostics.step_gain import Estimate

COUNT, P = 8, 4
PARAMS = {"w": jnp.ones((COUNT, 6, P)), "bias": jnp.ones(3)}
NUMBERS = {"w": Dims(1, 2), "bias": None}
A = np.linspace(1, 2, COUNT)
B = np.linspace(3, 1, COUNT)


def tree(values):
    return {"w": jnp.broadcast_to(jnp.asarray(values), COUNT), "bias": optax.MaskedNode()}


def reading(r, at_max=False, at_min=False, started=True):
    calibration = np.where(started, 2.0, 0.0)
    fields = {
        "trust_ratio": np.asarray(r, np.float32),
        "calibration": calibration,
        "at_r_max": at_max,
        "at_r_min": at_min,
        "started": started,
        "anchored": calibration > 0,
    }
    ones = dict.fromkeys(Reading._fields, 1.0)
    found = {name: tree(value) for name, value in (ones | fields).items()}
    return Reading(**found | {"relative_step": None})


def statistics(a=A, b=B, a_error=1e-3, b_error=1e-3):
    return Statistics(
        signal=Estimate(tree(a), tree(a_error)),
        noise=Estimate(tree(0.0), tree(0.0)),
        smoothness=Estimate(tree(np.divide(b, P)), tree(np.divide(b_error, P))),
    )


def judge(r, given=None, consistent_rms=None, gained=None, **facts):
    found = reading(r, **facts)
    return verdict(
        found, given, PARAMS, NUMBERS, consistent_rms=consistent_rms, gained=gained
    )


def along_step(kappa, stderr):
    kappa = Estimate(jnp.float32(kappa), jnp.float32(stderr))
    return StepGain(kappa, kappa, kappa)


def phi(r, a=A, b=B):
    return np.sum(r * a) ** 2 / np.sum(b * r**2)


def kappa_eff(r, a=A, b=B):
    return phi(r, a, b) / phi(np.ones(COUNT), a, b)


BEST = A / B
LARGEST = kappa_eff(BEST)
SPREAD = np.linspace(0.5, 1.5, COUNT)

CASES = {
    "not measured": ({"r": 1.0, "started": False}, "0 of 8 matrices have a ratio yet"),
    "saturated": (
        {"r": np.r_[[5.0] * 6, 1, 2], "at_max": np.arange(COUNT) < 6},
        "saturated: 75% of the matrices are at r_max",
    ),
    "uniform": ({"r": 2.3}, "uniform: this is Muon at 2.3 × the learning rate"),
    "no statistics": ({"r": SPREAD}, "takes step_gain(), or the statistics of estimate"),
    "too noisy": (
        {"r": SPREAD, "given": statistics(a_error=3.0)},
        "not enough data to tell: κ_eff",
    ),
    "negative curvature": (
        {"r": SPREAD, "gained": along_step(np.nan, np.nan)},
        "the measured curvature is negative, so that no learning rate is best",
    ),
    "wrong way": (
        {"r": SPREAD[::-1], "given": statistics()},
        "the ratios point the wrong way: κ_eff 0.",
    ),
    "homogeneous": (
        {"r": np.linspace(0.95, 1.05, COUNT), "given": statistics(b=A, b_error=0.1)},
        "too homogeneous to matter: no ratios could gain more than κ_layer 1.0",
    ),
    "gain": (
        {"r": BEST, "given": statistics()},
        f"in the gain regime: κ_eff {LARGEST:.3f} ± 0.001 of a possible {LARGEST:.3f}",
    ),
    "undecided": (
        {"r": SPREAD, "given": statistics(a_error=0.8)},
        "not enough data to tell: κ_eff 1",
    ),
}


@pytest.mark.parametrize(
    "kappa, outcome, text",
    [
        ((1.07, 0.01), "gain", "in the gain regime: κ 1.070 ± 0.010 along the step"),
        ((0.9, 0.01), "wrong way", "point the wrong way: κ 0.900 ± 0.010 along the step"),
        ((1.01, 0.01), "neutral", "neither help nor hurt: κ 1.010 ± 0.010 along"),
        ((1.05, 0.05), "undecided", "not enough data to tell: κ 1.050 ± 0.050 along"),
        # Significant, but too small to matter; then large or small, who knows.
        ((0.993, 0.002), "neutral", "than 5% from 1 counts as none"),
        ((1.04, 0.002), "neutral", "neither help nor hurt: κ 1.040 ± 0.002 along"),
        ((0.96, 0.01), "undecided", "not enough data to tell: κ 0.960 ± 0.010 along"),
        ((1.06, 0.02), "gain", "in the gain regime: κ 1.060 ± 0.020 along the step"),
        ((1.06, 0.04), "undecided", "not enough data to tell: κ 1.060 ± 0.040 along"),
        ((1.5, 0.4), "too noisy", "not enough data to tell: κ 1.500 ± 0.400 along"),
    ],
)
def test_the_gain_along_the_step_decides(kappa, outcome, text):
    """Also against the model, which has its own opinion here."""
    for given in (None, statistics()):
        found = judge(SPREAD[::-1], given, gained=along_step(*kappa))
        assert found.outcome == outcome and text in str(found)
        assert ("in the paper's model κ_eff 0." in str(found)) == (given is not None)


@pytest.mark.parametrize("outcome", CASES)
def test_every_case_is_told(outcome):
    given, text = CASES[outcome]
    found = judge(**given)
    assert found.outcome == outcome, found
    assert text in str(found)


def test_a_well_measured_one_is_neutral():
    """Ratios that help some and overshoot elsewhere."""
    lo, hi = 0.0, 20.0  # How far beyond the best ratios κ_eff is back at 1.
    for _ in range(60):
        middle = (lo + hi) / 2
        beyond = np.exp(middle * np.log(BEST))
        lo, hi = (middle, hi) if kappa_eff(beyond) > 1 else (lo, middle)
    found = judge(np.exp(lo * np.log(BEST)), statistics())
    assert found.outcome == "neutral"
    assert str(found).startswith("the ratios neither help nor hurt: κ_eff 1.000 ± 0.001")
    assert set(RULES) == set(CASES) | {"neutral"}


def test_numbers_are_those_of_the_paper():
    numbers = judge(SPREAD, statistics()).numbers
    np.testing.assert_allclose(numbers["kappa_eff"], kappa_eff(SPREAD), rtol=1e-5)
    np.testing.assert_allclose(numbers["kappa_layer"], LARGEST, rtol=1e-5)
    np.testing.assert_allclose(
        numbers["uniform"], np.exp(np.log(SPREAD).mean()), rtol=1e-5
    )
    np.testing.assert_allclose(numbers["spread"], np.log(SPREAD).std(), rtol=1e-5)
    assert numbers["counted"] == numbers["matrices"] == COUNT


@pytest.mark.extended
def test_standard_errors_are_those_of_draws():
    """Drawn with errors in a and b, κ scatters as far as the first order says."""
    rng = np.random.default_rng(0)
    a_error, b_error = 0.02 * A, 0.05 * B
    found = kappas(SPREAD, Estimate(A, a_error), Estimate(B, b_error))
    draws = np.array(
        [
            (kappa_eff(SPREAD, a, b), np.sum(a**2 / b) / phi(np.ones(COUNT), a, b))
            for a, b in (
                (
                    A + a_error * rng.normal(size=COUNT),
                    B + b_error * rng.normal(size=COUNT),
                )
                for _ in range(4000)
            )
        ]
    )
    np.testing.assert_allclose(found.kappa_eff.stderr, draws[:, 0].std(), rtol=0.06)
    np.testing.assert_allclose(found.kappa_layer.stderr, draws[:, 1].std(), rtol=0.06)


@pytest.mark.extended
def test_errors_alone_make_no_headroom():
    """Noise in a and b of equal layers looks like heterogeneity, and is subtracted."""
    rng = np.random.default_rng(0)
    size = 2000
    a, b = (1 + 0.1 * rng.normal(size=size) for _ in range(2))
    error = np.full(size, 0.1)
    found = kappas(np.ones(size), Estimate(a, error), Estimate(b, error))
    apparent = np.sum(a**2 / b) * np.sum(b) / np.sum(a) ** 2
    assert apparent > 1.018
    np.testing.assert_allclose(found.kappa_layer.value, 1, atol=3e-3)


@pytest.mark.extended
def test_the_scale_of_the_step_counts():
    """With s = 0.2·√max(m, n) the step of Muon+Moonlight is what r̂ is compared with."""
    params = {"wide": jnp.ones((4, 64)), "square": jnp.ones((4, 4))}
    a, b, r, s = np.array([1.0, 1.0]), np.array([1.0, 2.0]), np.array([1.5, 1.0]), [8, 2]

    def pair(values):
        return {"wide": jnp.float32(values[0]), "square": jnp.float32(values[1])}

    fields = {name: pair([1, 1]) for name in Reading._fields}
    fields |= {"at_r_max": pair([0, 0]), "at_r_min": pair([0, 0]), "relative_step": None}
    fields |= {"trust_ratio": pair(r)}
    exact = pair([1e-4, 1e-4])
    given = Statistics(
        Estimate(pair(a), exact), Estimate(exact, exact), Estimate(pair(b / 4), exact)
    )
    found = verdict(Reading(**fields), given, params).numbers
    scaled = a * s, b * np.square(s)
    ones = np.ones(2)
    np.testing.assert_allclose(
        found["kappa_eff"], phi(r, *scaled) / phi(ones, *scaled), rtol=1e-5
    )
    apart = a * [4, 1], b * np.square([4, 1])  # √(n / m)
    by_outputs = verdict(Reading(**fields), given, params, scale_mode="shape_scaling")
    np.testing.assert_allclose(
        by_outputs.numbers["kappa_eff"], phi(r, *apart) / phi(ones, *apart), rtol=1e-5
    )
    plain = verdict(Reading(**fields), given, params, consistent_rms=None).numbers
    np.testing.assert_allclose(
        plain["kappa_eff"], phi(r, a, b) / phi(ones, a, b), rtol=1e-5
    )


@pytest.mark.extended
def test_the_gain_is_compiled_once_for_a_scale():
    judge(BEST, statistics())
    before = _facts_of_gain._cache_size()
    judge(0.9 * BEST, statistics(b=2 * B))
    assert _facts_of_gain._cache_size() == before
    by_array = judge(BEST, statistics(), consistent_rms=jnp.float32(0.5))
    assert by_array == judge(BEST, statistics(), consistent_rms=0.5)
    assert _facts_of_gain._cache_size() == before + 1


def test_negative_curvature_is_left_out():
    b = np.r_[-1.0, B[1:]]
    few = judge(BEST, statistics(b=b))
    assert few.outcome == "gain" and few.numbers["counted"] == COUNT - 1
    most = judge(BEST, statistics(b=np.where(np.arange(COUNT) < 5, -B, B)))
    assert most.outcome == "too noisy" and "from 3 of 8 matrices" in str(most)


def test_missing_standard_errors_are_no_small_ones():
    assert judge(BEST, statistics(a_error=np.nan)).outcome == "too noisy"


def test_matrices_without_a_ratio_are_left_out():
    started = np.arange(COUNT) < 6
    found = judge(np.where(started, 2.0, 1.0), started=started)
    assert "(6 of 8 matrices measured)" in str(found)
    found = judge(BEST, statistics(), started=started)
    assert found.numbers["counted"] == 6


@pytest.mark.extended
def test_muon_is_uniform():
    optimizer, params = muon(0.1), {"w": jnp.eye(4), "bias": jnp.ones(3)}
    _, state = optimizer.update(params, optimizer.init(params), params)
    found = verdict(read(state, params))
    assert "uniform: this is Muon at 1 × the learning rate" in str(found)


@pytest.mark.extended
def test_from_a_run_to_a_verdict():
    """Read, estimate and verdict together, on layers of very different curvature."""
    scales = {"flat": 1.0, "steep": 50.0}
    params = {name: jnp.eye(6) for name in scales}

    def loss_fn(params, batch):
        return sum(
            scale / 2 * jnp.sum(params[name] ** 2) + jnp.sum(batch * params[name])
            for name, scale in scales.items()
        )

    optimizer = orscale(0.05)
    state = optimizer.init(params)
    batches = 0.1 * jax.random.normal(jax.random.key(0), (8, 6, 6))
    for _ in range(3):
        grads = jax.grad(loss_fn)(params, batches[0])
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    given = estimate(loss_fn, params, batches, directions=updates)
    found = verdict(read(state, params), given, params)
    assert found.numbers["counted"] == 2
    # Equal ratios and a = L‖W‖_*, b = 6L: κ_layer = 1, whatever L is.
    np.testing.assert_allclose(found.numbers["kappa_layer"], 1, atol=0.01)


def test_statistics_need_the_parameters():
    with pytest.raises(ValueError, match="params=None is not valid: pass the parameters"):
        verdict(reading(SPREAD), statistics())
