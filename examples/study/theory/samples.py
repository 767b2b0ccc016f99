"""Samples of every matrix from each of them.

Samples are compiled once, and taken from one micro-batch after another.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from orscale_jax.diagnostics.measure import whole_parts
from orscale_jax.diagnostics.step_gain import NS_STEPS, Work
from orscale_jax.newton_schulz.polar import polar_factor
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.trees.boxes import PyTree


class Sample(NamedTuple):
    """The sample of one micro-batch for the matrices in one part of a leaf."""

    spectrum: jax.Array  # Singular values of the mean of the other gradients.
    projection: jax.Array  # This gradient on their singular vectors.
    square: jax.Array  # ‖G − mean‖².
    smoothness: jax.Array


@dataclasses.dataclass(frozen=True)
class Sampling(Work):
    """The work on one micro-batch, as :func:`estimate` has it done.

    Attributes:
      exact: See :func:`estimate`.
      cross_terms: See :func:`estimate`.
    """

    exact: bool = True
    cross_terms: bool = True

    @functools.partial(jax.jit, static_argnums=0)
    def measure(
        self,
        params: PyTree,
        batch: Any,
        shared: tuple[PyTree, PyTree],
        place: tuple[jax.Array, jax.Array],
    ) -> list[Sample]:
        """The samples of a micro-batch for all parts.

        ``shared`` holds the sum of all gradients, and the directions; ``place`` holds the
        index of the micro-batch and the number of micro-batches.
        """
        total, directions = shared
        index, count = place
        signed = directions if self.cross_terms else self.flipped(directions, index)
        weights = self.weights(params)
        tangents = jax.tree.map(lambda d, w: d.astype(w.dtype), signed, weights)
        gradient, curved = jax.jvp(self.gradient(params, batch), (weights,), (tangents,))
        trees = gradient, total, tangents, curved
        parts = [whole_parts(self.matrices, tree) for tree in trees]
        return [self.sample(count, *of_part) for of_part in zip(*parts, strict=True)]

    def flipped(self, directions: PyTree, index: jax.Array) -> PyTree:
        """The directions with a random sign for each matrix."""

        def flipped(axes: MatrixAxes, direction: jax.Array, key: jax.Array) -> jax.Array:
            signs = jax.random.rademacher(key, axes.batch_shape(direction))
            return direction * axes.per_matrix(signs).astype(direction.dtype)

        keys = jax.random.split(jax.random.key(index), len(self.matrices.of_leaves))
        return self.matrices.map(flipped, directions, self.matrices.tree_of([*keys]))

    def sample(
        self,
        count: jax.Array,
        gradient: jax.Array,
        total: jax.Array,
        step: jax.Array,
        curved: jax.Array,
    ) -> Sample:
        """The sample for matrices of shape (..., m, n).

        Args:
          count: The number of micro-batches.
          gradient: The gradient of this micro-batch.
          total: The sum of the gradients of all.
          step: Δ.
          curved: HΔ.
        """
        others = (total - gradient) / (count - 1)
        error = gradient - total / count
        of_signal = _decomposed if self.exact else _descent
        spectrum, projection = of_signal(others, gradient)
        return Sample(
            spectrum=spectrum,
            projection=projection,
            square=_inner(error, error),
            smoothness=_inner(step, curved) / _inner(step, step),
        )


def _decomposed(others: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The singular values of the others, and g on their singular vectors."""
    u, spectrum, vt = jnp.linalg.svd(others, full_matrices=False)
    on_vectors = jnp.einsum(
        "...mk,...mn,...kn->...k", u, g, vt, precision=jax.lax.Precision.HIGHEST
    )
    return spectrum, on_vectors


def _descent(others: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """⟨G, Q⟩ with the polar factor of the others; no spectrum."""
    q = polar_factor(others, steps=NS_STEPS, dtype=others.dtype)
    return jnp.zeros((), g.dtype), _inner(g, q)


def _inner(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(x * y, axis=(-2, -1))
