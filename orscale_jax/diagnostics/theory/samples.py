"""The micro-batches that are given, and samples of every matrix from each of them.

Samples are compiled once, and taken from one micro-batch after another.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.diagnostics.per_matrix import whole_parts
from orscale_jax.newton_schulz.polar import polar_factor
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.orthogonalize import orthogonalize
from orscale_jax.trees.boxes import PyTree, rebox, unbox

LossFn: TypeAlias = Callable[[PyTree, Any], jax.Array]

# Eight steps bring singular values down to 1e-3 of the norm to 1 within 1e-3.
NS_STEPS = 8


class Sample(NamedTuple):
    """The sample of one micro-batch for the matrices in one part of a leaf."""

    spectrum: jax.Array  # Singular values of the mean of the other gradients.
    projection: jax.Array  # This gradient on their singular vectors.
    square: jax.Array  # ‖G − mean‖².
    smoothness: jax.Array


@dataclasses.dataclass(frozen=True)
class Work:
    """The work on one micro-batch; static in compiled programs.

    Attributes:
      loss_fn: See :func:`estimate`.
      matrices: The matrices of the parameters.
      exact: See :func:`estimate`.
      cross_terms: See :func:`estimate`.
    """

    loss_fn: LossFn
    matrices: Matrices
    exact: bool = True
    cross_terms: bool = True

    def weights(self, params: PyTree) -> PyTree:
        """The leaves of matrices, masked elsewhere."""
        leaves = self.matrices.leaves(unbox(params))
        return self.matrices.tree_of(list(map(jnp.asarray, leaves)))

    def gradient(self, params: PyTree, batch: Any) -> Callable[[PyTree], PyTree]:
        """The gradient as a function of the weights."""

        def loss(weights: PyTree) -> jax.Array:
            leaves = self.matrices.leaves(weights)
            whole = self.matrices.replace(unbox(params), leaves)
            return self.loss_fn(rebox(whole, params), batch)

        return jax.grad(loss)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(self, params: PyTree, batch: Any) -> PyTree:
        """The gradients of the weights, in float32 or wider."""
        found = self.gradient(params, batch)(self.weights(params))
        return jax.tree.map(lambda g: g.astype(compute_dtype(g)), found)

    def total_gradient(self, params: PyTree, batches: Iterable[Any]) -> PyTree:
        """The sum of the gradients of all micro-batches."""
        gradients = (self.gradients(params, batch) for batch in batches)
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), gradients)

    @functools.partial(jax.jit, static_argnums=0)
    def polar_factors(self, gradients: PyTree) -> PyTree:
        """The polar factors of all matrices."""
        stage = orthogonalize(
            ns_steps=NS_STEPS,
            ns_dtype=compute_dtype(gradients),
            weight_dimension_numbers=self.matrices.axes_tree,
        )
        factors, _ = stage.update(gradients, stage.init(gradients))
        return factors

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


def micro_batches(batches: Any, at_least: int = 2) -> list[Any]:
    """The micro-batches as a list, from an iterator or a tree that stacks them, too.

    Raises:
      ValueError: If there are too few, or their shapes differ.
    """
    found = (
        list(batches) if isinstance(batches, list | Iterator) else _along_first(batches)
    )
    if len(found) < at_least:
        raise ValueError(
            f"batches has {len(found)} micro-batches: pass at least {at_least}, better 8 "
            "or more."
        )
    shapes = [_shapes(batch) for batch in found]
    for index, of_batch in enumerate(shapes):
        if of_batch != shapes[0]:
            raise ValueError(
                "batches must have the same shapes, or their mean would weight them "
                f"wrongly: batch 0 has {shapes[0]} and batch {index} has {of_batch}."
            )
    return found


def require_scalar(loss_fn: LossFn, params: PyTree, batch: Any) -> None:
    """Refuse a loss function that does not return one scalar."""
    loss = jax.eval_shape(loss_fn, params, batch)
    if not jax.tree_util.all_leaves([loss]) or loss.shape:
        raise ValueError(
            f"loss_fn must return one scalar, the mean loss of the batch; it returns "
            f"{loss}."
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


def _along_first(batches: Any) -> list[Any]:
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batches)}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(
            "batches must be a list of micro-batches, or a tree whose leaves count them "
            f"along their first axis: found leaves of shapes {_shapes(batches)}."
        )
    [(length,)] = lengths
    return [jax.tree.map(lambda leaf, i=i: leaf[i], batches) for i in range(length)]


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
