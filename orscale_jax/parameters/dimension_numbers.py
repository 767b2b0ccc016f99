"""Dimension numbers: which leaves of a tree are matrices, and along which axes.

Only this module resolves dimension numbers. Everything else handles
:class:`~orscale_jax.parameters.axes.MatrixAxes`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import _checks
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.default_rule import check_dtype, default_rule
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import name_and_shape, quoted
from orscale_jax.trees.nodes import is_function, is_masked, mask_like


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

    Raises:
      ValueError: If ``blocks`` is not a positive integer or a tuple of them, or
        ``block_axis`` is not an integer.

    Example:
      >>> from orscale_jax import BlockDimensionNumbers
      >>> # q, k and v in one kernel of shape (768, 3 · 768)
      >>> fused = BlockDimensionNumbers(0, 1, block_axis=1, blocks=3)
      >>> # 12 query heads of 64 and 4 of keys and values: (768, 768 + 256 + 256)
      >>> grouped = BlockDimensionNumbers(0, 1, block_axis=1, blocks=(768, 256, 256))
      >>> # the same weight, with a block for every head
      >>> per_head = BlockDimensionNumbers(0, 1, block_axis=1, blocks=12 + 4 + 4)
    """

    reduction_axis: int | tuple[int, ...] = 0
    output_axis: int | tuple[int, ...] = 1
    _: dataclasses.KW_ONLY
    block_axis: int
    blocks: int | tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the fields."""
        sizes = self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)
        if not sizes or not all(_checks.is_whole(size) and size > 0 for size in sizes):
            _checks.refuse("blocks", self.blocks, "pass a number, or a tuple of sizes")
        if not _checks.is_whole(self.block_axis):
            _checks.refuse("block_axis", self.block_axis, "pass one axis, an integer")


DimensionNumbers: TypeAlias = MuonDimensionNumbers | BlockDimensionNumbers
WeightDimensionNumbers: TypeAlias = (
    DimensionNumbers | PyTree | Callable[[PyTree], PyTree] | None
)


def matrix_axes(weight_dimension_numbers: WeightDimensionNumbers, tree: PyTree) -> PyTree:
    """Resolve dimension numbers against a tree of parameters (or updates).

    Args:
      weight_dimension_numbers: ``None`` for the default rule; a tree of
        :class:`optax.contrib.MuonDimensionNumbers` or :class:`BlockDimensionNumbers`
        that is a prefix of ``tree``, with ``None`` where a leaf is not a matrix; or a
        callable from ``tree`` to such a tree. Already resolved trees are accepted.
        Numbers below a masked node of ``tree`` are ignored.
      tree: Arrays, abstract arrays, or any pytree of them, in boxes or not.

    Returns:
      A tree without boxes, with :class:`MatrixAxes` for each leaf of matrices and
      :class:`optax.MaskedNode` for every other leaf, as in the groups of
      :func:`optax.partition`.

    Raises:
      ValueError: If a leaf is ambiguous or dimension numbers do not fit their leaf.
    """
    if not jax.tree.leaves(tree):  # optax.tree.map_params passes a placeholder.
        return tree
    tree = unbox(tree)
    if is_function(weight_dimension_numbers, is_resolvable):
        weight_dimension_numbers = weight_dimension_numbers(tree)
    weight_dimension_numbers = unbox(weight_dimension_numbers, is_resolvable)
    if weight_dimension_numbers is None:
        return jax.tree.map_with_path(default_rule(tree), tree)
    weight_dimension_numbers = mask_like(weight_dimension_numbers, tree, is_resolvable)
    check_prefix(weight_dimension_numbers, tree)
    return jax.tree.map_with_path(
        _resolve_subtree, weight_dimension_numbers, tree, is_leaf=is_resolvable
    )


def require_matrices(
    weight_dimension_numbers: WeightDimensionNumbers, tree: PyTree
) -> PyTree:
    """:func:`matrix_axes` for a stage that handles nothing but matrices.

    Raises:
      ValueError: If a leaf is not a matrix, and in the cases of :func:`matrix_axes`.
    """

    def check(path: Any, axes: Any, subtree: PyTree) -> Any:
        if is_masked(axes) and jax.tree.leaves(subtree):
            raise ValueError(
                f"parameter {name_and_shape(path, subtree)} is not a matrix, but "
                "this stage takes matrices only: route it elsewhere with "
                "optax.partition (as orscale does), or give its axes in "
                "weight_dimension_numbers."
            )
        return axes

    axes = matrix_axes(weight_dimension_numbers, tree)
    bare = unbox(tree)
    return jax.tree.map_with_path(check, axes, bare, is_leaf=is_axes_leaf)


def is_axes_leaf(node: Any) -> bool:
    """Whether ``node`` stands for one leaf in a tree of :func:`matrix_axes`."""
    return isinstance(node, MatrixAxes | optax.MaskedNode)


def is_resolvable(node: Any) -> bool:
    """Whether ``node`` stands for a subtree in a tree of dimension numbers."""
    return node is None or isinstance(node, DimensionNumbers) or is_axes_leaf(node)


def check_prefix(
    weight_dimension_numbers: PyTree,
    tree: PyTree,
    argument: str = "weight_dimension_numbers",
) -> None:
    """Refuse what is not a tree of dimension numbers, or does not fit ``tree``."""

    def check(path: Any, numbers: Any) -> object:
        if not is_resolvable(numbers):
            raise ValueError(
                f"found {numbers!r} at {quoted(path)}, which is neither None nor an "
                "optax.contrib.MuonDimensionNumbers or an "
                "orscale_jax.BlockDimensionNumbers"
            )
        return object()  # At any mismatch, JAX's error would blame None or a tuple.

    try:
        numbers = weight_dimension_numbers
        leaves = jax.tree.map_with_path(check, numbers, is_leaf=is_resolvable)
        jax.tree.map(lambda *_: None, leaves, tree)
    except ValueError as error:
        raise ValueError(
            f"{argument} must be a tree of the parameters' structure, or a prefix of it: "
            f"{error}"
        ) from error


def refuse_step_count(tree: PyTree, argument: str = "weight_dimension_numbers") -> None:
    """Refuse a step count: optax.inject_hyperparams takes functions for schedules."""
    integer = isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jnp.integer)
    if integer and tree.ndim == 0:
        raise ValueError(
            f"{argument} was called with a step count, as a schedule is: pass "
            f'static_args="{argument}" to optax.inject_hyperparams.'
        )


def _resolve_subtree(prefix: Any, numbers: Any, subtree: PyTree) -> PyTree:
    def resolve(path: Any, leaf: jax.Array) -> Any:
        if numbers is None or is_masked(numbers):
            return optax.MaskedNode()
        if isinstance(numbers, MatrixAxes):
            return numbers
        return explicit_axes(prefix + path, leaf, numbers)

    return jax.tree.map_with_path(resolve, subtree)


def explicit_axes(path: Any, leaf: jax.Array, numbers: DimensionNumbers) -> MatrixAxes:
    """The axes that ``numbers`` name for one leaf, if they fit it."""
    rank = np.ndim(leaf)
    rows, columns = (
        tuple(axes) if isinstance(axes, Iterable) else (axes,)
        for axes in (numbers.reduction_axis, numbers.output_axis)
    )
    misfit = _misfit(rows, columns, rank)
    if not misfit and isinstance(numbers, BlockDimensionNumbers):
        misfit = _misfit_of_blocks(numbers, rows + columns, np.shape(leaf))
    if misfit:
        raise ValueError(
            f"{numbers} does not fit parameter {name_and_shape(path, leaf)}: {misfit}. "
            "Correct its entry in weight_dimension_numbers, or put None there for AdamW."
        )
    check_dtype(path, leaf)
    rows, columns = (tuple(int(a) % rank for a in axes) for axes in (rows, columns))
    batch = tuple(a for a in range(rank) if a not in rows + columns)
    if not isinstance(numbers, BlockDimensionNumbers):
        return MatrixAxes(batch, rows, columns)
    axis = int(numbers.block_axis) % rank
    sizes = block_sizes(numbers.blocks, leaf.shape[axis])
    return MatrixAxes(batch, rows, columns, axis, sizes)


def _misfit(rows: tuple[int, ...], columns: tuple[int, ...], rank: int) -> str | None:
    used = rows + columns
    if not rows or not columns:
        return "reduction_axis and output_axis must each name at least one axis"
    if not all(jnp.issubdtype(type(axis), jnp.integer) for axis in used):
        return "axes must be integers"
    if not all(-rank <= axis < rank for axis in used):
        return f"the leaf has {rank} axes"
    if len({axis % rank for axis in used}) < len(used):
        return "an axis is named twice"
    return None


def _misfit_of_blocks(
    numbers: BlockDimensionNumbers, used: tuple[int, ...], shape: tuple[int, ...]
) -> str | None:
    axis, rank = numbers.block_axis, len(shape)
    if not -rank <= axis < rank or axis % rank not in {a % rank for a in used}:
        return "block_axis must be one of the axes of the rows or the columns"
    if sum(block_sizes(numbers.blocks, shape[axis])) != shape[axis]:
        return f"the blocks do not add up to {shape[axis]}, the length of axis {axis}"
    return None


def block_sizes(blocks: int | tuple[int, ...], length: int) -> tuple[int, ...]:
    """The sizes of blocks along an axis, given them or their number."""
    if isinstance(blocks, tuple):
        return tuple(map(int, blocks))
    return (length // blocks,) * int(blocks)
