"""Short runs of an optimizer, and of the oracle beside it."""

import functools
import inspect

import jax
import optax

from examples.study import controls
from orscale_jax import family, orscale
from tests import leaves, oracle


def optimizers_of(module):
    """The public functions that a module defines, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


# The arguments of the paper's experiments on images.
VISION = {"consistent_rms": None, "calibrate": False, "r_min": 0.5, "r_max": 1.5}
RELATIVES = optimizers_of(family)
ABLATIONS = {
    name: getattr(controls, name)
    for name in (
        "polar_factor_denominator",
        "momentum_denominator",
        "momentum_rms_denominator",
        "decoupled_weight_decay",
        "bfloat16_calibration",
    )
}
FAMILY = RELATIVES | {
    "pooled": controls.pooled,
    "replayed": functools.partial(controls.replayed, trust_ratio=[1.5, 0.5, 2.0]),
    "full_rank_anchor": functools.partial(orscale, anchor="full_rank"),
    "largest_anchor": functools.partial(orscale, anchor="largest", anchor_steps=3),
}


def run(optimizer, params, steps, gradients=leaves.random_tree):
    """The parameters and states after each step."""
    update = jax.jit(optimizer.update)
    state, seen = optimizer.init(params), []
    for step in range(steps):
        updates, state = update(gradients(step + 1), state, params)
        params = optax.apply_updates(params, updates)
        seen.append((params, state))
    return seen


def readout(state, name):
    [(_, tree)] = optax.tree.get_all_with_path(state, name)
    return tree


class Oracles:
    """One oracle per matrix and per other leaf of the tree."""

    def __init__(self, params, matrix=oracle.Matrix, **arguments):
        self.matrices = {
            name: [matrix(m, **arguments) for m in leaves.matrices(name, params[name])]
            for name in params
            if name in leaves.KINDS
        }
        self.others = {
            name: oracle.AdamW(params[name])
            for name in params
            if name not in leaves.KINDS
        }

    @property
    def all_matrices(self):
        return [matrix for matrices in self.matrices.values() for matrix in matrices]

    def step(self, gradients, rate):
        for name, matrices in self.matrices.items():
            pairs = zip(matrices, leaves.matrices(name, gradients[name]), strict=True)
            for matrix, gradient in pairs:
                matrix.step(gradient, rate)
        for name, other in self.others.items():
            other.step(gradients[name], rate)

    def assert_close(self, params, tolerance):
        for name, matrices in self.matrices.items():
            found = leaves.matrices(name, params[name])
            for matrix, weight in zip(matrices, found, strict=True):
                assert leaves.relative_error(weight, matrix.weight) < tolerance, name
        for name, other in self.others.items():
            assert leaves.relative_error(params[name], other.weight) < tolerance, name
