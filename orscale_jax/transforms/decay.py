"""Weight decay whose schedules count, in all versions of Optax."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from orscale_jax.trees.boxes import PyTree


def add_decayed_weights(
    weight_decay: jax.typing.ArrayLike | optax.Schedule, mask: PyTree | None
) -> optax.GradientTransformation:
    """:func:`optax.add_decayed_weights`, whose own count stands still before 0.2.7."""
    stage = (
        _by_schedule(weight_decay)
        if callable(weight_decay)
        else optax.add_decayed_weights(weight_decay)
    )
    return stage if mask is None else optax.masked(stage, mask)


def _by_schedule(schedule: Callable[[Any], Any]) -> optax.GradientTransformation:
    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> Any:
        now = optax.add_decayed_weights(schedule(state.count))
        decayed, _ = now.update(updates, optax.EmptyState(), params)
        return decayed, state._replace(count=optax.safe_increment(state.count))

    init = optax.add_decayed_weights(schedule).init
    return optax.GradientTransformation(init, update)
