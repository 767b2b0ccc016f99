"""Dimension numbers from overrides, names and module types, in this order."""

import types
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from orscale_jax.parameters.classes_by_name import ClassesByName
from orscale_jax.parameters.dimension_numbers import DimensionNumbers, refuse_step_count
from orscale_jax.parameters.head_rules import HeadRules, PerHeadRules
from orscale_jax.parameters.module_types import Numbers, Unresolved
from orscale_jax.parameters.path_rules import PathRules, Rules
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, dotted, keys_on, names_on, quoted

Resolved: TypeAlias = Mapping[Path, DimensionNumbers | None]


def names_of_heads(
    output_heads: Collection[str], heads: Collection[str] | None
) -> Collection[str]:
    """The names of output heads, of which ``heads`` is the deprecated argument."""
    if heads is None:
        return output_heads
    message = (
        "heads is deprecated, as it is no number of heads: pass output_heads instead."
    )
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return (*output_heads, *heads)


def resolve(
    leaves: Mapping[Path, Any],
    by_type: Mapping[Path, Numbers],
    output_heads: Collection[str],
    overrides: Rules | None,
    per_head: PerHeadRules,
    heads_of: Mapping[Path, int] = types.MappingProxyType({}),
) -> Resolved:
    """Resolve the dimension numbers of all parameters of a model.

    Args:
      leaves: The parameters by path.
      by_type: Their dimension numbers, from the types of their modules.
      output_heads: Names that mark output heads on a path.
      overrides: Rules by path, which come before names, which come before types.
      per_head: See :func:`orscale_jax.by_path`.
      heads_of: The numbers of heads that modules declare, by path.

    Raises:
      ValueError: If parameters are unresolved, or a head or an override matches none,
        or ``per_head`` cannot divide a projection.
    """
    _check_heads(leaves, output_heads)
    rules = PathRules.compile(overrides or {}, "overrides", "overrides")
    overridden = rules.numbers(leaves.items())
    names = ClassesByName.of(leaves.items())
    numbers: dict[Path, DimensionNumbers | None] = {}
    unresolved: list[str] = []
    for path, declared in by_type.items():
        if path in overridden:
            numbers[path] = overridden[path]
        elif names.is_embedding_or_head(path) or not _keys(path).isdisjoint(output_heads):
            numbers[path] = None
        elif isinstance(declared, Unresolved):
            shape = np.shape(leaves[path])
            unresolved.append(f"  {quoted(path)} of shape {shape}: {declared.reason}")
        else:
            numbers[path] = declared
    if unresolved:
        _refuse(unresolved)
    by_head = HeadRules.of(per_head).divide(leaves.items(), numbers, heads_of)
    return {**numbers, **by_head}


def _refuse(unresolved: list[str]) -> None:
    raise ValueError(
        "the types of the modules do not say which axes of these parameters are rows "
        "and which are columns:\n" + "\n".join(unresolved) + "\nPass overrides={"
        "expression for its path: optax.contrib.MuonDimensionNumbers("
        'reduction_axis=..., output_axis=...)} for each, with "adamw" instead for AdamW, '
        "or rules={type of its module: ...}."
    )


def _keys(path: Path) -> set[str]:
    return {*path, *keys_on(path)}


def _check_heads(paths: Collection[Path], output_heads: Collection[str]) -> None:
    keys = set().union(*map(_keys, paths))
    for head in output_heads:
        if head not in keys:
            names = ", ".join(map(dotted, paths))
            raise ValueError(
                f"{head!r} in output_heads is on no parameter's path: the paths are "
                f"{names}."
            )


def look_up(
    numbers: Resolved, is_parameter: Callable[[Any], bool], expected: str
) -> Callable[[PyTree], PyTree]:
    """Make a function from any tree of some of the parameters to its numbers.

    Args:
      numbers: The numbers of all parameters of the model.
      is_parameter: Whether a node of the tree is one parameter.
      expected: The kind of the parameters, for the error message.
    """

    def weight_dimension_numbers(params: PyTree) -> PyTree:
        refuse_step_count(params)

        def at(entries: Any, _: Any) -> DimensionNumbers | None:
            path = names_on(entries)
            if path not in numbers:
                raise ValueError(
                    f"parameter {dotted(path)!r} is no {expected} was given: give that "
                    "function the trained model, and the optimizer its parameters only."
                )
            return numbers[path]

        return jax.tree.map_with_path(at, params, is_leaf=is_parameter)

    return weight_dimension_numbers
