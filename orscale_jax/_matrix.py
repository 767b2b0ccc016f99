"""Which leaves of a parameter tree are matrices, and along which axes.

This is the only module that resolves axes. Everything else handles
:class:`MatrixAxes`: a leaf of any rank is a batch of ``(m, n)`` matrices whose rows
and columns may each span several axes.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

PyTree: TypeAlias = Any
WeightDimensionNumbers: TypeAlias = (
    MuonDimensionNumbers | PyTree | Callable[[PyTree], PyTree] | None
)

# A word of a snake_case or CamelCase name: "lm_head" and "LMHead_0" both end in "head".
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_EMBEDDING_WORDS = frozenset({"wte", "wpe"})
_HEAD_WORDS = frozenset({"head", "logits", "classifier"})


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """The axes of a leaf that is a batch of matrices.

    Attributes:
      batch: Axes that count matrices (layers, experts, ...), in the leaf's order.
      rows: Axes that make up the ``m`` rows (the reduction axes of ``x @ W``).
      columns: Axes that make up the ``n`` columns (the output axes).
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def matrix(self) -> tuple[int, ...]:
        """The axes of one matrix, over which norms are taken."""
        return tuple(sorted(self.rows + self.columns))

    def batch_shape(self, leaf: jax.Array) -> tuple[int, ...]:
        """One entry per matrix: ``()`` for a plain matrix."""
        return tuple(leaf.shape[axis] for axis in self.batch)

    def matrix_shape(self, leaf: jax.Array) -> tuple[int, int]:
        """``(m, n)``."""
        rows, columns = (
            math.prod(leaf.shape[axis] for axis in axes)
            for axes in (self.rows, self.columns)
        )
        return rows, columns

    def to_matrices(self, leaf: jax.Array) -> jax.Array:
        """The leaf as ``(*batch, m, n)``. Batch axes are kept apart, never merged."""
        ordered = leaf.transpose(self.batch + self.rows + self.columns)
        return ordered.reshape(self.batch_shape(leaf) + self.matrix_shape(leaf))

    def from_matrices(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse of :meth:`to_matrices` for a leaf of the shape of ``like``."""
        order = self.batch + self.rows + self.columns
        ordered = matrices.reshape(tuple(like.shape[axis] for axis in order))
        return ordered.transpose(sorted(range(like.ndim), key=order.__getitem__))

    def norms(self, leaf: jax.Array) -> jax.Array:
        """Frobenius norm of every matrix, of the batch shape, in the leaf's dtype."""
        return jnp.sqrt(jnp.sum(jnp.square(leaf), axis=self.matrix))

    def per_matrix(self, scalars: jax.Array) -> jax.Array:
        """Scalars of the batch shape, shaped to broadcast against the leaf."""
        return jnp.expand_dims(scalars, self.matrix)


def matrix_axes(weight_dimension_numbers: WeightDimensionNumbers, tree: PyTree) -> PyTree:
    """Resolve dimension numbers against a tree of parameters (or updates).

    Args:
      weight_dimension_numbers: ``None`` for the default rule; a tree of
        :class:`optax.contrib.MuonDimensionNumbers` that is a prefix of ``tree``, with
        ``None`` where a leaf is not a matrix; or a callable from ``tree`` to such a
        tree. Already resolved trees are accepted.
      tree: Arrays, abstract arrays, or any pytree of them.

    Returns:
      A tree with a :class:`MatrixAxes` at each matrix and
      :class:`optax.MaskedNode` at every other leaf, as :func:`optax.partition` leaves
      it for one of its groups.

    Raises:
      ValueError: If a leaf is ambiguous or dimension numbers do not fit their leaf.
    """
    if not jax.tree.leaves(tree):  # optax.tree.map_params passes a placeholder.
        return tree
    if callable(weight_dimension_numbers):
        weight_dimension_numbers = weight_dimension_numbers(tree)
    if weight_dimension_numbers is None:
        refuse_ambiguous(jax.tree_util.tree_leaves_with_path(tree))
        return jax.tree_util.tree_map_with_path(default_axes, tree)
    check_prefix(weight_dimension_numbers, tree)
    return jax.tree_util.tree_map_with_path(
        _resolve_subtree, weight_dimension_numbers, tree, is_leaf=is_resolvable
    )


def require_matrices(
    weight_dimension_numbers: WeightDimensionNumbers, tree: PyTree
) -> PyTree:
    """:func:`matrix_axes` for a stage that handles nothing but matrices.

    Raises:
      ValueError: As :func:`matrix_axes`, and for any leaf that is not a matrix.
    """

    def check(path: Any, axes: Any, subtree: PyTree) -> Any:
        if isinstance(axes, optax.MaskedNode) and jax.tree.leaves(subtree):
            raise ValueError(
                f"parameter {_name(path)} of shape {subtree.shape} is not a matrix, and "
                "this stage takes matrices only: route it elsewhere with "
                "optax.partition (as orscale does), or give its axes in "
                "weight_dimension_numbers."
            )
        return axes

    axes = matrix_axes(weight_dimension_numbers, tree)
    return jax.tree_util.tree_map_with_path(check, axes, tree, is_leaf=is_axes_leaf)


def require_fitting(updates: PyTree, params: PyTree) -> None:
    """Refuse gradients that broadcasting or casting would make fit their parameters.

    Raises:
      ValueError: If a gradient has another shape than its parameter, or is not real.
    """

    def check(path: Any, param: jax.Array, update: jax.Array) -> None:
        shape, dtype = np.shape(update), jnp.result_type(update)
        trainable = jnp.issubdtype(jnp.result_type(param), jnp.floating)
        real = jnp.issubdtype(dtype, jnp.floating)
        if shape != np.shape(param) or (trainable and not real):
            raise ValueError(
                f"the gradient of parameter {_name(path)} has shape {shape} and dtype "
                f"{dtype}, and the parameter has shape {np.shape(param)} and dtype "
                f"{jnp.result_type(param)}: pass a real gradient of that shape."
            )

    # Trees of different structures have an error of their own, from jax.tree.map.
    structures: list[Any] = [jax.tree.structure(tree) for tree in (updates, params)]
    if structures[0] == structures[1]:
        jax.tree_util.tree_map_with_path(check, params, updates)


def is_axes_leaf(node: Any) -> bool:
    """Whether ``node`` stands for one leaf in a tree of :func:`matrix_axes`."""
    return isinstance(node, MatrixAxes | optax.MaskedNode)


def is_resolvable(node: Any) -> bool:
    """Whether ``node`` stands for a subtree in a tree of dimension numbers."""
    return node is None or isinstance(node, MuonDimensionNumbers) or is_axes_leaf(node)


def check_prefix(
    weight_dimension_numbers: PyTree,
    tree: PyTree,
    argument: str = "weight_dimension_numbers",
) -> None:
    """Refuse what is not a tree of dimension numbers, or does not fit ``tree``."""

    def check(path: Any, numbers: Any, _: PyTree) -> None:
        if not is_resolvable(numbers):
            raise ValueError(
                f"found {numbers!r} at {_name(path)}, which is neither None nor an "
                "optax.contrib.MuonDimensionNumbers"
            )

    try:
        jax.tree_util.tree_map_with_path(
            check, weight_dimension_numbers, tree, is_leaf=is_resolvable
        )
    except ValueError as error:
        raise ValueError(
            f"{argument} must be a tree of the parameters' structure, or a prefix of it: "
            f"{error}"
        ) from error


def _resolve_subtree(prefix: Any, numbers: Any, subtree: PyTree) -> PyTree:
    def resolve(path: Any, leaf: jax.Array) -> Any:
        if numbers is None or isinstance(numbers, optax.MaskedNode):
            return optax.MaskedNode()
        if isinstance(numbers, MatrixAxes):
            return numbers
        return explicit_axes(prefix + path, leaf, numbers)

    return jax.tree_util.tree_map_with_path(resolve, subtree)


def explicit_axes(
    path: Any, leaf: jax.Array, numbers: MuonDimensionNumbers
) -> MatrixAxes:
    """The axes that ``numbers`` name for one leaf, if they fit it."""
    rows, columns = (
        (axes,) if isinstance(axes, int) else tuple(axes)
        for axes in (numbers.reduction_axis, numbers.output_axis)
    )
    used = rows + columns
    rank = np.ndim(leaf)
    misfit = None
    if not rows or not columns:
        misfit = "reduction_axis and output_axis must each name at least one axis"
    elif not all(-rank <= axis < rank for axis in used):
        misfit = f"the leaf has {rank} axes"
    elif len({axis % rank for axis in used}) < len(used):
        misfit = "an axis is named twice"
    if misfit:
        raise ValueError(
            f"{numbers} does not fit parameter {name_and_shape(path, leaf)}: {misfit}. "
            "Correct its entry in weight_dimension_numbers, or put None there for AdamW."
        )
    _check_dtype(path, leaf)
    rows, columns = (tuple(a % rank for a in axes) for axes in (rows, columns))
    batch = tuple(a for a in range(rank) if a not in rows + columns)
    return MatrixAxes(batch, rows, columns)


def default_axes(path: Any, leaf: jax.Array) -> MatrixAxes | optax.MaskedNode:
    """The default rule, for a leaf that :func:`refuse_ambiguous` lets pass."""
    if np.ndim(leaf) < 2 or any(names_embedding_or_head(key_name(key)) for key in path):
        return optax.MaskedNode()
    _check_dtype(path, leaf)
    return MatrixAxes(batch=(), rows=(0,), columns=(1,))


def refuse_ambiguous(leaves: Iterable[tuple[Any, jax.Array]]) -> None:
    """Refuse, all at once, leaves in which a matrix would be a guess."""
    found = [name_and_shape(path, leaf) for path, leaf in leaves if np.ndim(leaf) > 2]
    if found:
        raise ValueError(
            f"{listed(found)} ambiguous: more than two axes may be a stack of matrices, "
            "a convolution or a projection with heads. Pass weight_dimension_numbers "
            "with optax.contrib.MuonDimensionNumbers(reduction_axis=..., "
            "output_axis=...) there, or None for AdamW; orscale_jax.by_path gives both "
            "by path."
        )


def name_and_shape(path: Any, leaf: Any) -> str:
    """A leaf, for an error message."""
    return f"{_name(path)} of shape {np.shape(leaf)}"


def listed(parameters: list[str]) -> str:
    """The subject of an error message, with its verb: one parameter, or a list."""
    if len(parameters) == 1:
        return f"parameter {parameters[0]} is"
    return "\n  ".join([f"{len(parameters)} parameters", *parameters]) + "\nare"


def names_embedding_or_head(key: str) -> bool:
    """Whether a key of a path says that its parameter is a table or an output head."""
    words = [word.lower() for word in _WORD.findall(key)]
    return "embed" in key.lower() or bool(
        _EMBEDDING_WORDS.intersection(words) or _HEAD_WORDS.intersection(words[-1:])
    )


def _check_dtype(path: Any, leaf: jax.Array) -> None:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"parameter {name_and_shape(path, leaf)} has dtype {leaf.dtype}, and only "
            "real floating-point matrices can be orthogonalized. Put None for it in "
            "weight_dimension_numbers, or keep it out with optax.masked."
        )


def key_name(entry: Any) -> str:
    """The bare name of one path entry, whatever the container."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def dotted(path: Any) -> str:
    """A path as its readers write it, such as ``blocks.0.mlp.up.kernel``."""
    return ".".join(key_name(entry) for entry in path)


def _name(path: Any) -> str:
    return repr(dotted(path)) if path else "(the only leaf)"
