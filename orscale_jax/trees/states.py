"""The arrays of an optimizer's state, and the parameters to which they belong."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.differences import children, first_difference
from orscale_jax.trees.names import Path, names_on

# Fields of Optax's wrappers that hold states, and fields that hold no parameters.
_STATES = frozenset({"inner_state", "inner_states", "inner_opt_state"})
_NO_PARAMS = frozenset(
    {"count", "gradient_step", "mini_step", "bounds", "hyperparams", "hyperparams_states"}
)

# What a restored tree has where the state had a tuple or a named tuple.
_UNTYPED = (dict, list, type(None))


class Entry(NamedTuple):
    """An array of a state.

    Attributes:
      place: The names down to its field, such as ``("0", "mu")``.
      owner: The path of the parameter that it belongs to; None for counts and the like.
      array: The array.
    """

    place: Path
    owner: Path | None
    array: Any

    @property
    def field(self) -> str:
        """The last name of the place."""
        return self.place[-1] if self.place else ""

    @property
    def name(self) -> str:
        """The parameter's name, in quotes."""
        return repr(".".join(self.owner or ()))


def entries(state: PyTree, params: PyTree, fields: Collection[str] = ()) -> list[Entry]:
    """The arrays of a state, in the order of its leaves.

    Parameters may be called ``mu`` or ``count``, too. So what holds a tree of parameters
    is told by the types in the state: a field of a named tuple that is not itself a
    state.

    Args:
      state: A state, without boxes; it may be a restored tree of dictionaries and lists.
      params: The parameters, without boxes.
      fields: Names of fields that hold parameters, for states without types.
    """
    names = {names_on(path) for path, _ in jax.tree.leaves_with_path(params)}
    types = _types_in(params)

    def below(node: Any, parent: Any, place: Path) -> Iterator[Entry]:
        arrays = [
            (names_on(path), array) for path, array in jax.tree.leaves_with_path(node)
        ]
        if place and place[-1] in _NO_PARAMS:
            yield from (Entry(place + path, None, array) for path, array in arrays)
        elif _holds_params(node, parent, place, types, fields) and names.intersection(
            dict(arrays)
        ):
            for path, array in arrays:
                at, owner = (place, path) if path in names else (place + path, None)
                yield Entry(at, owner, array)
        elif jax.tree_util.all_leaves([node]):
            yield Entry(place, None, node)
        else:
            for key, child in children(node).items():
                yield from below(child, node, (*place, key))

    return list(below(state, None, ()))


def _holds_params(
    node: Any,
    parent: Any,
    place: Path,
    types: Collection[type],
    fields: Collection[str] = (),
) -> bool:
    """Whether a node is a field of a state, or named like one, but not a state itself."""

    def is_state(node: Any) -> bool:
        return hasattr(node, "_fields") and type(node) not in types

    if node is None or not place or place[-1] in _STATES or is_state(node):
        return False
    return is_state(parent) or place[-1] in fields


def _types_in(tree: PyTree) -> set[type]:
    below = [_types_in(child) for child in children(tree).values()]
    return {type(tree)}.union(*below)


def require_state(state: PyTree, wanted: PyTree, params: PyTree) -> None:
    """Refuse a state that does not have the structure and the shapes of another.

    JAX would broadcast it, or raise an error that does not name the leaf.

    Args:
      state: The state given to ``update``, without boxes.
      wanted: What ``init`` would make of these parameters; abstract arrays suffice.
      params: The parameters, without boxes.

    Raises:
      ValueError: If a leaf is missing, is surplus, or has another shape or kind of dtype.
    """
    structures: list[Any] = [jax.tree.structure(tree) for tree in (state, wanted)]
    if structures[0] != structures[1]:
        raise ValueError(f"the state does not fit: {_misfit(state, wanted, params)}.")
    arrays = jax.tree.leaves(state)
    pairs = zip(arrays, jax.tree.leaves(wanted), strict=True)
    if all(array_type(found) == array_type(leaf) for found, leaf in pairs):
        return
    shapes = {
        names_on(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(params)
    }
    for found, entry in zip(arrays, entries(wanted, params), strict=True):
        if array_type(found) == array_type(entry.array):
            continue
        of = "" if entry.owner is None else f" of parameter {entry.name}"
        where = "" if entry.owner is None else f" for a shape of {shapes[entry.owner]}"
        raise ValueError(
            f"the state does not fit the parameters: {entry.field}{of} has shape "
            f"{np.shape(found)} and dtype {jnp.result_type(found)} instead of "
            f"{np.shape(entry.array)} and {jnp.result_type(entry.array)}{where}. Pass "
            "the state of these parameters and dimension numbers, or start anew with "
            "optimizer.init(params)."
        )


def array_type(leaf: Any) -> tuple[Any, ...]:
    """The shape and the kind: other floats, such as those of ``mu_dtype``, are cast."""
    dtype = jnp.result_type(leaf)
    kinds = jnp.floating, jnp.complexfloating
    return np.shape(leaf), *(jnp.issubdtype(dtype, kind) for kind in kinds)


def _misfit(state: PyTree, wanted: PyTree, params: PyTree) -> str:
    """Where the structure of a state differs, and what to do."""
    difference = first_difference(wanted, state)
    if difference is None:
        return "its nodes have other static fields than those of optimizer.init(params)"
    words = difference.in_words("optimizer.init(params)", "the state")
    of_params = _is_in_params(difference.path, wanted, _types_in(params))
    if of_params and difference.wanted is None:
        return f"{words}. Pass a gradient for this parameter, as init was given it"
    if isinstance(difference.wanted, tuple) and type(difference.found) in _UNTYPED:
        remedy = (
            "If it was restored without a target, restore it into the structure of "
            "optimizer.init(params), such as with flax.serialization.from_state_dict"
        )
    elif of_params:
        remedy = (
            "Pass the state of these parameters. If some of them or their dimension "
            "numbers have changed, orscale_jax.convert_state(state, optimizer, params) "
            "keeps what still fits (for new ones, with allow_new=True)"
        )
    else:
        remedy = (
            "If it is another optimizer's, pass the result of "
            "orscale_jax.convert_state(state, optimizer, params)"
        )
    return f"{words}. {remedy}"


def _is_in_params(path: Path, state: PyTree, types: Collection[type]) -> bool:
    """Whether a path of a state ends in one of its trees of parameters."""
    node = state
    for depth, key in enumerate(path, start=1):
        parent, node = node, children(node)[key]
        if _holds_params(node, parent, path[:depth], types):
            return True
    return False
