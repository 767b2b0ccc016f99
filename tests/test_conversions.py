"""The table of conversions in docs/switching.md: steps of others, and ours.

The others are their update formulas in float64 NumPy, written from the files that the
table names (no code of theirs); of Optax's Muon it is the implementation itself. All use
Keller Jordan's five steps of Newton–Schulz.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orscale_jax import muon
from tests import oracle, runs
from tests.leaves import relative_error
from tests.runs import run

JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
SHAPES = {"up": (6, 24), "square": (10, 10), "down": (24, 6)}  # Inputs, outputs.
RATE, DECAY, MOMENTUM, STEPS = 0.02, 0.3, 0.9, 4


tree = functools.partial(runs.tree, shapes=SHAPES)


def sum_of_gradients(momentum, gradient):
    """Keller Jordan's post, Moonlight: M ← μM + G, and G + μM with Nesterov."""
    momentum = MOMENTUM * momentum + gradient
    return momentum, gradient + MOMENTUM * momentum


def average_of_gradients(momentum, gradient):
    """torch.optim.Muon, muon.py, Emerging-Optimizers: M ← μM + (1 − μ)G, likewise."""
    momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
    return momentum, (1 - MOMENTUM) * gradient + MOMENTUM * momentum


def average_without_nesterov(momentum, gradient):
    momentum, _ = average_of_gradients(momentum, gradient)
    return momentum, momentum


def jordan(inputs, outputs):
    return max(1, outputs / inputs) ** 0.5


def moonlight(inputs, outputs):
    return 0.2 * max(inputs, outputs) ** 0.5


def unit_rms_norm(inputs, outputs):
    return (outputs / inputs) ** 0.5


def spectral(inputs, outputs):
    return max(inputs, outputs) ** 0.5


def theirs(name, convention):
    """W after some steps, in float64; on the way as (outputs, inputs), like PyTorch's."""
    weight = np.asarray(tree(0)[name], np.float64).T
    momentum = np.zeros_like(weight)
    for step in range(STEPS):
        gradient = np.asarray(tree(step + 1)[name], np.float64).T
        momentum, update = convention.momentum_of(momentum, gradient)
        q = oracle.newton_schulz(update, JORDAN, safety=1.0)
        weight = weight * (1 - (DECAY if convention.independent else RATE * DECAY))
        weight = weight - RATE * convention.scale(*SHAPES[name]) * q
    return weight.T


def ours(name, rate, **arguments):
    optimizer = muon(
        rate, momentum=MOMENTUM, ns_coeffs="jordan", ns_dtype=jnp.float32, **arguments
    )
    params = {name: tree(0)[name]}
    [*_, (params, _)] = run(optimizer, params, STEPS, lambda i: {name: tree(i)[name]})
    return params[name]


class Convention(NamedTuple):
    """What they do, and the arguments of ours: ``consistent_rms`` and ``nesterov``."""

    momentum_of: Callable
    scale: Callable
    rms: float | None = 0.2
    nesterov: bool = True
    independent: bool = False  # W ← (1 − w)W instead of (1 − aw)W.


OF_EMERGING = {"momentum_of": average_without_nesterov, "nesterov": False}
CASES = {
    "torch.optim.Muon, original": Convention(average_of_gradients, jordan),
    "torch.optim.Muon, match_rms_adamw": Convention(average_of_gradients, moonlight),
    "KellerJordan/Muon": Convention(average_of_gradients, jordan, rms=None),
    "Moonlight": Convention(sum_of_gradients, moonlight),
} | {
    f"Emerging-Optimizers, {name}": Convention(**OF_EMERGING, **arguments)
    for name, arguments in {
        "spectral": {"scale": spectral, "rms": 1.0},
        "shape_scaling": {"scale": jordan, "rms": None},
        "unit_rms_norm": {"scale": unit_rms_norm},
        "unit_rms_norm, independent": {"scale": unit_rms_norm, "independent": True},
    }.items()
}


@pytest.mark.extended
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_the_converted_rate_and_decay_take_the_same_steps(case, shape):
    """η = aσ/s and ηλ = aw (or w): rate a, decay w and scale σ are theirs."""
    convention, sides = CASES[case], SHAPES[shape]
    s = 1.0 if convention.rms is None else convention.rms * max(sides) ** 0.5
    rate = RATE * convention.scale(*sides) / s
    found = ours(
        shape,
        rate,
        weight_decay=(DECAY if convention.independent else RATE * DECAY) / rate,
        consistent_rms=convention.rms,
        nesterov=convention.nesterov,
    )
    assert relative_error(found, theirs(shape, convention)) < 1e-5


SHAPE_SCALING = {"scale_mode": "shape_scaling"}
SAME = {  # What needs no conversion.
    "Moonlight": {},
    "torch.optim.Muon, match_rms_adamw": {},
    "torch.optim.Muon, original": SHAPE_SCALING,
    "KellerJordan/Muon": SHAPE_SCALING,
    "Emerging-Optimizers, shape_scaling": SHAPE_SCALING | {"nesterov": False},
    "Emerging-Optimizers, unit_rms_norm": {
        "scale_mode": "unit_rms_norm",
        "nesterov": False,
    },
}


@pytest.mark.extended
@pytest.mark.parametrize("case", SAME)
def test_what_needs_no_conversion(case):
    for shape in SHAPES:
        found = ours(shape, RATE, weight_decay=DECAY, **SAME[case])
        assert relative_error(found, theirs(shape, CASES[case])) < 1e-5


def test_independent_decay_under_a_schedule():
    """W ← (1 − w)W − ηsQ is a decay of w/η."""
    schedule = optax.linear_schedule(0.0, 0.02, STEPS)

    def decay(count):
        return DECAY / jnp.maximum(schedule(count), 1e-12)

    found = ours("up", schedule, weight_decay=decay)
    weight, momentum = np.asarray(tree(0)["up"], np.float64), 0.0
    for step in range(STEPS):
        momentum, update = sum_of_gradients(momentum, np.asarray(tree(step + 1)["up"]))
        q = oracle.newton_schulz(update.T, JORDAN, safety=1.0).T
        rate = float(schedule(step))
        kept = 1 - DECAY if rate else 1.0
        weight = kept * weight - rate * moonlight(*SHAPES["up"]) * q
    assert relative_error(found, weight) < 1e-5
