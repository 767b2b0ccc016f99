"""Dimension numbers: which leaves of a tree are matrices, and along which axes.

Only this module resolves dimension numbers. Everything else handles
:class:`~orscale_jax.parameters.axes.MatrixAxes`.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import validate
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.kinds import NO_MATRIX, kinds
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import (
    Path,
    dotted,
    keys_on,
    listed,
    name_and_shape,
    names_on,
    of_shape,
    quoted,
)
from orscale_jax.trees.nodes import (
    TraceLog,
    broadcast_prefix,
    is_function,
    leaves_and_masks,
    nodes_of,
)


@dataclasses.dataclass(frozen=True)
class BlockDimensionNumbers:
    """Dimension numbers of a weight in which several matrices lie side by side.

    Examples are fused query, key and value projections, fused gate and up projections,
    and heads. Each block has its own Q, c and r, as if it were a separate parameter.

    Attributes:
      reduction_axis: The axes of the rows, as in
        :class:`optax.contrib.MuonDimensionNumbers`. Axes of neither rows nor columns are
        batch axes.
      output_axis: The axes of the columns.
      block_axis: The axis along which the blocks lie, a row axis or a column axis.
      blocks: The number of blocks of equal size, or a tuple of their sizes.
      stride: For a number of blocks that take turns along the axis: how many entries of
        one come before those of the next. 1: every entry belongs to another block than
        the one before it. None: blocks are contiguous.

    Raises:
      ValueError: If ``blocks`` is not a positive integer or a tuple of them,
        ``block_axis`` is not an integer, or ``stride`` is neither None nor a positive
        integer beside a number of blocks.

    Example:
      >>> from orscale_jax import BlockDimensionNumbers
      >>> # q, k and v in one kernel of shape (768, 3 · 768)
      >>> fused = BlockDimensionNumbers(0, 1, block_axis=1, blocks=3)
      >>> # 12 query heads of 64 and 4 of keys and values: (768, 768 + 256 + 256)
      >>> grouped = BlockDimensionNumbers(0, 1, block_axis=1, blocks=(768, 256, 256))
      >>> # gate and up in one PyTorch weight, whose rows alternate
      >>> w13 = BlockDimensionNumbers(1, 0, block_axis=0, blocks=2, stride=1)
    """

    reduction_axis: int | tuple[int, ...] = 0
    output_axis: int | tuple[int, ...] = 1
    _: dataclasses.KW_ONLY
    block_axis: int
    blocks: int | tuple[int, ...]
    stride: int | None = None

    def __post_init__(self) -> None:
        sizes = self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)
        if not sizes or not all(validate.is_whole(size) and size > 0 for size in sizes):
            validate.refuse("blocks", self.blocks, "pass a number, or a tuple of sizes")
        if not validate.is_whole(self.block_axis):
            validate.refuse("block_axis", self.block_axis, "pass one axis, an integer")
        if self.stride is not None:
            validate.count("stride", self.stride)
        if self.stride is not None and isinstance(self.blocks, tuple):
            remedy = "leave it out, or pass a number of blocks, which have equal sizes"
            validate.refuse("stride", self.stride, remedy)

    def sizes(self, length: int) -> tuple[int, ...]:
        """The sizes of the blocks along an axis of this length."""
        if isinstance(self.blocks, tuple):
            return tuple(map(int, self.blocks))
        return (length // self.blocks,) * int(self.blocks)


@dataclasses.dataclass(frozen=True)
class Unresolved:
    """In place of dimension numbers: why they are not known. Only a rule replaces it."""

    reason: str


class UndecidedError(ValueError):
    """Says that leaves, whose paths it has, need dimension numbers or AdamW."""

    def __init__(self, message: str, paths: list[Any], of_dtype: bool = False) -> None:
        super().__init__(message)
        self.paths, self.of_dtype = paths, of_dtype


DimensionNumbers: TypeAlias = MuonDimensionNumbers | BlockDimensionNumbers
WeightDimensionNumbers: TypeAlias = (
    DimensionNumbers | PyTree | Callable[[PyTree], PyTree] | None
)
PLAIN = MuonDimensionNumbers(reduction_axis=0, output_axis=1)

# What the audit reads: what has decided about leaves, by path. A later note replaces an
# earlier one.
SHAPE, NAME, RULE, MODULE, OUTPUT = "shape", "name", "rule", "module", "output"
decisions: TraceLog[Mapping[Path, str]] = TraceLog("decisions")


def note_decisions(by: Mapping[Path, str]) -> None:
    """Note what has decided on rules, from functions that are sent to other processes."""
    decisions.note(by)


def matrix_axes(weight_dimension_numbers: WeightDimensionNumbers, tree: PyTree) -> PyTree:
    """The axes of each leaf of matrices; masked nodes for other leaves. No boxes."""
    if not jax.tree.leaves(tree):  # optax.tree.map_params passes a placeholder.
        return tree
    tree, numbers_tree = unbox(tree), weight_dimension_numbers
    if is_function(numbers_tree, is_resolvable):
        numbers_tree = numbers_tree(tree)
    numbers_tree = unbox(numbers_tree, is_resolvable)
    if numbers_tree is None:
        numbers_tree = default_numbers(tree)

    def resolve(path: Any, numbers: Any, leaf: jax.Array) -> Any:
        if numbers is None:
            return optax.MaskedNode()
        return numbers if is_axes_leaf(numbers) else explicit_axes(path, leaf, numbers)

    return spread(resolve, numbers_tree, tree, "weight_dimension_numbers")


def is_axes_leaf(node: Any) -> bool:
    """Whether ``node`` stands for one leaf in a tree of :func:`matrix_axes`."""
    return isinstance(node, MatrixAxes | optax.MaskedNode)


def is_resolvable(node: Any) -> bool:
    """Whether ``node`` stands for a subtree in a tree of dimension numbers."""
    known = isinstance(node, DimensionNumbers | Unresolved)
    return node is None or known or is_axes_leaf(node)


def spread(
    fn: Callable[[Any, Any, Any], Any], numbers: PyTree, tree: PyTree, argument: str
) -> PyTree:
    """``fn(path, its numbers, leaf)`` of all leaves; the numbers may be a prefix."""
    for path, own_numbers in jax.tree.leaves_with_path(numbers, is_leaf=is_resolvable):
        if not is_resolvable(own_numbers):
            raise ValueError(
                f"{argument}: found {own_numbers!r} at {quoted(path)}, which is neither "
                "None nor an optax.contrib.MuonDimensionNumbers or an "
                "orscale_jax.BlockDimensionNumbers."
            )
    misfit = f"{argument} must be a tree of the parameters' structure, or a prefix of it"
    both = isinstance(tree, Mapping) and isinstance(numbers, Mapping)
    if both and "params" in tree and "params" not in numbers:
        misfit += (
            ". Give the optimizer the parameters alone, variables['params'], or wrap the "
            "tree of numbers: {'params': numbers}"
        )
    elif both and type(tree) is not dict and type(numbers) is dict:
        misfit += f". Give both as dictionaries, not as {type(tree).__name__}"
    of_leaves = broadcast_prefix(numbers, tree, misfit, is_resolvable)
    return jax.tree.map_with_path(lambda path, x, n: fn(path, n, x), tree, of_leaves)


def explicit_axes(path: Any, leaf: jax.Array, numbers: DimensionNumbers) -> MatrixAxes:
    """The axes that ``numbers`` name for one leaf, if they fit it."""
    shape, rank = np.shape(leaf), np.ndim(leaf)
    rows, columns = map(as_tuple, (numbers.reduction_axis, numbers.output_axis))
    used = rows + columns
    blocks = numbers if isinstance(numbers, BlockDimensionNumbers) else None
    misfit = ""
    length = shape[blocks.block_axis % rank] if blocks and rank else 0
    if not rows or not columns:
        misfit = "reduction_axis and output_axis must each name at least one axis"
    elif not all(jnp.issubdtype(type(axis), jnp.integer) for axis in used):
        misfit = "axes must be integers"
    elif not all(-rank <= axis < rank for axis in used):
        misfit = f"the leaf has {rank} {'axis' if rank == 1 else 'axes'}"
    elif len({axis % rank for axis in used}) < len(used):
        misfit = "an axis is named twice"
    elif blocks and all(blocks.block_axis - a % rank not in (0, -rank) for a in used):
        misfit = "block_axis must be one of the axes of the rows or the columns"
    elif blocks and sum(blocks.sizes(length)) != length:
        axis = blocks.block_axis
        misfit = f"the blocks do not add up to {length}, the length of axis {axis}"
    elif blocks and blocks.stride and blocks.sizes(length)[0] % blocks.stride:
        misfit = f"the stride does not divide blocks of {blocks.sizes(length)[0]}"
    if misfit:
        raise ValueError(
            f"{numbers} does not fit parameter {name_and_shape(path, leaf)}: {misfit}. "
            "Correct it in weight_dimension_numbers, or put None there for AdamW "
            '("adamw" in by_path).'
        )
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        remedy = "Put None for it in weight_dimension_numbers: AdamW then trains it."
        if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            remedy = "Nothing trains it: keep it out of the parameters."
        raise UndecidedError(
            f"parameter {name_and_shape(path, leaf)} has dtype {leaf.dtype}, and only "
            f"real floating-point matrices can be orthogonalized. {remedy}",
            [path],
            of_dtype=True,
        )
    rows, columns = (tuple(int(a) % rank for a in axes) for axes in (rows, columns))
    batch = tuple(a for a in range(rank) if a not in rows + columns)
    if not blocks:
        return MatrixAxes(batch, rows, columns)
    axis = int(blocks.block_axis) % rank
    sizes, stride = blocks.sizes(shape[axis]), int(blocks.stride or 0)
    return MatrixAxes(batch, rows, columns, axis, sizes, stride)


def as_tuple(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, Iterable) else (axes,)


def as_axis(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    """Axes in the form of MuonDimensionNumbers: a single one is an integer."""
    return axes[0] if len(axes) == 1 else axes


def default_numbers(tree: PyTree, decided: Collection[Any] = ()) -> PyTree:
    """The numbers of bare parameters by rank and name, None if ``decided`` elsewhere."""
    leaves = leaves_and_masks(tree)
    kind_of = kinds(path for path, _ in leaves)
    named = {  # Not those that their rank, or a rule, decides on.
        names_on(path): kind_of[names_on(path)] in NO_MATRIX
        for path, leaf in leaves
        if np.ndim(leaf) > 1 and names_on(path) not in decided
    }

    def adamw(path: Any) -> bool:
        return named.get(names_on(path), True)

    ambiguous = [(p, x) for p, x in leaves if np.ndim(x) > 2 and not adamw(p)]
    if ambiguous:
        paths = [path for path, _ in ambiguous]
        lines = [(dotted(path), of_shape(leaf)) for path, leaf in ambiguous]
        raise UndecidedError(
            f"{listed(lines)} ambiguous: more than two axes may be a stack of matrices, "
            "a convolution or a projection with heads. Pass weight_dimension_numbers "
            "with optax.contrib.MuonDimensionNumbers(reduction_axis=..., "
            "output_axis=...) there, or None for AdamW; orscale_jax.by_path makes them "
            f"from rules on paths.{_function_of_modules(tree, paths)}",
            paths,
        )
    note_decisions({path: NAME if told else SHAPE for path, told in named.items()})
    return jax.tree.map_with_path(lambda p, _: None if adamw(p) else PLAIN, tree)


def _function_of_modules(tree: PyTree, paths: list[Any]) -> str:
    """The function that reads the axes off the modules of Equinox or Flax, if any."""
    equinox = sys.modules.get("equinox")
    if equinox is not None and nodes_of(tree, equinox.Module):
        return (
            " orscale_jax.equinox.dimension_numbers(model) takes all of this from the "
            "types of Equinox's modules, also of an ensemble that eqx.filter_vmap made."
        )
    if all(keys_on(path)[-1:] != ("kernel",) for path in paths):
        return ""
    names = {name for path in paths for name in names_on(path)}
    # A list has entries in NNX; modules without names, such as Dense_0, are Linen's.
    linen = any(name == "params" or re.fullmatch(r"[A-Z]\w*_\d+", name) for name in names)
    nnx = any(map(str.isdigit, names))
    functions = []
    if linen or not nnx:
        functions.append("orscale_jax.flax.linen_dimension_numbers(module, *inputs)")
    if nnx or not linen:
        functions.append("orscale_jax.flax.nnx_dimension_numbers(model)")
    return (
        f" If the model is Flax's, {' or '.join(functions)} takes all of this from the "
        "types of its modules."
    )
