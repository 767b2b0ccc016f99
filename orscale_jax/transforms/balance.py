"""The stage of Aurora: Q with vectors of nearly one norm along the longer side."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.transforms.boundary import Stage
from orscale_jax.transforms.matrices import Matrices, broadcast
from orscale_jax.trees.boxes import PyTree


def balanced_polar_stage(
    polar: Stage, pp_iterations: int | jax.Array, pp_beta: ArrayLike
) -> Stage:
    """M̃ to the Q of Aurora, by ``polar``; see :func:`orscale_jax.family.aurora`.

    Inputs are in float32 or float64. A square matrix goes through ``polar`` once.
    """
    _checks.count("pp_iterations", pp_iterations)
    _checks.number("pp_beta", pp_beta, at_least=0)

    def stage(matrices: Matrices) -> optax.GradientTransformation:
        last = polar(matrices)

        def update(
            updates: PyTree, state: PyTree, params: PyTree | None = None
        ) -> tuple[PyTree, PyTree]:
            rectangular = _rectangular(matrices, updates)
            again = polar(rectangular)

            def balance(_: ArrayLike, x: PyTree) -> PyTree:
                q, _ = again.update(x, state, params)
                by = functools.partial(_divide, exponent=pp_beta)
                return rectangular.map(by, x, q)

            x = rectangular.map(_normalize, updates)
            if _checks.is_whole(pp_iterations):
                for i in range(1, int(pp_iterations)):
                    x = balance(i, x)
            else:
                x = jax.lax.fori_loop(1, pp_iterations, balance, x)
            return last.update(x, state, params)

        return optax.GradientTransformation(last.init, update)

    return stage


def _rectangular(matrices: Matrices, tree: PyTree) -> Matrices:
    """Those leaves of the matrices that hold any that are not square."""
    found = matrices.map(lambda axes, x: np.any(axes.by_shape(operator.ne, x)), tree)
    chosen = iter(matrices.leaves(found))
    axes = tuple(axes if axes and next(chosen) else None for axes in matrices.axes)
    return dataclasses.replace(matrices, axes=axes)


def _normalize(axes: MatrixAxes, x: jax.Array) -> jax.Array:
    """Vectors of the longer side, divided by their norms, whose squares may overflow."""
    largest = axes.reduce(largest_magnitude, x)
    x = x / broadcast(axes, jnp.where(largest == 0, 1, largest), x)
    return _divide(axes, x, x, exponent=0.5)


def _divide(
    axes: MatrixAxes, x: jax.Array, by: jax.Array, *, exponent: ArrayLike
) -> jax.Array:
    """Vectors of x's longer side, divided by powers of the squared norms of others."""
    # Of (m, n), n is the longer side where m < n.
    for vectors, longer in ((axes.neurons, operator.lt), (axes.inputs, operator.gt)):
        chosen = axes.by_shape(longer, x)
        if np.any(chosen):
            square = vectors.reduce(jnp.sum, jnp.square(by))
            power = jnp.where(square == 0, 1, square) ** jnp.asarray(exponent, x.dtype)
            x = x / jnp.where(chosen, broadcast(vectors, power, x), 1)
    return x
