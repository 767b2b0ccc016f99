"""The abstract state of an optimizer: what it keeps for each parameter, and who does."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orscale_jax import _checks
from orscale_jax.audit.state_trees import (
    OTHER,
    RULES,
    STATELESS,
    Rule,
    StateTree,
    batch_shapes,
    groups_of,
    state_trees,
)
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import is_axes_leaf
from orscale_jax.parameters.rate_multipliers import resolved
from orscale_jax.sharding.param_shardings import ParamSpecs, initialized
from orscale_jax.sharding.state_shardings import state_shardings
from orscale_jax.transforms.matrices import ADAMW, MATRIX
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import name_and_shape, quoted
from orscale_jax.trees.nodes import is_masked


class Kept(NamedTuple):
    """What an optimizer keeps for one parameter.

    Attributes:
      rule: Which optimizer has the parameter; see :class:`ParameterRow`.
      label: Its label in :func:`optax.partition`; empty without one.
      arrays: The abstract arrays of the state that belong to it.
      batch_shape: The batch shape of its matrices; None if it has none.
    """

    rule: Rule
    label: str
    arrays: list[Any]
    batch_shape: tuple[int, ...] | None


class AbstractState(NamedTuple):
    """The state that an optimizer would have.

    Attributes:
      kept: What it keeps for each parameter, by path.
      shared: The arrays that belong to no parameter.
      multipliers: The smallest and the largest multiplier of the learning rate, of each
        parameter for which they are known.
      specs: What it knows of the shardings of the parameters, for each of its parts.
    """

    kept: Mapping[Any, Kept]
    shared: list[Any]
    multipliers: Mapping[Any, tuple[float, float]]
    specs: list[ParamSpecs]

    @classmethod
    def of(cls, optimizer: Any, params: PyTree) -> "AbstractState":
        """Trace an optimizer's ``init``, and find the trees like the parameters in it.

        optax.tree.map_params would find them, too, but calls ``init`` with a placeholder
        that most label functions of :func:`optax.partition` cannot read.
        """
        if not callable(getattr(optimizer, "init", None)):
            _checks.refuse("optimizer", optimizer, "pass an Optax optimizer, or None")
        with resolved.open() as noted, initialized.open() as specs:
            # A new function, so that it is traced.
            state = jax.eval_shape(lambda params: optimizer.init(params), params)
        state, bare = unbox(state), unbox(params)
        trees = list(state_trees(state, bare))
        of_matrices = batch_shapes(state, bare)
        groups, without_state = groups_of(state, trees)
        kept = {}
        for path in leaves_by_path(bare):
            own = [tree for tree in trees if path in tree.arrays]
            labels = {tree.label: None for tree in own if tree.label in groups}
            kept[path] = Kept(
                max((tree.rule for tree in own), key=RULES.index, default=STATELESS),
                " and ".join(labels) or without_state,
                [array for tree in own for array in tree.arrays[path]],
                of_matrices.get(path),
            )
        _refuse_vectors(trees, leaves_by_path(bare), kept)
        shared = [array for tree in trees for array in tree.arrays.get(None, [])]
        return cls(kept, shared, _multipliers(noted), specs)

    def only_ours(self, params: PyTree) -> PyTree:
        """The parameters without boxes, masked where another optimizer has them."""
        return jax.tree.map_with_path(
            lambda path, leaf: (
                leaf if self.kept[path].rule in (MATRIX, ADAMW) else optax.MaskedNode()
            ),
            unbox(params),
        )

    def only_matrices(
        self, axes_of: Mapping[Any, MatrixAxes], leaf_of: Mapping[Any, Any]
    ) -> dict[Any, MatrixAxes]:
        """The axes of the optimizer's matrices, out of those that dimension numbers name.

        Raises:
          ValueError: If an optimizer of this library has other matrices.
        """
        for path, kept in self.kept.items():
            axes, theirs = axes_of.get(path), kept.batch_shape
            ours = None if axes is None else axes.batch_shape(leaf_of[path])
            if kept.rule in (MATRIX, ADAMW) and theirs != ours:
                raise ValueError(
                    f"parameter {quoted(path)} is {_rule(ours, theirs)} here and "
                    f"{_rule(theirs, ours)} in the optimizer: pass describe() the "
                    "weight_dimension_numbers that the optimizer was built with."
                )
        return {
            path: axes for path, axes in axes_of.items() if self.kept[path].rule == MATRIX
        }


def _multipliers(noted: Iterable[PyTree]) -> dict[Any, tuple[float, float]]:
    pairs = (pair for tree in noted for pair in leaves_by_path(tree).items())
    known = {
        path: np.asarray(jax.device_get(value))
        for path, value in pairs
        if not isinstance(value, jax.core.Tracer)
    }
    return {path: (float(x.min()), float(x.max())) for path, x in known.items()}


def _rule(batch_shape: Any, other: Any) -> str:
    """A rule as the message calls it; batch shapes only where both are matrices."""
    if batch_shape is None:
        return ADAMW
    return MATRIX if other is None else f"matrices of batch shape {batch_shape}"


def _refuse_vectors(
    trees: Sequence[StateTree], leaf_of: Mapping[Any, Any], kept: Mapping[Any, Kept]
) -> None:
    """Refuse a state of vectors that hold several parameters, as optax.flatten makes."""
    without = [path for path, found in kept.items() if found.rule == STATELESS]
    smallest = min(
        (math.prod(leaf_of[path].shape) for path in without if path), default=0
    )
    stateful = {x.scope for x in trees if None not in x.arrays and x.rule != STATELESS}
    for tree in trees:
        known = tree.rule == OTHER and (not without or tree.scope in stateful)
        arrays = [] if known or tree.rule == MATRIX else tree.arrays.get(None, [])
        for array in arrays:
            floating = array.ndim and jnp.issubdtype(array.dtype, jnp.floating)
            if floating and math.prod(array.shape) >= smallest:
                path = next(iter(without or leaf_of))
                raise ValueError(
                    f"the optimizer keeps an array of shape {array.shape} for no single "
                    "parameter, and nothing for parameter "
                    f"{name_and_shape(path, leaf_of[path])}. optax.flatten does that: it "
                    "makes one vector of all parameters, which has no matrices, so that "
                    "orscale trains all of them by AdamW. Take it away, or call "
                    "describe() without optimizer=."
                )


def leaves_by_path(tree: PyTree) -> dict[Any, Any]:
    """The leaves that are not masked, by path."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_axes_leaf)
    return {path: leaf for path, leaf in leaves if not is_masked(leaf)}


def nbytes(arrays: Iterable[Any]) -> int:
    """The bytes of arrays, which may be abstract."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def nbytes_per_device(optimizer: Any, params: PyTree) -> int | None:
    """The bytes of an optimizer's state on each device, by :func:`state_shardings`.

    None where that does not tell: parameters are on several meshes, axes do not divide
    what they shard, or JAX cannot propagate shardings through the optimizer's ``init``.
    """
    try:
        shardings = jax.tree.leaves(state_shardings(optimizer, params))
        state = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
        return nbytes(
            jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)
            for array, sharding in zip(state, shardings, strict=True)
        )
    except Exception:  # An audit shows what it can, whatever a foreign init raises.
        return None
