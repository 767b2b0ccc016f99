"""The gain over Muon, against closed forms, NumPy in float64 and a search."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from examples.study.theory import gain
from examples.study.theory.gain import Gain

numbers = st.floats(1e-2, 1e2)


def triple(size):
    return st.tuples(*[st.lists(numbers, min_size=size, max_size=size)] * 3)


vectors = st.integers(2, 6).flatmap(triple)


def phi(r, a, b):
    return np.sum(r * a) ** 2 / np.sum(b * r**2)


def variation(v):
    return np.var(v) / np.mean(v) ** 2


def squared_cosine(v, w):
    return np.dot(v, w) ** 2 / np.dot(v, v) / np.dot(w, w)


def expected(r, a, b):
    """The paper's definitions in NumPy."""
    x, y = a / np.sqrt(b), r * np.sqrt(b)
    rho = np.corrcoef(x, y)[0, 1] if np.std(x) > 1e-6 and np.std(y) > 1e-6 else 0.0
    nu_r, nu_b = variation(y), variation(np.sqrt(b))
    bound = 1 + rho**2 * nu_r * (1 + nu_b) / (1 + nu_b / rho**2) if rho else 1.0
    return Gain(
        phi=phi(r, a, b),
        kappa_eff=squared_cosine(x, y) / squared_cosine(x, np.sqrt(b)),
        kappa_layer=np.sum(a**2 / b) / phi(np.ones_like(r), a, b),
        alignment=squared_cosine(x, y),
        distance_to_collapse=1 - squared_cosine(y, np.sqrt(b)),
        nu_r=nu_r,
        nu_b=nu_b,
        rho=rho,
        lower_bound=bound,
        matrices=len(r),
    )


def random_triple(size, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(np.exp(rng.normal(size=size)) for _ in range(3))


@pytest.mark.extended
@settings(max_examples=60)
@given(vectors)
def test_every_field_is_the_papers(given):
    r, a, b = map(np.array, given)
    with jax.enable_x64(True):
        found = gain(r, a, b)
    for name, value in expected(r, a, b)._asdict().items():
        scale = 1e-6 if name in ("rho", "lower_bound") else 1e-9
        np.testing.assert_allclose(
            getattr(found, name), value, rtol=scale, atol=scale, err_msg=name
        )


@pytest.mark.extended
def test_many_matrices_in_float32():
    given = random_triple(5000)
    found, right = gain(*given), expected(*given)
    for name, value in found._asdict().items():
        assert value.dtype == (jnp.int32 if name == "matrices" else jnp.float32)
        np.testing.assert_allclose(value, getattr(right, name), rtol=2e-5, err_msg=name)


@pytest.mark.extended
def test_uniform_ratios_have_collapsed():
    """Theorem 'collapse'; and the best ratios, r̂ ∝ a/b, gain the most."""
    _, a, b = random_triple(7)
    found = gain(np.full(7, 5.0), a, b)
    np.testing.assert_allclose(found.kappa_eff, 1, rtol=1e-6)
    assert found.distance_to_collapse < 1e-12
    best = gain(a / b, a, b)
    assert best.distance_to_collapse > 1e-2 and best.kappa_eff > 1
    np.testing.assert_allclose(best.alignment, 1, rtol=1e-6)
    np.testing.assert_allclose(best.kappa_eff, best.kappa_layer, rtol=1e-6)


@pytest.mark.parametrize(
    "r, a, b, kappa",
    [
        # Aligned (ρ = 1), but more heterogeneous than x is: it overshoots.
        ([1.0, 3.0], [1.0, 1.1], [1.0, 1.0], 4.3**2 / 10 / (2.1**2 / 2)),
        # Muon itself: √b alone makes (S1) and (S2) hold.
        ([1.0, 1.0], [1.0, 9.0], [1.0, 4.0], 1.0),
    ],
)
def test_heterogeneity_and_alignment_do_not_suffice(r, a, b, kappa):
    """Theorem 'OrScale-specific gain', as stated, assumes too little."""
    found = gain(r, a, b)
    assert found.nu_r > 0 and found.rho > 0.999 and found.lower_bound > 1.02
    np.testing.assert_allclose(found.kappa_eff, kappa, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scales_cancel(scale):
    r, a, b = random_triple(5)
    right = gain(r, a, b)
    for scaled in ((scale * r, a, b), (r, scale * a, b), (r, a, scale * b)):
        found = gain(*scaled)
        for name in ("kappa_eff", "kappa_layer", "rho", "nu_b", "distance_to_collapse"):
            np.testing.assert_allclose(
                getattr(found, name), getattr(right, name), rtol=1e-5, err_msg=name
            )
    np.testing.assert_allclose(gain(scale * r, a, b).phi, right.phi, rtol=1e-5)


def test_trees_are_vectors_over_their_matrices():
    given = random_triple(7)

    def tree(v):
        v = v.astype(np.float32)
        experts = {"experts": v[:6].reshape(2, 3), "up": v[6]}
        return experts | {"bias": optax.MaskedNode(), "none": None}

    found = jax.jit(gain)(*map(tree, given))
    for name, value in gain(*given)._asdict().items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "place, bad",
    [(i, x) for i in range(3) for x in (np.nan, np.inf)] + [(2, 0.0), (2, -2.0)],
)
def test_what_has_no_finite_numbers_or_no_curvature_does_not_count(place, bad):
    given = [v.copy() for v in random_triple(5)]
    right = expected(*(v[:4] for v in given))
    given[place][4] = bad
    for name, value in gain(*given)._asdict().items():
        wanted = getattr(right, name)  # Of four matrices.
        np.testing.assert_allclose(value, wanted, rtol=1e-5, err_msg=name)


@pytest.mark.extended
def test_nothing_to_measure_is_nan():
    for nothing in (([1.0], [1.0], [-1.0]), ([1.0], [0.0], [1.0]), ({}, {}, {})):
        found = gain(*nothing)
        assert np.isnan(found.kappa_eff) and np.isnan(found.kappa_layer)


@pytest.mark.extended
def test_correlation_with_a_constant_is_zero():
    """Rounding is not variation."""
    found = gain(np.full(50, 0.1), random_triple(50)[1], np.full(50, 0.3))
    assert found.rho == 0 and found.lower_bound == 1


@pytest.mark.parametrize(
    "given, message",
    [
        (({"a": 1.0}, {"b": 1.0}, {"a": 1.0}), "same matrices: 2 leaves"),
        (
            (np.ones(3), np.ones(4), np.ones(3)),
            r"\(3,\) in trust_ratio and \(4,\) in sig",
        ),
        ((np.ones(2), np.ones(2), np.ones(2) > 0), "dtype bool: pass real numbers"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        gain(*given)
