"""Dimension numbers from the types of modules, for any library of modules.

A library has a table of rules: what the modules of a type declare about their parameters.
If a module's type does not declare a parameter of two or more axes, an error names it.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers

from orscale_jax.parameters.dimension_numbers import (
    MODULE,
    NAME,
    OUTPUT,
    RULE,
    SHAPE,
    BlockDimensionNumbers,
    DimensionNumbers,
    Unresolved,
    as_axis,
    as_tuple,
    decisions,
    note_decisions,
)
from orscale_jax.parameters.kinds import NO_MATRIX, in_words, kinds
from orscale_jax.parameters.output_layers import output_layers
from orscale_jax.parameters.path_rules import Rules, refuse_step_count, resolver
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, by_name, dotted, folded, names_on, of_shape


@dataclasses.dataclass(frozen=True)
class Weight:
    """The rows and columns of a matrix, as the type of a module declares them.

    Attributes:
      shape: The declared shape, without axes that a transformation of the module
        adds; None for a size that the module does not declare.
      reduction_axis: The axes of ``shape`` that make up the rows, not negative.
      output_axis: The axes of ``shape`` that make up the columns, not negative. The
        other axes are a batch of matrices.
      blocks: The number of matrices of one size that lie side by side, such as the gates
        of a cell.
      block_axis: The axis of ``shape`` along which these matrices lie.
      group_inputs: The axis of ``shape`` that counts the inputs of one group of a
        convolution. If there is one input, the convolution is depthwise, and AdamW trains
        it.

    Example:
      >>> from orscale_jax.flax import Weight
      >>> experts = Weight((8, 16, 32), reduction_axis=1, output_axis=2)
    """

    shape: tuple[int | None, ...]
    reduction_axis: int | tuple[int, ...]
    output_axis: int | tuple[int, ...]
    _: dataclasses.KW_ONLY
    blocks: int = 1
    block_axis: int = 0
    group_inputs: int | None = None


Declared: TypeAlias = Weight | Unresolved | None
Rule: TypeAlias = Callable[[Any], Mapping[str, Declared]]
ModuleRules: TypeAlias = Mapping[type, Rule]
Numbers: TypeAlias = DimensionNumbers | Unresolved | None


def adamw_only(*names: str) -> Rule:
    """Make a rule by which the parameters of these names take AdamW."""
    return lambda module: dict.fromkeys(names)


def convolution(
    shape: tuple[int | None, ...], inputs: int, outputs: int, groups: int
) -> Weight:
    """The weight of a convolution, given the axes that count inputs and outputs."""
    rows = tuple(axis for axis in range(len(shape)) if axis != outputs)
    if groups == 1:
        return Weight(shape, rows, outputs)
    # The outputs of its groups lie side by side.
    blocks = {"blocks": groups, "block_axis": outputs}
    return Weight(shape, rows, outputs, **blocks, group_inputs=inputs)


def declarations(module: Any, rules: Mapping[type, Any]) -> Mapping[str, Any]:
    """The declared parameters of a module, by the rule for its nearest type."""
    cls = nearest(type(module), rules)
    return rules[cls](module) if cls else {}


def nearest(cls: type, rules: Collection[type]) -> type | None:
    """The type whose rule holds for a type of module; None without one."""
    return next((base for base in cls.__mro__ if base in rules), None)


def numbers_by_owner(
    paths: Sequence[Path],
    shape: tuple[int, ...],
    owners: Mapping[Path, Any],
    rules: Mapping[type, Any],
    stacked: Collection[int] = (),
    users_types: Collection[type] = (),
) -> Numbers:
    """The numbers of a parameter, if only axes in front and ``stacked`` stack modules.

    A module speaks for those inside of it by dotted names, but for ``users_types``, of
    which the user has given a rule. Of several paths to one parameter, one that says
    AdamW decides; else they must agree.
    """
    # Transformations stack in front unless told otherwise, which only annotations record.
    # The other axes must have the sizes that the module declares.
    others = [axis for axis in range(len(shape)) if axis not in stacked]
    types, by_path = {}, {}
    for path in paths:
        depths = [i for i in range(len(path)) if path[:i] in owners]
        owner = owners[path[: depths[-1]]]
        cls = owner if isinstance(owner, type) else type(owner)
        types[path] = f"{cls.__module__}.{cls.__qualname__}"
        # All modules around it by dotted names, and then its own one by the first key.
        names = [(depth, ".".join(path[depth:])) for depth in depths]
        if nearest(type(owner), rules) in users_types:
            names = []
        names.append((depths[-1], path[depths[-1]]))
        for depth, name in names:
            declared = declarations(owners[path[:depth]], rules)
            if name in declared:
                rank = len(getattr(declared[name], "shape", ()))
                axes = tuple(others[max(len(others) - rank, 0) :])
                by_path[path] = located(declared[name], axes, shape)
                break
    if not by_path and len(shape) > 1:
        return Unresolved(f"there is no rule for it in {types[paths[0]]}")
    numbers = list(by_path.values())
    if not numbers or None in numbers:
        return None
    if all(one == numbers[0] for one in numbers):
        return numbers[0]
    said = (
        f"{dotted(path)!r} in {types[path]}: {getattr(one, 'reason', one)}"
        for path, one in by_path.items()
    )
    return Unresolved("its owners disagree; " + "; ".join(said))


def located(declared: Declared, axes: tuple[int, ...], shape: tuple[int, ...]) -> Numbers:
    """The numbers of a leaf in which the module's own axes are ``axes``."""
    if not isinstance(declared, Weight):
        return declared
    sizes = tuple(shape[axis] for axis in axes)
    if len(sizes) != len(declared.shape) or any(
        size not in (None, actual)
        for size, actual in zip(declared.shape, sizes, strict=True)
    ):
        return Unresolved(
            f"its module declares {declared.shape}, which must follow the stacked axes, "
            "if there are any"
        )
    if declared.group_inputs is not None and sizes[declared.group_inputs] == 1:
        return None  # Depthwise.
    rows, columns = (
        as_axis(tuple(axes[axis] for axis in as_tuple(own_axes)))
        for own_axes in (declared.reduction_axis, declared.output_axis)
    )
    if declared.blocks == 1:
        return MuonDimensionNumbers(rows, columns)
    axis = axes[declared.block_axis]
    return BlockDimensionNumbers(rows, columns, block_axis=axis, blocks=declared.blocks)


def resolved(
    leaves: Mapping[Path, Any],
    by_type: Mapping[Path, Numbers],
    overrides: Rules | None,
    output: Collection[Path] = (),
    shared: Mapping[Path, Sequence[Path]] = {},
) -> tuple[Mapping[Path, DimensionNumbers | None], Mapping[Path, str]]:
    """The dimension numbers of all parameters, and what has decided each.

    Overrides, traced outputs, types of modules and names decide.
    """
    numbers, kind_of = dict(by_type), kinds(leaves)
    decided_by = {
        path: MODULE if np.ndim(leaf) > 1 else SHAPE for path, leaf in leaves.items()
    }
    for path, declared in by_type.items():
        traced = any(leaf[: len(path)] == path for leaf in output)
        head = traced and not _is_attention(path, leaves)
        # A head is a layer like any other by its type. Other names decide where the
        # types say nothing: to rename a layer does not change its optimizer.
        named = isinstance(declared, Unresolved) and kind_of[path] in NO_MATRIX
        names = shared.get(path, [path])
        if head or named or "head" in kinds(names).values():
            numbers[path] = None
            if declared is not None:
                decided_by[path] = OUTPUT if head else NAME
    # As the keys of a dictionary, paths are the same for rules and for names.
    make = resolver(overrides or {}, numbers, "overrides", "overrides")
    with decisions.open() as notes:
        numbers_of: dict[Path, Numbers] = make(dict(leaves))
    unresolved = [
        (dotted(path), f"{of_shape(leaves[path])}: {unclear.reason}")
        for path, unclear in numbers_of.items()
        if isinstance(unclear, Unresolved)
    ]
    if unresolved:
        raise ValueError(
            "the types of the modules do not say which axes of these parameters are rows "
            f"and which are columns:{folded(unresolved)}\nPass overrides={{"
            "expression for its path: optax.contrib.MuonDimensionNumbers("
            'reduction_axis=..., output_axis=...)} for each, with "adamw" instead for '
            "AdamW, or rules={type of its module: ...}."
        )
    for path in leaves:
        if any(names_on((jax.tree_util.DictKey(path),)) in note for note in notes):
            decided_by[path] = RULE
    return numbers_of, decided_by


def _is_attention(path: Path, leaves: Iterable[Path]) -> bool:
    """Whether a parameter is attention's, which ends in a hidden layer if traced alone.

    A key on its path says so, or queries and keys as the children of the whole model.
    """
    children = "|".join(sorted(key for leaf in leaves for key in in_words(leaf)[:1]))
    return bool(
        any(re.search(r"att(entio)?n|\bm[hlq]a\b", key) for key in in_words(path))
        or re.search(r"\bw?k(ey|v)?\b.*\b(w?q\b|quer)|\bw?qkvo?\b", children)
    )


def look_up(
    numbers: Mapping[Path, DimensionNumbers | None],
    decided_by: Mapping[Path, str],
    is_parameter: Callable[[Any], bool],
    expected: str,
) -> Callable[[PyTree], PyTree]:
    """Make a function from any tree of some of a model's parameters to their numbers."""

    def weight_dimension_numbers(params: PyTree) -> PyTree:
        refuse_step_count(params)
        why: dict[Path, str] = {}

        def at(entries: Any, _: Any) -> DimensionNumbers | None:
            path = own = names_on(entries)
            if path[:1] == ("params",):  # Of all variables of Linen, or of the module's.
                own = path if path in numbers else path[1:]
            if own not in numbers:
                raise ValueError(
                    f"parameter {dotted(path)!r} is no {expected} was given: give that "
                    "function the trained model, and the optimizer its parameters only."
                )
            why[path] = decided_by[own]
            return numbers[own]

        tree = jax.tree.map_with_path(at, params, is_leaf=is_parameter)
        note_decisions(why)
        return tree

    return weight_dimension_numbers


def of_module_tree(
    model: PyTree,
    module_type: type,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    rules: Mapping[type, Any],
    overrides: Rules | None,
    array_type: type | tuple[()] = (),
    placed: Callable[[Any, Any], Numbers] = lambda declared, node: declared,
) -> Callable[[PyTree], PyTree]:
    """The numbers of a tree of modules; a node of ``array_type`` is one parameter."""

    def is_parameter(node: Any) -> bool:
        return isinstance(node, array_type)

    modules: list[tuple[Path, Any]] = [((), model)]
    for path, module in modules:  # Each adds those inside of it.

        def is_inside(node: Any, around: Any = module) -> bool:
            return node is not around and isinstance(node, module_type)

        inside = by_name(module, is_inside).items()
        modules += [(path + below, node) for below, node in inside if is_inside(node)]
    owners, leaves, by_type = dict(modules), {}, {}
    for path, node in by_name(model, is_parameter).items():
        arrays = [x for x in jax.tree.leaves(node) if hasattr(x, "dtype")]
        if any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays):
            leaves[path] = leaf = jax.tree.leaves(node)[0]
            numbers = numbers_by_owner([path], np.shape(leaf), owners, rules)
            by_type[path] = placed(numbers, node)
    output: list[Path] = []
    if any(inputs):
        args, kwargs = inputs

        def outputs(model: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        output = output_layers(outputs, model, (), *args, **kwargs)
    return look_up(
        *resolved(leaves, by_type, overrides, output),
        is_parameter,
        "floating-point array of the model that dimension_numbers",
    )
