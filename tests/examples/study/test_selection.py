"""The error of a search's choice, where it is known."""

import numpy as np
import pytest

from examples.study.records import Record
from examples.study.results import Result
from examples.study.search import (
    Rates,
    Search,
    best_point,
    cross,
    smoothed,
    smoothed_best,
    square,
)
from examples.study.second import job_of
from examples.study.selection import selection

JOB = job_of("prose", "orscale")
STEEPNESS = 0.04, 0.02


def run_of(seed, loss):
    return Result("orscale", 0.016, seed, loss, False, 1.0, 0.1, 0.0, (loss,), (), {})


def record_of(losses):
    """The record of a search, from the losses of its seeds at each point."""
    searched = {
        point: tuple(map(run_of, JOB.search_seeds, of_point))
        for point, of_point in losses.items()
    }
    best = smoothed_best({point: np.mean(x) for point, x in losses.items()})
    return Record(JOB, Rates(0.016, 0.032), best, searched, ())


def bowl(point, best):
    pairs = zip(STEEPNESS, point, best, strict=True)
    return 2 + sum(k * ((i - at) / 2) ** 2 for k, i, at in pairs)


def test_seeds_with_optima_of_their_own():
    points = [(0, 0), *square(2), *cross(1)]
    optima = [(-2, 0), (0, 0), (2, 0)]  # Of each seed, in half octaves.
    record = record_of({p: [bowl(p, best) for best in optima] for p in points})
    found = selection(record)
    assert record.best == (0, 0)
    assert found.moves == ((0.5, 0), (0, 0), (-0.5, 0))
    cost = STEEPNESS[0] * 0.5**2
    assert found.excess == pytest.approx(2 * np.mean([cost, 0, cost]))


def test_seeds_that_agree_have_no_excess():
    points = [(0, 0), *square(2), *cross(1)]
    record = record_of({p: [bowl(p, (0, 0)) + seed for seed in range(3)] for p in points})
    assert selection(record) == (((0, 0),) * 3, 0)


def test_one_seed_tells_nothing():
    job = job_of("dense-small-4800-steps", "orscale")
    searched = {(0, 0): (run_of(20, 2.0),)}
    assert selection(Record(job, Rates(0.01, 0.04), (0, 0), searched, ())) is None


def test_the_estimate_is_of_the_size_of_the_excess():
    rng = np.random.default_rng(0)
    estimates, truths = [], []
    for _ in range(60):
        optimum, losses = rng.uniform(-3, 3, 2), {}

        def loss_of(point, optimum=optimum, losses=losses):
            losses[point] = bowl(point, optimum) + 0.02 * rng.normal(size=3)
            return np.mean(losses[point])

        point = best_point(Search(), loss_of)
        record = record_of(losses)
        assert record.best == point
        estimates.append(selection(record).excess)
        lowest = bowl(np.round(optimum), optimum)
        truths.append(bowl(point, optimum) - lowest)
    assert 0.5 < np.mean(estimates) / np.mean(truths) < 2


def test_a_quadratic_needs_eight_points():
    losses = {p: bowl(p, (0, 0)) for p in ((0, 0), *cross(2), *cross(1))}
    assert len(losses) == 9 and smoothed(losses) == pytest.approx(losses)
    del losses[2, 0], losses[-2, 0]
    assert smoothed(losses) == {} and smoothed_best(losses) == (0, 0)
