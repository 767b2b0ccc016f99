"""Small trees, meshes, and short runs of an optimizer, with the oracle beside it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import CalibratedTrustRatioState, orscale
from orscale_jax.transforms import trust_ratio
from orscale_jax.trees.nodes import nodes_of
from tests import leaves, oracle

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# A matrix, a stack of three matrices and a bias.
SHAPES = {"w": (6, 4), "stack": (3, 4, 5), "b": (4,)}
NUMBERS = {"w": Dims(0, 1), "stack": Dims(1, 2), "b": None}


def tree(seed, dtype=jnp.float32, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {key: jnp.asarray(rng.normal(size=s), dtype) for key, s in shapes.items()}


def numbers_of(shapes):
    """The last two axes are a matrix; one axis is AdamW's."""
    return {
        k: Dims(len(s) - 2, len(s) - 1) if len(s) > 1 else None for k, s in shapes.items()
    }


def mesh_of(sizes, *kinds):
    """A mesh of these axes: all Auto, all of one kind, or a kind for each."""
    kinds = (kinds or (AUTO,)) * (len(sizes) if len(kinds) < 2 else 1)
    devices = jax.devices()[: np.prod([*sizes.values()])]
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices
    )


def placed(values, mesh, specs):
    """A dictionary's arrays, each with its own spec or all with one."""
    if not isinstance(specs, dict):
        specs = dict.fromkeys(values, specs)
    where = {name: NamedSharding(mesh, specs[name]) for name in values}
    return jax.device_put(values, where)


def first_update(optimizer, params, grads):
    """Updates, and the states before and after them, each by a compiled program."""
    state = jax.jit(optimizer.init)(params)
    updates, after = jax.jit(optimizer.update)(grads, state, params)
    return updates, state, after


def equations(jaxpr, name):
    """The equations of a primitive, inner calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, name)


def types_of(tree):
    """Shapes, dtypes and sharding types."""
    return jax.tree.map(jax.typeof, tree)


def step_of(optimizer, **jit):
    """From parameters, state and gradients to the next parameters and state."""

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, **jit)


def run(optimizer, params, steps, gradients=leaves.random_tree, jit=jax.jit):
    """The parameters and states after each step."""
    update, state, seen = jit(optimizer.update), optimizer.init(params), []
    for step in range(steps):
        updates, state = update(gradients(step + 1), state, params)
        params = optax.apply_updates(params, updates)
        seen.append((params, state))
    return seen


def readout(state, name):
    """A field of a state, or a number of the ratio's, as a tree like the parameters."""
    if name in trust_ratio.NUMBERS:
        [node] = nodes_of(state, CalibratedTrustRatioState)
        return getattr(node, name)
    [(_, tree)] = optax.tree.get_all_with_path(state, name)
    return tree


def has_ratios(state):
    return bool(nodes_of(state, CalibratedTrustRatioState))


def assert_close(found, expected, rtol=1e-5, atol=1e-5):
    chex.assert_trees_all_close(found, expected, rtol=rtol, atol=atol)


def assert_same_bits(found, expected):
    """Equal to the bit, also where both are NaN, and in their dtypes; -0.0 is not 0.0."""
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal_dtypes(found, expected)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = np.asarray(x, float), np.asarray(y, float)
        np.testing.assert_array_equal(
            np.signbit(x)[~np.isnan(x)], np.signbit(y)[~np.isnan(y)]
        )


# Training, in which every parameter has to change.


def squares(y, seed=3):
    """A loss whose gradient differs from entry to entry."""
    return jnp.mean(jnp.square(y - jax.random.normal(jax.random.key(seed), y.shape)))


def assert_all_change(before, after):
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert np.isfinite(new).all()
        assert not np.array_equal(old, new)


def train(params, loss, numbers, steps=2, rate=0.02):
    """The parameters after some steps of orscale."""
    optimizer = orscale(rate, weight_dimension_numbers=numbers)
    gradient = jax.grad(loss)
    step = jax.jit(lambda p, s: step_of(optimizer)(p, s, gradient(p)))
    before, state = params, jax.jit(optimizer.init)(params)
    for _ in range(steps):
        params, state = step(params, state)
    assert_all_change(before, params)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(state))
    return params


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
        """One step at a rate, or at a rate for each leaf."""
        rates = rate if isinstance(rate, dict) else dict.fromkeys(gradients, rate)
        for name, matrices in self.matrices.items():
            pairs = zip(matrices, leaves.matrices(name, gradients[name]), strict=True)
            for matrix, gradient in pairs:
                matrix.step(gradient, rates[name])
        for name, other in self.others.items():
            other.step(gradients[name], rates[name])

    def assert_close(self, params, tolerance):
        for name, matrices in self.matrices.items():
            found = leaves.matrices(name, params[name])
            for matrix, weight in zip(matrices, found, strict=True):
                assert leaves.relative_error(weight, matrix.weight) < tolerance, name
        for name, other in self.others.items():
            assert leaves.relative_error(params[name], other.weight) < tolerance, name
