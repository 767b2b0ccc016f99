"""Dimension numbers from the types of modules.

If a module's type does not declare a parameter of two or more axes, an error names it.
Each library of modules has its own table of rules; none is imported here.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from optax.contrib import MuonDimensionNumbers

from orscale_jax.parameters.dimension_numbers import (
    BlockDimensionNumbers,
    DimensionNumbers,
)
from orscale_jax.trees.names import Path


@dataclasses.dataclass(frozen=True)
class Weight:
    """The rows and columns of a matrix, as the type of a module declares them.

    Attributes:
      shape: The declared shape, without axes that a transformation of the module
        adds; None for a size that the module does not declare.
      reduction_axis: The axes of ``shape`` that make up the rows, not negative.
      output_axis: The axes of ``shape`` that make up the columns, not negative. The
        other axes are a batch of matrices.

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
    """Several matrices of one size side by side, such as the gates of a cell."""

    block_axis: int  # The axis of shape along which they lie.
    blocks: int


@dataclasses.dataclass(frozen=True)
class GroupedWeight(BlockWeight):
    """The kernel of a grouped convolution; the outputs of its groups lie side by side."""

    inputs: int  # The axis of shape that counts the inputs of one group.


@dataclasses.dataclass(frozen=True)
class Unresolved:
    """The reason why a type does not determine the dimension numbers of a parameter."""

    reason: str


Declared: TypeAlias = Weight | Unresolved | None
Rule: TypeAlias = Callable[[Any], Mapping[str, Declared]]
ModuleRules: TypeAlias = Mapping[type, Rule]
Numbers: TypeAlias = DimensionNumbers | Unresolved | None


def adamw_only(*names: str) -> Rule:
    """Make a rule by which the parameters of these names take AdamW."""
    return lambda module: dict.fromkeys(names)


def declarations(module: Any, rules: Mapping[type, Any]) -> Mapping[str, Any]:
    """The declared parameters of a module, by the rule for its nearest type."""
    for cls in type(module).__mro__:
        if cls in rules:
            return rules[cls](module)
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
    """The numbers of a parameter, from the module that has it as an attribute.

    ``stacked`` are the axes that are known to stack modules, at any position.
    """
    owner, name = owner_of(path, owners)
    by_name = declarations(owner, rules)
    if name not in by_name:
        return undeclared(type(owner).__name__, shape)
    declared = by_name[name]
    if not isinstance(declared, Weight):
        return declared
    # Transformations stack in front unless told otherwise, which only annotations record.
    # The other axes must have the sizes that the module declares.
    others = [axis for axis in range(len(shape)) if axis not in stacked]
    in_front = max(len(others) - len(declared.shape), 0)
    return locate(declared, tuple(others[in_front:]), shape)


def undeclared(owner: str, shape: tuple[int, ...]) -> Numbers:
    """The numbers of a parameter that no rule declares."""
    return None if len(shape) < 2 else Unresolved(f"there is no rule for it in {owner}")


def locate(declared: Declared, axes: tuple[int, ...], shape: tuple[int, ...]) -> Numbers:
    """The numbers of a leaf in which the module's own axes are ``axes``."""
    if not isinstance(declared, Weight):
        return declared
    own = tuple(shape[axis] for axis in axes)
    if not _agree(declared.shape, own):
        return Unresolved(
            f"its module declares {declared.shape}, which must follow the stacked axes, "
            "if there are any"
        )
    rows, columns = (
        as_axis(tuple(axes[axis] for axis in as_tuple(own_axes)))
        for own_axes in (declared.reduction_axis, declared.output_axis)
    )
    if isinstance(declared, GroupedWeight) and own[declared.inputs] == 1:
        return None  # Depthwise.
    if isinstance(declared, BlockWeight):
        block_axis = axes[declared.block_axis]
        return BlockDimensionNumbers(
            rows, columns, block_axis=block_axis, blocks=declared.blocks
        )
    return MuonDimensionNumbers(rows, columns)


def _agree(declared: tuple[int | None, ...], shape: tuple[int, ...]) -> bool:
    return len(declared) == len(shape) and all(
        size in (None, actual) for size, actual in zip(declared, shape, strict=True)
    )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One axis or several, as a tuple."""
    return (value,) if isinstance(value, int) else tuple(value)


def as_axis(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    """Axes in the form of MuonDimensionNumbers: a single one is an integer."""
    return axes[0] if len(axes) == 1 else axes
