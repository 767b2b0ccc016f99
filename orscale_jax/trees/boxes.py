"""Boxes of parameters in the trees of other libraries, and what of a model is trained.

A box is the node in which Flax or Haliax keeps a parameter with its annotations:
``flax.nnx.Variable``, ``flax.linen.Partitioned`` and ``haliax.NamedArray`` hold one array
each and name or shard its axes. An array with one entry per matrix must not inherit these
names: its own box names the batch axes only. Besides the modules for these libraries,
only this one looks into boxes, which exist only where their library is imported.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from orscale_jax.trees.names import by_name, names_on

PyTree: TypeAlias = Any

# Where Flax's variables keep the names of their axes, in all versions.
_NNX_NAMES = ("out_sharding", "optimizer_sharding", "sharding", "sharding_names")


def is_box(node: Any, is_leaf: Callable[[Any], bool] | None = None) -> bool:
    """Whether a node is a box of one leaf, or of a node that stands for one."""
    boxes = (
        _type("flax.nnx", "Variable"),
        _type("flax.core.meta", "AxisMetadata"),
        _type("haliax", "NamedArray"),
    )
    if not isinstance(node, boxes):
        return False
    contents = _contents(node)
    if len(contents) != 1 or contents[0] is node:  # A variable that JAX keeps as a leaf.
        return False
    known = is_box(contents[0], is_leaf) or bool(is_leaf and is_leaf(contents[0]))
    return known or not _contents(contents[0]) or jax.tree_util.all_leaves(contents)


def unbox(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> PyTree:
    """The tree with leaves instead of their boxes."""

    def content(node: Any) -> Any:
        if is_box(node, is_leaf):
            return content(_contents(node)[0])
        return node[...] if isinstance(node, jax.Ref) else node

    return jax.tree.map(
        content,
        tree,
        is_leaf=lambda node: is_box(node, is_leaf) or bool(is_leaf and is_leaf(node)),
    )


def trained(params: PyTree, optimizer: Any = None) -> PyTree:
    """The trained part of a model of Flax NNX or Equinox; other trees as they are.

    For NNX: the variables that the ``flax.nnx.Optimizer`` trains. Without such an
    optimizer: all ``nnx.Param``, with masks for other and for repeated variables. For
    Equinox: the arrays of floats, with None for everything else.
    """
    if isinstance(params, _type("flax.nnx", "Pytree")):
        nnx = sys.modules["flax.nnx"]

        def is_variable(node: Any) -> bool:
            return isinstance(node, nnx.Variable)

        variables = (x for _, x in nnx.iter_graph(params) if is_variable(x))
        if any(getattr(x, "hijax", False) for x in variables):  # JAX maps over no box.
            params = nnx.with_vars(params, hijax=False, allow_duplicates=True)
        state = nnx.state(params, getattr(optimizer, "wrt", nnx.Param))
        if hasattr(optimizer, "wrt"):
            return state
        if known := by_name(state, is_variable):
            return jax.tree.map_with_path(
                lambda path, x: x if names_on(path) in known else optax.MaskedNode(),
                params,
                is_leaf=is_variable,
            )
    if isinstance(params, _type("equinox", "Module")):

        def kept(leaf: Any) -> Any:
            dtype = getattr(leaf, "dtype", bool)
            return leaf if jnp.issubdtype(dtype, jnp.inexact) else None

        return jax.tree.map(kept, params)
    return params


def rebox(tree: PyTree, like: PyTree) -> PyTree:
    """The inverse of :func:`unbox`: the leaves of a tree in the boxes of another."""

    def box(node: Any, leaf: Any) -> Any:
        if not is_box(node):
            return leaf
        inner = box(_contents(node)[0], leaf)
        return jax.tree.map(lambda _: inner, node, is_leaf=lambda x: x is not node)

    return jax.tree.map(box, like, tree, is_leaf=is_box)


def box_like(
    array: jax.Array, node: Any, pick: Callable[[Sequence[Any]], Iterable[Any]]
) -> Any:
    """An array in a box like a parameter's; ``pick`` maps names to those of its axes."""
    if not is_box(node):
        return array

    def of_axes(names: Any) -> tuple[Any, ...]:
        missing = unbox(node).ndim - len(names)
        return tuple(pick([*names, *[None] * missing]))

    def in_its_form(names: Any) -> Any:
        if isinstance(names, NamedSharding):
            return NamedSharding(names.mesh, PartitionSpec(*of_axes(names.spec)))
        if isinstance(names, PartitionSpec):
            return PartitionSpec(*of_axes(names))
        return of_axes(names) if isinstance(names, tuple | list) else None

    if isinstance(node, _type("haliax", "NamedArray")):
        axes = of_axes(node.axes)
        if None in axes:
            return array
        sized = (a.resize(size) for a, size in zip(axes, array.shape, strict=True))
        return type(node)(array, tuple(sized))
    if isinstance(node, _type("flax.nnx", "Variable")):
        metadata = {key: node.get_metadata(key, None) for key in _NNX_NAMES}
        changed = {key: in_its_form(names) for key, names in metadata.items() if names}
        return node.replace(array, **changed)
    if getattr(node, "names", None) is None:
        return array
    return node.replace(value=array, names=of_axes(node.names))


def annotated_spec(box: Any) -> PartitionSpec | None:
    """The spec of a box, if any; logical names are translated by the rules in effect."""
    if isinstance(box, _type("haliax", "NamedArray")):
        partitioning = sys.modules["haliax.partitioning"]
        mapping = partitioning.current_thread_local_mapping()
        return partitioning.pspec_for_axis(box.axes, mapping) if mapping else None
    if isinstance(box, _type("flax.nnx", "Variable")):
        named = [box.get_metadata(key, None) for key in _NNX_NAMES]
        first = next(filter(None, named), None)
        if first is None:
            return None
        sharding = getattr(first, "sharding", first)  # A jax.experimental.layout.Format.
        if isinstance(sharding, NamedSharding):
            return sharding.spec
        return sys.modules["flax.nnx"].spmd.get_var_pspec(box)
    if isinstance(box, _type("flax.linen", "LogicallyPartitioned")):
        linen = sys.modules["flax.linen"]
        rules = box.rules or linen.get_logical_axis_rules()
        return linen.logical_to_mesh_axes(box.names, rules) if rules else None
    get: Callable[[], PartitionSpec] | None = getattr(box, "get_partition_spec", None)
    return get() if get else None


def _type(module: str, name: str) -> Any:
    """A type, or ``()``, of which nothing is, where its module is not imported."""
    return getattr(sys.modules.get(module), name, ())


def _contents(box: Any) -> list[Any]:
    """The children of a box, as JAX flattens it: nothing is converted on the way."""
    return jax.tree.leaves(box, is_leaf=lambda node: node is not box)
