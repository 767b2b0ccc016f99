"""Functions of the parameters, told from trees that are callable."""

from collections.abc import Callable
from typing import Any, TypeGuard

import jax

from orscale_jax.trees.boxes import PyTree


def is_function(
    given: Any, is_leaf: Callable[[Any], bool]
) -> TypeGuard[Callable[[PyTree], PyTree]]:
    """Whether ``given`` is a function that makes a tree of such leaves, not a tree.

    A callable Equinox module may be either: it is a tree if ``is_leaf`` holds for all its
    leaves.
    """
    leaves = jax.tree.leaves(given, is_leaf=is_leaf)
    return callable(given) and not (leaves and all(map(is_leaf, leaves)))
