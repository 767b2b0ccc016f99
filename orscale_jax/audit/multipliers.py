"""The multipliers of the learning rate that an optimizer has for each parameter."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import numpy as np

from orscale_jax.audit.state import leaves_by_path
from orscale_jax.trees.boxes import PyTree

# The smallest and the largest, of a stack with one for each layer.
Ends: TypeAlias = tuple[float, float]


def multipliers(trees: Iterable[PyTree]) -> dict[Any, Ends]:
    """The multipliers of some trees by path, where they are known."""
    found: dict[Any, Ends] = {}
    for path, value in _values(trees):
        known = np.asarray(jax.device_get(value))
        found[path] = float(known.min()), float(known.max())
    return found


def _values(trees: Iterable[PyTree]) -> list[tuple[Any, Any]]:
    pairs = [pair for tree in trees for pair in leaves_by_path(tree).items()]
    return [pair for pair in pairs if not isinstance(pair[1], jax.core.Tracer)]
