"""From what the types of modules say of their parameters to dimension numbers.

What a type does not say is an error that names the parameter, never a guess. Each library
of modules has its own module of rules; none is imported here.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from optax.contrib import MuonDimensionNumbers

from orscale_jax import _matrix, _rules
from orscale_jax._matrix import BlockDimensionNumbers, DimensionNumbers, PyTree
from orscale_jax._names import dotted, key_name


@dataclasses.dataclass(frozen=True)
class Weight:
    """What the type of a module says of one of its matrices.

    Attributes:
      shape: As the module declares it, without the axes that a transformation of the
        module stacks; None for a size that it does not declare.
      reduction_axis: The axes of ``shape`` that make up the rows, not negative.
      output_axis: The axes of ``shape`` that make up the columns, not negative. The
        axes in neither are a batch of matrices.

    Example:
      >>> from orscale_jax.flax import Weight
      >>> Weight((8, 16, 32), reduction_axis=1, output_axis=2)  # 8 experts
      Weight(shape=(8, 16, 32), reduction_axis=1, output_axis=2)
    """

    shape: tuple[int | None, ...]
    reduction_axis: int | tuple[int, ...]
    output_axis: int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BlockWeight(Weight):
    """One of several equal matrices side by side, such as the gates of a cell."""

    block_axis: int  # Of shape.
    blocks: int


@dataclasses.dataclass(frozen=True)
class GroupedWeight(BlockWeight):
    """The kernel of a convolution in groups, whose outputs lie side by side."""

    inputs: int  # The axis of shape that counts the inputs of one group.


@dataclasses.dataclass(frozen=True)
class Open:
    """Why a type does not settle a parameter."""

    reason: str


Found: TypeAlias = Weight | Open | None
Rule: TypeAlias = Callable[[Any], Mapping[str, Found]]
Rules: TypeAlias = Mapping[type, Rule]
Path: TypeAlias = tuple[str, ...]
Numbers: TypeAlias = DimensionNumbers | Open | None


def none_of(*names: str) -> Rule:
    """The rule of a type whose parameters of these names take AdamW."""
    return lambda module: dict.fromkeys(names)


def declared(module: Any, rules: Mapping[type, Any]) -> Mapping[str, Any]:
    """What the rule for the nearest type says of the parameters of a module."""
    for kind in type(module).__mro__:
        if kind in rules:
            return rules[kind](module)
    return {}


def owner_of(path: Path, owners: Mapping[Path, Any]) -> tuple[Any, str]:
    """The innermost module around a parameter, and its attribute that leads there."""
    depth = max(i for i in range(len(path)) if path[:i] in owners)
    return owners[path[:depth]], path[depth]


def numbers_by_owner(
    path: Path,
    shape: tuple[int, ...],
    owners: Mapping[Path, Any],
    rules: Mapping[type, Any],
    stacked: Collection[int] = (),
) -> Numbers:
    """The numbers of a parameter that is an attribute of a module.

    ``stacked`` are the axes that are known to count modules, wherever they stand.
    """
    owner, name = owner_of(path, owners)
    of_owner = declared(owner, rules)
    if name not in of_owner:
        return undeclared(type(owner).__name__, shape)
    found = of_owner[name]
    if not isinstance(found, Weight):
        return found
    # Transformations stack in front unless told otherwise, and what they were told is
    # kept in annotations alone; the sizes have to be those that the module declares.
    others = [axis for axis in range(len(shape)) if axis not in stacked]
    in_front = max(len(others) - len(found.shape), 0)
    return place(found, tuple(others[in_front:]), shape)


def undeclared(owner: str, shape: tuple[int, ...]) -> Numbers:
    """The numbers of a parameter of which no rule speaks."""
    return None if len(shape) < 2 else Open(f"there is no rule for it in {owner}")


def place(found: Found, axes: tuple[int, ...], shape: tuple[int, ...]) -> Numbers:
    """What ``found`` says of a leaf in which the module's own axes are ``axes``."""
    if not isinstance(found, Weight):
        return found
    own = tuple(shape[axis] for axis in axes)
    if len(own) != len(found.shape) or any(
        declared not in (None, size)
        for declared, size in zip(found.shape, own, strict=True)
    ):
        return Open(
            f"its module declares {found.shape}, which has to stand behind the stacked "
            "axes, if there are any"
        )
    rows, columns = (
        as_axis(tuple(axes[axis] for axis in as_tuple(own_axes)))
        for own_axes in (found.reduction_axis, found.output_axis)
    )
    if isinstance(found, GroupedWeight) and own[found.inputs] == 1:
        return None  # Depthwise.
    if isinstance(found, BlockWeight):
        return BlockDimensionNumbers(
            rows, columns, block_axis=axes[found.block_axis], blocks=found.blocks
        )
    return MuonDimensionNumbers(rows, columns)


def settle(
    leaves: Mapping[Path, Any],
    found: Mapping[Path, Numbers],
    heads: Collection[str],
    overrides: _rules.Rules | None,
) -> dict[Path, DimensionNumbers | None]:
    """Overrides before names before types; what is then still open is an error."""
    _check_heads(leaves, heads)
    rules = _rules.PathRules.compile(overrides or {}, "overrides", "overrides")
    overridden = rules.numbers(leaves.items())
    numbers: dict[Path, DimensionNumbers | None] = {}
    still_open: list[str] = []
    for path, by_type in found.items():
        name = dotted(path)
        if name in overridden:
            numbers[path] = overridden[name]
        elif any(_matrix.names_embedding_or_head(key) or key in heads for key in path):
            numbers[path] = None
        elif isinstance(by_type, Open):
            shape = np.shape(leaves[path])
            still_open.append(f"  {name!r} of shape {shape}: {by_type.reason}")
        else:
            numbers[path] = by_type
    if still_open:
        raise ValueError(
            "the types of the modules do not say which axes of these parameters are rows "
            "and which are columns:\n" + "\n".join(still_open) + "\nPass overrides={"
            "expression for its path: optax.contrib.MuonDimensionNumbers("
            'reduction_axis=..., output_axis=...)} for each, or "adamw" there, or rules='
            "{type of its module: ...}."
        )
    return numbers


def look_up(
    numbers: Mapping[Path, DimensionNumbers | None],
    is_parameter: Callable[[Any], bool],
    expected: str,
) -> Callable[[PyTree], PyTree]:
    """The callable that finds settled numbers for any tree of some of the parameters."""

    def weight_dimension_numbers(params: PyTree) -> PyTree:
        _matrix.refuse_step_count(params)

        def at(entries: Any, _: Any) -> DimensionNumbers | None:
            path = keys(entries)
            if path not in numbers:
                raise ValueError(
                    f"parameter {dotted(path)!r} is no {expected} was given: pass it the "
                    "model that is trained, and the optimizer its parameters alone."
                )
            return numbers[path]

        return jax.tree_util.tree_map_with_path(at, params, is_leaf=is_parameter)

    return weight_dimension_numbers


def _check_heads(paths: Collection[Path], heads: Collection[str]) -> None:
    keys = {key for path in paths for key in path}
    for head in heads:
        if head not in keys:
            names = ", ".join(map(dotted, paths))
            raise ValueError(
                f"{head!r} in heads is on no parameter's path: the paths are {names}."
            )


def keys(entries: Any) -> Path:
    """The names on a path of JAX's, whatever the containers."""
    return tuple(key_name(entry) for entry in entries)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One axis or several, as several."""
    return (value,) if isinstance(value, int) else tuple(value)


def as_axis(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    """Axes as MuonDimensionNumbers show them: one alone is an integer."""
    return axes[0] if len(axes) == 1 else axes
