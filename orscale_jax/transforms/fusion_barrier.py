"""A wrapper that keeps a GPU from fusing a transformation with what follows it."""

from typing import Any

import jax
import optax

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
        return updates, state

    return optax.GradientTransformation(inner.init, update)
