"""Wrappers that tell XLA which GPU kernels to merge, and which not."""

from typing import Any

import jax
import optax

from orscale_jax.distributed.horizontal_fusion import slices_of_stacks
from orscale_jax.distributed.platforms import GPUS
from orscale_jax.trees.boxes import PyTree


def fusion_barrier(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner``, in kernels of its own on GPUs.

    A GPU kernel that also reduces cannot update its input in place. XLA would fuse the
    momentum with the norms after it, write the new one to another buffer, and copy it.
    """

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        updates, state = inner.update(updates, state, params)
        barriers: dict[str, Any] = dict.fromkeys(GPUS, jax.lax.optimization_barrier)
        updates = jax.lax.platform_dependent(
            updates, **barriers, default=lambda updates: updates
        )
        return in_stacks(updates), state

    return optax.GradientTransformation(inner.init, update)


def of_stacks(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner``, on GPUs in a few kernels for all small leaves."""

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        return inner.update(in_stacks(updates), state, params)

    return optax.GradientTransformation(inner.init, update)


def in_stacks(tree: PyTree) -> PyTree:
    """The same tree; on GPUs its small leaves are slices of stacks."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, slices_of_stacks(leaves))
