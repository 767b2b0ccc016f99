"""Dimension numbers of models that are trees of modules: Equinox's and Haliax's."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from orscale_jax import _module_types, _rules
from orscale_jax._matrix import PyTree
from orscale_jax._module_types import Numbers, Path


def dimension_numbers(
    model: PyTree,
    module_type: type,
    numbers_of: Callable[[Path, Any, Mapping[Path, Any]], Numbers],
    heads: Collection[str],
    overrides: _rules.Rules | None,
    array_type: type | tuple[type, ...] = (),
) -> Callable[[PyTree], PyTree]:
    """Settle the parameters of a model, for any tree that holds some of them.

    Args:
      model: A tree of modules.
      module_type: The type of all modules.
      numbers_of: What the types say of a parameter: of its path and value, and of the
        modules by path.
      heads: As in :func:`orscale_jax.equinox.dimension_numbers`.
      overrides: As in :func:`orscale_jax.equinox.dimension_numbers`.
      array_type: Nodes that are one parameter each.

    Returns:
      A callable from the parameters to their tree of dimension numbers.
    """

    def is_parameter(node: Any) -> bool:
        return isinstance(node, array_type)

    owners = {(): model, **dict(_modules(model, (), module_type))}
    nodes = {
        _module_types.keys(entries): node
        for entries, node in jax.tree_util.tree_leaves_with_path(model, is_parameter)
        if any(map(_is_trained, jax.tree.leaves(node)))
    }
    found = {path: numbers_of(path, node, owners) for path, node in nodes.items()}
    leaves = {path: jax.tree.leaves(node)[0] for path, node in nodes.items()}
    numbers = _module_types.settle(leaves, found, heads, overrides)

    return _module_types.look_up(
        numbers, is_parameter, "floating-point array of the model that dimension_numbers"
    )


def _modules(node: PyTree, path: Path, kind: type) -> Iterator[tuple[Path, Any]]:
    """All modules in a tree, by path."""
    inner = jax.tree_util.tree_leaves_with_path(
        node, is_leaf=lambda other: other is not node and isinstance(other, kind)
    )
    for entries, other in inner:
        if isinstance(other, kind) and other is not node:
            there = path + _module_types.keys(entries)
            yield there, other
            yield from _modules(other, there, kind)


def _is_trained(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
