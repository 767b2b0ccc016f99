"""How well the searches choose, by leaving out one of their seeds."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from examples.study.records import Record
from examples.study.results import Result
from examples.study.search import Point, smoothed, smoothed_best


class Selection(NamedTuple):
    """What the best rates of an arm owe to the seeds of its search.

    Attributes:
      moves: How far the choice moves without each of the seeds, in octaves of the rates
        of matrices and of AdamW's parameters.
      excess: How far the loss at the best rates is above the lowest there is, in nats: an
        estimate.
    """

    moves: tuple[tuple[float, float], ...]
    excess: float


def selection(record: Record) -> Selection | None:
    """The error of a search's choice; None of a search with fewer than two seeds.

    Without one of n seeds, a choice that is linear in the seeds' mean moves by a variance
    that is 1/(n − 1) of its own. The mean loss that the moves cost on the surface of all
    seeds, times n − 1, is thus an estimate of what the choice itself costs: the
    jackknife's.
    """
    seeds = record.job.search_seeds
    if len(seeds) < 2:
        return None
    without = [smoothed_best(_means(record.searched, seed)) for seed in seeds]
    losses = _means(record.searched)
    surface = losses | smoothed(losses)
    costs = [surface[point] - surface[record.best] for point in without]
    moves = (np.subtract(without, record.best) / 2).tolist()
    return Selection(tuple(map(tuple, moves)), (len(seeds) - 1) * float(np.mean(costs)))


def _means(
    searched: Mapping[Point, tuple[Result, ...]], without: int | None = None
) -> dict[Point, float]:
    """The mean loss at each point."""
    return {
        point: float(np.mean([run.loss for run in runs if run.seed != without]))
        for point, runs in searched.items()
    }


def redrawn(record: Record) -> tuple[float, float]:
    """Mean and variance of the excess that searches like this one would have.

    A bootstrap without random numbers: all samples with replacement of the search's
    seeds, whose deviations at each point are widened by √(n/(n − 1)), choose on the
    surface of all seeds.
    """
    losses = np.array([[r.loss for r in runs] for runs in record.searched.values()])
    means = _means(record.searched)
    surface = means | smoothed(means)
    seeds = losses.shape[1]
    deviations = losses - losses.mean(axis=1, keepdims=True)
    deviations *= (seeds / (seeds - 1)) ** 0.5
    lowest = surface[smoothed_best(surface)]
    costs = []
    for sample in itertools.product(range(seeds), repeat=seeds):
        moved = deviations[:, list(sample)].mean(axis=1)
        again = {p: surface[p] + x for p, x in zip(means, moved.tolist(), strict=True)}
        costs.append(surface[smoothed_best(again)] - lowest)
    return float(np.mean(costs)), float(np.var(costs))
