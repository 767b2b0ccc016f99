"""The search for two learning rates, on surfaces whose best point is known."""

import math

import numpy as np
import pytest

from examples.study.search import (
    Rates,
    Search,
    best_point,
    cross,
    is_inside,
    smoothed_best,
    square,
)

QUICK = Search(coarse=cross(2), fine=frozenset())


def bowl(best, steepness=(0.02, 0.01), cliff=math.inf):
    """A loss with its minimum at a point, and with a cliff at large matrix rates."""

    def loss_of(point):
        terms = zip(point, best, steepness, strict=True)
        loss = 2 + sum(k * ((i - at) / 2) ** 2 for i, at, k in terms)
        return 5.5 if point[0] > cliff else loss

    return loss_of


def searched(search, loss_of):
    """What a search finds, and the points that it tried, in their order."""
    tried = []

    def noted(point):
        tried.append(point)
        return loss_of(point)

    return best_point(search, noted), tried


@pytest.mark.parametrize("best", [(0, 0), (1, -1), (2, 3), (-7, 5), (8, 8)])
def test_the_best_point_is_found_wherever_it_lies(best):
    found, tried = searched(Search(), bowl(best))
    assert math.dist(found, best) <= 1
    assert is_inside(found, tried) and len(set(tried)) == len(tried)


@pytest.mark.parametrize("best", [(0, 0), (2, -4), (-6, 6)])
def test_a_quick_search_finds_it_on_the_grid_with_fewer_points(best):
    found, tried = searched(QUICK, bowl(best))
    assert found == best and is_inside(found, tried)
    assert len(tried) < len(searched(Search(), bowl(best))[1])


def test_no_more_is_tried_than_the_grid_the_moves_and_the_finer_steps():
    _, tried = searched(Search(), bowl((0.3, 0.2)))
    assert set(tried) == {(0, 0), *square(2), *cross(1)}
    _, tried = searched(Search(), bowl((2.2, 0.2)))
    assert len(tried) == 9 + 3 + 4


def test_a_search_stops_before_a_cliff():
    found, tried = searched(Search(), bowl((3, 1), cliff=3))
    assert found[0] in (2, 3) and is_inside(found, tried)


def test_a_search_without_an_end_is_refused():
    with pytest.raises(RuntimeError, match="begin elsewhere"):
        best_point(Search(), lambda point: -point[0])


def test_a_lucky_point_beside_the_best_does_not_win():
    losses = {p: bowl((0, 0))(p) for p in ((0, 0), *square(2), *cross(1))}
    losses |= {(0, 0): losses[0, 0] + 0.004, (1, 0): losses[1, 0] - 0.004}
    assert min(losses, key=losses.__getitem__) == (1, 0)
    assert smoothed_best(losses) == (0, 0)


def test_the_quadratic_is_nearer_to_the_optimum_than_the_lowest_point():
    rng = np.random.default_rng(0)
    excess = {"lowest": [], "smoothed": []}
    for _ in range(150):
        true = bowl(rng.uniform(-3, 3, 2))
        losses, search = {}, Search()
        while missing := search.missing(losses):
            losses |= {p: true(p) + 0.006 * rng.normal() for p in missing}
        excess["lowest"].append(true(min(losses, key=losses.__getitem__)) - 2)
        excess["smoothed"].append(true(smoothed_best(losses)) - 2)
    assert np.mean(excess["smoothed"]) < 0.7 * np.mean(excess["lowest"])


def test_points_far_above_the_lowest_do_not_bend_the_quadratic():
    losses = {p: bowl((0, 0), cliff=1)(p) for p in ((0, 0), *square(2), *cross(1))}
    assert smoothed_best(losses) == (0, 0)


def test_a_point_stands_for_half_octaves_of_both_rates():
    found = Rates(0.016, 0.032).at((1, -2))
    assert found == Rates(0.0226274, 0.016)
    assert found.at((0, 0)) == found
