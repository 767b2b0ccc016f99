"""A wrapper that keeps a GPU from fusing a transformation with what follows it."""

from typing import Any

import jax
import optax

from orscale_jax.distributed.platforms import FUSION_BARRIER
from orscale_jax.trees.boxes import PyTree


def fusion_barrier(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner``, in kernels of its own on the platforms of ``FUSION_BARRIER``."""

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        updates, state = inner.update(updates, state, params)
        barriers: dict[str, Any] = dict.fromkeys(
            FUSION_BARRIER, jax.lax.optimization_barrier
        )
        updates = jax.lax.platform_dependent(
            updates, **barriers, default=lambda updates: updates
        )
        return updates, state

    return optax.GradientTransformation(inner.init, update)
