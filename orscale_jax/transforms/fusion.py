"""A wrapper that has XLA merge GPU kernels of small leaves."""

import jax
import optax

from orscale_jax.distributed.horizontal_fusion import slices_of_stacks
from orscale_jax.trees.boxes import PyTree


def of_stacks(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run ``inner``, on GPUs in a few kernels for all small leaves."""

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        return inner.update(in_stacks(updates), state, params)

    return optax.GradientTransformation(inner.init, update)


def in_stacks(tree: PyTree) -> PyTree:
    """The same tree; on GPUs its small leaves are slices of stacks."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, slices_of_stacks(leaves))
