"""Dimension numbers of models that are trees of modules: Equinox's and Haliax's."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from orscale_jax.parameters import path_rules, resolution
from orscale_jax.parameters.head_rules import PerHeadRules
from orscale_jax.parameters.module_types import Numbers
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, names_on


def dimension_numbers(
    model: PyTree,
    module_type: type,
    numbers_of: Callable[[Path, Any, Mapping[Path, Any]], Numbers],
    output_heads: Collection[str],
    overrides: path_rules.Rules | None,
    per_head: PerHeadRules,
    heads_of: Callable[[Mapping[Path, Any]], Mapping[Path, int]] = lambda owners: {},
    array_type: type | tuple[type, ...] = (),
) -> Callable[[PyTree], PyTree]:
    """Resolve the dimension numbers of a model, for any tree of some of its parameters.

    Args:
      model: A tree of modules.
      module_type: The type of all modules.
      numbers_of: The dimension numbers of a parameter by type, given its path, its
        value, and the modules by path.
      output_heads: See :func:`orscale_jax.equinox.dimension_numbers`.
      overrides: See :func:`orscale_jax.equinox.dimension_numbers`.
      per_head: See :func:`orscale_jax.by_path`.
      heads_of: The numbers of heads that modules declare, by path of the modules with
        their parameters, given the modules by path.
      array_type: The type of nodes that are one parameter each.

    Returns:
      A callable from the parameters to their tree of dimension numbers.
    """

    def is_parameter(node: Any) -> bool:
        return isinstance(node, array_type)

    owners = {(): model, **dict(_modules(model, (), module_type))}
    nodes = {
        names_on(entries): node
        for entries, node in jax.tree.leaves_with_path(model, is_parameter)
        if any(map(_is_trained, jax.tree.leaves(node)))
    }
    by_type = {path: numbers_of(path, node, owners) for path, node in nodes.items()}
    leaves = {path: jax.tree.leaves(node)[0] for path, node in nodes.items()}
    declared = heads_of(owners)
    heads = {
        path: declared[path[:depth]]
        for path in leaves
        for depth in range(len(path))
        if path[:depth] in declared
    }
    numbers = resolution.resolve(
        leaves, by_type, output_heads, overrides, per_head, heads
    )

    return resolution.look_up(
        numbers, is_parameter, "floating-point array of the model that dimension_numbers"
    )


def _modules(node: PyTree, path: Path, cls: type) -> Iterator[tuple[Path, Any]]:
    """All modules in a tree, by path."""
    inner = jax.tree.leaves_with_path(
        node, is_leaf=lambda other: other is not node and isinstance(other, cls)
    )
    for entries, other in inner:
        if isinstance(other, cls) and other is not node:
            there = path + names_on(entries)
            yield there, other
            yield from _modules(other, there, cls)


def _is_trained(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
