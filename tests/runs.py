"""Short runs of an optimizer, and of the oracle beside it."""

import inspect

import jax
import optax

from orscale_jax import ablations
from tests import leaves, oracle

ABLATIONS = {
    name: value
    for name, value in vars(ablations).items()
    if inspect.isfunction(value)
    and value.__module__ == ablations.__name__
    and not name.startswith("_")
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

    def __init__(self, params, **arguments):
        self.matrices = {
            name: [
                oracle.Matrix(m, **arguments) for m in leaves.matrices(name, params[name])
            ]
            for name in params
            if name in leaves.KINDS
        }
        self.others = {
            name: oracle.AdamW(params[name])
            for name in params
            if name not in leaves.KINDS
        }

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
