"""The greedy construction against published tables, dense grids and SciPy."""

import numpy as np
import pytest
import scipy.optimize

from orscale_jax.newton_schulz import coefficients
from orscale_jax.newton_schulz.coefficients import (
    optimal_quintic,
    polar_express_coefficients,
)
from tests import oracle

# What the paper (arXiv:2505.16932, Algorithm 1) prints: lower bound 1e-3, eight rows,
# before its safety factor. Its cushion is not printed; this one gives the rows.
PRINTED = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
CUSHION = 0.02407327424182761

INTERVALS = [(1e-8, 1), (1e-3, 1), (0.02, 1), (0.3, 1.7), (0.9, 1.1)]


def quintic(row, x):
    a, b, c = row
    return a * x + b * x**3 + c * x**5


def grid(lower, upper, points=20_001):
    ends = np.geomspace(lower, upper, points), np.linspace(lower, upper, points)
    return np.unique(np.clip(np.concatenate(ends), lower, upper))


def test_gives_the_published_table():
    np.testing.assert_allclose(
        polar_express_coefficients(), oracle.POLAR_EXPRESS, rtol=1e-13
    )


def test_gives_the_table_that_the_paper_prints():
    rows = polar_express_coefficients(1e-3, 8, safety_factor=1, cushion=CUSHION)
    np.testing.assert_allclose(rows[:6], PRINTED[:6], rtol=1e-12)
    np.testing.assert_allclose(rows, PRINTED, rtol=1e-8)  # Rounding errors propagate.


def test_the_preset_is_the_published_table_continued():
    """Row 1 also divides by 1.02, which the authors include in the norm."""
    rows = coefficients.PRESETS["polar_express"]
    (a, b, c), *rest = oracle.POLAR_EXPRESS
    divided = (a / 1.02, b / 1.02**3, c / 1.02**5)
    np.testing.assert_allclose(rows[:5], [divided, *rest], rtol=1e-13)
    lower = oracle.compose(oracle.POLAR_EXPRESS, 1e-3)
    assert_equioscillates(rows[5], lower, 2 - lower)
    assert np.abs(1 - quintic(rows[5], grid(lower, 2 - lower))).max() < 0.002
    # From row 7 on, the limit: a Padé step keeps 1 fixed with two vanishing derivatives.
    assert len(rows) == 7
    a, b, c = rows[-1]
    assert (a + b + c, a + 3 * b + 5 * c, 6 * b + 20 * c) == (1, 0, 0)


def assert_equioscillates(row, lower, upper):
    """Chebyshev: the best odd quintic misses 1 equally four times, with signs in turn."""
    x = grid(lower, upper)
    error = 1 - quintic(row, x)
    peak = np.abs(error).max()
    turns = 1 + np.flatnonzero(np.diff(np.sign(np.diff(error))))
    extremes = error[[0, *turns, -1]]
    np.testing.assert_allclose(extremes, peak * np.array([1, -1, 1, -1]), rtol=1e-4)


@pytest.mark.parametrize("lower, upper", INTERVALS)
def test_is_the_optimum_of_a_linear_program(lower, upper):
    x = grid(lower, upper, points=1001)
    powers = np.stack([x, x**3, x**5], axis=1)
    one = np.ones((len(x), 1))
    best = scipy.optimize.linprog(
        c=[0, 0, 0, 1],
        A_ub=np.block([[powers, -one], [-powers, -one]]),
        b_ub=np.concatenate([one, -one]),
        bounds=[(None, None)] * 3 + [(0, None)],
    )
    error = np.abs(1 - quintic(optimal_quintic(lower, upper), grid(lower, upper))).max()
    np.testing.assert_allclose(error, best.fun, rtol=1e-3, atol=1e-7)


def test_narrow_intervals_join_the_pade_step():
    for width in np.geomspace(1e-7, 1e-3, 60):
        x = np.linspace(1 - width, 1 + width, 101)
        row = optimal_quintic(1 - width, 1 + width)
        assert np.abs(1 - quintic(row, x)).max() < 4 * width**3 + 1e-15


@pytest.mark.extended
@pytest.mark.parametrize("safety_factor", [1, 1.02, 1.05])
@pytest.mark.parametrize("cushion", [0, 0.02, 0.1])
@pytest.mark.parametrize("lower_bound", [1e-8, 1e-3, 0.3, 0.99])
def test_maps_into_a_shrinking_interval_around_1(lower_bound, cushion, safety_factor):
    if safety_factor == 1:  # The steep upper ends amplify the rounding of float64.
        lower_bound = max(lower_bound, 1e-3)
    x = grid(lower_bound, 1)
    rounding = 1e-9
    errors = []
    for steps in range(1, 21):
        rows = polar_express_coefficients(
            lower_bound, steps, safety_factor=safety_factor, cushion=cushion
        )
        assert rows.shape == (steps, 3) and rows.dtype == np.float64
        assert np.isfinite(rows).all()
        y = oracle.compose(rows, x)
        lower = y[0]
        assert lower > 0 and y.min() >= lower - rounding
        assert y.max() <= 2 - lower + rounding
        errors.append(1 - lower)
    worse = np.diff(errors)
    # A factor above 1 keeps a narrow interval from shrinking further.
    assert (worse < (1e-12 if safety_factor == 1 else 1e-3)).all()
    assert errors[-1] < 1e-6


def test_safety_divides_the_argument_of_all_rows_but_the_last():
    plain = polar_express_coefficients(0.2, 1, safety_factor=1)
    np.testing.assert_array_equal(polar_express_coefficients(0.2, 1), plain)
    first = polar_express_coefficients(0.2, 2, safety_factor=1.1)[0]
    x = np.linspace(0, 1, 11)
    np.testing.assert_allclose(quintic(first, x), quintic(plain[0], x / 1.1), atol=1e-14)


def test_the_cushion_centres_the_image_of_the_whole_interval():
    [row] = polar_express_coefficients(1e-3, 1, cushion=0.1)
    image = quintic(row, grid(1e-3, 1))
    np.testing.assert_allclose(image[0] + image[-1], 2, atol=1e-12)
    ratio = row / optimal_quintic(0.1, 1)
    np.testing.assert_allclose(ratio, ratio[0])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"lower_bound": 0.0}, r"lower_bound=0\.0"),
        ({"lower_bound": 1.0}, r"lower_bound=1\.0"),
        ({"lower_bound": -0.1}, "lower_bound"),
        ({"lower_bound": 1e-13}, r"\[1e-12, 1\)"),
        ({"lower_bound": np.nan}, "lower_bound=nan"),
        ({"lower_bound": "small"}, "a number"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.0}, "steps=2.0"),
        ({"safety_factor": 0.99}, "safety_factor=0.99"),
        ({"safety_factor": np.inf}, "safety_factor=inf"),
        ({"safety_factor": np.nan}, "safety_factor=nan"),
        ({"cushion": -0.01}, "cushion=-0.01"),
        ({"cushion": 1}, "cushion=1"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        polar_express_coefficients(**arguments)


@pytest.mark.parametrize("lower_bound", [1e-12, 1e-8, 0.999999, 1 - 1e-16])
@pytest.mark.parametrize("safety_factor", [1, 1.5, 100])
@pytest.mark.parametrize("cushion", [0, 0.5, 0.999])
def test_limits_of_the_arguments_give_finite_tables(lower_bound, safety_factor, cushion):
    rows = polar_express_coefficients(
        lower_bound, 20, safety_factor=safety_factor, cushion=cushion
    )
    assert np.isfinite(rows).all() and (rows[:, 0] > 0).all()
