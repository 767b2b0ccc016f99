"""Checks of the arguments of ``update``; the arrays of a state, and their parameters."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import Path, by_name, quoted
from orscale_jax.trees.nodes import children, is_absent

# Fields of Optax's wrappers that hold states, and fields that hold no parameters.
_STATES = frozenset({"inner_state", "inner_states", "inner_opt_state"})
_NO_PARAMS = frozenset(
    {"count", "gradient_step", "mini_step", "hyperparams", "hyperparams_states"}
)


class StateArray(NamedTuple):
    """An array of a state."""

    place: Path  # The names down to its field, such as ("0", "mu").
    owner: Path | None  # The parameter that it belongs to; None for counts and the like.
    array: Any

    @property
    def field(self) -> str:
        return self.place[-1] if self.place else ""

    @property
    def name(self) -> str:
        """The parameter's name, in quotes."""
        return repr(".".join(self.owner or ()))


def require_params(params: PyTree | None) -> None:
    if params is None:
        raise ValueError(
            "You are using a transformation that requires the current value of "
            "parameters, but you are not passing `params` when calling `update`: call "
            "optimizer.update(updates, state, params)."
        )


def require_arrays(params: PyTree) -> None:
    """Refuse leaves that nobody trains: functions and strings in a model."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)):
            raise ValueError(
                f"parameter {quoted(path)} is of type {type(leaf).__name__}: pass "
                "arrays, or abstract ones, such as jax.ShapeDtypeStruct. Of a model with "
                "other leaves, pass the arrays alone, as by eqx.filter(model, "
                "eqx.is_inexact_array)."
            )


def require_fitting(updates: PyTree, params: PyTree) -> None:
    """Refuse gradients that would be broadcast or cast to fit their parameters."""

    def check(path: Any, param: Any, update: Any) -> None:
        _require_shape("gradient", path, update, param)
        param_dtype, dtype = (
            getattr(x, "dtype", None) or jnp.result_type(x) for x in (param, update)
        )
        unfit = dtype == jax.dtypes.float0
        # Such as a generator's key.
        unfit |= not jnp.issubdtype(param_dtype, jnp.inexact)
        if jnp.issubdtype(param_dtype, jnp.floating):
            real = jnp.issubdtype(dtype, jnp.floating)
            try:
                both = jnp.promote_types(dtype, param_dtype)
                unfit |= not real or jnp.finfo(both).bits < 16
            except ValueError:  # JAX has no dtype for both, such as for 8 bits and 16.
                unfit = True
        if unfit:
            raise ValueError(
                f"the gradient of parameter {quoted(path)} has dtype {dtype}, but the "
                f"parameter has dtype {param_dtype}: pass a real gradient, of a dtype "
                "that JAX promotes to the parameter's, and floating-point parameters of "
                "at least 16 bits. Keep others out of the parameters that the loss is "
                "differentiated by and that the optimizer is given."
            )

    structures: list[Any] = [jax.tree.structure(tree) for tree in (params, updates)]
    same = structures[0] == structures[1]
    if not same and (difference := _first_difference(params, updates)):
        raise ValueError(
            "the gradients do not fit the parameters: "
            f"{_in_words(*difference, 'the parameters', 'the gradients')}. Call "
            "optimizer.update(gradients, state, parameters) with trees of one structure."
        )
    jax.tree.map_with_path(check, params, updates)


def require_shapes(updates: PyTree, params: PyTree | None, kind: str = "update") -> None:
    """Refuse a missing ``params``, and arrays that a stage would broadcast to fit it."""
    require_params(params)
    bare, weights = unbox((updates, params))
    jax.tree.map_with_path(
        lambda path, *arrays: _require_shape(kind, path, *arrays),
        bare,
        where_gradients_are(bare, weights),
    )


def where_gradients_are(updates: PyTree, params: PyTree) -> PyTree:
    """Drop the parameters whose gradient is None or a mask."""
    if updates is None:  # Of a function without a return: require_fitting refuses it.
        return params
    try:
        return jax.tree.map(
            lambda update, param: update if is_absent(update) else param,
            updates,
            params,
            is_leaf=is_absent,
        )
    except ValueError:
        return params  # Of another structure: require_fitting names the difference.


def require_state(state: PyTree, wanted: PyTree, params: PyTree) -> None:
    """Refuse a state of other structure or shapes than ``init`` makes; no boxes."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (state, wanted)]
    if structures[0] != structures[1]:
        raise ValueError(_misfit(state, wanted, params))
    arrays = jax.tree.leaves(state)
    types = [[*map(array_type, leaves)] for leaves in (arrays, jax.tree.leaves(wanted))]
    if types[0] == types[1]:
        return
    for array, entry in zip(arrays, state_arrays(wanted, params), strict=True):
        if array_type(array) == array_type(entry.array):
            continue
        of = where = ""
        if entry.owner is not None:
            of = f" of parameter {entry.name}"
            where = f" for a shape of {np.shape(by_name(params)[entry.owner])}"
        raise ValueError(
            f"the state does not fit the parameters: {entry.field}{of} has shape "
            f"{np.shape(array)} and dtype {jnp.result_type(array)} instead of "
            f"{np.shape(entry.array)} and {jnp.result_type(entry.array)}{where}. Pass "
            "the state of these parameters and dimension numbers, convert it with "
            "orscale_jax.convert_state(state, optimizer, params), or start over with "
            "optimizer.init(params)."
        )


def array_type(leaf: Any) -> tuple[Any, ...]:
    """The shape and the kind: floats become others, but no codes and low bits do."""
    dtype = jnp.result_type(leaf)
    kinds = jnp.floating, jnp.complexfloating
    exact = dtype if jnp.issubdtype(dtype, jnp.unsignedinteger) else None
    return np.shape(leaf), exact, *(jnp.issubdtype(dtype, kind) for kind in kinds)


def state_arrays(
    state: PyTree,
    params: PyTree,
    fields: Collection[str] = (),
    by_structure: bool = False,
) -> list[StateArray]:
    """The arrays of a state, in the order of its leaves; all trees without boxes."""
    # Parameters may be called mu or count, too: what holds a tree of parameters is told
    # by the types in the state: a field of a named tuple that is not itself a state. In a
    # restored tree of dictionaries and lists it is told by these fields; by structure, it
    # may be any node that has an array, or several, where the parameters have one.
    names, types = by_name(params).keys(), _types_in(params)

    def below(node: Any, parent: Any, place: Path) -> list[StateArray]:
        arrays = by_name(node)
        if place and place[-1] in _NO_PARAMS:
            return [StateArray(place + path, None, x) for path, x in arrays.items()]
        like = _like(params, node) if by_structure and names != {()} else None
        named = _holds_params(node, parent, place, types, fields)
        if (like and all(map(_is_leaf, like.values()))) or (named and names & arrays):
            return [
                StateArray(place, path, array)
                if path in names
                else StateArray(place + path, None, array)
                for path, array in arrays.items()
            ]
        if _is_leaf(node):
            return [StateArray(place, None, node)]
        arrays_below: list[StateArray] = []
        for key, child in children(node).items():
            arrays_below += below(child, node, (*place, key))
        if like and all(entry.owner is None for entry in arrays_below):
            # Several arrays for each, as optax.sm3 has, in nodes of one type.
            kinds = {type(part) for part in like.values()}
            if len(kinds) == 1 and not any(hasattr(kind, "_fields") for kind in kinds):
                return [
                    StateArray(place + path, owner, array)
                    for owner, part in like.items()
                    for path, array in by_name(part).items()
                ]
        return arrays_below

    return below(state, None, ())


def _like(params: PyTree, node: Any, path: Path = ()) -> dict[Path, Any] | None:
    """What a tree like the parameters has for each that is not masked; None if unlike."""
    inside, theirs = children(params), children(node)
    if is_absent(node):
        return {}
    if not inside:
        return {path: node} if jax.tree.leaves(params) else {}
    if type(node) is not type(params) or theirs.keys() != inside.keys():
        return None
    parts: dict[Path, Any] = {}
    for key, param in inside.items():
        part = _like(param, theirs[key], (*path, key))
        if part is None:
            return None
        parts |= part
    return parts


def _is_leaf(node: Any) -> bool:
    return bool(jax.tree_util.all_leaves([node]))


def _holds_params(
    node: Any, parent: Any, place: Path, types: set[type], fields: Collection[str] = ()
) -> bool:
    """Whether a node is a field of a state, or named like one, but not a state itself."""

    def is_state(node: Any) -> bool:
        return hasattr(node, "_fields") and type(node) not in types

    if node is None or not place or place[-1] in _STATES or is_state(node):
        return False
    return is_state(parent) or place[-1] in fields


def _types_in(tree: PyTree) -> set[type]:
    return {type(tree)}.union(*map(_types_in, children(tree).values()))


def _require_shape(kind: str, path: Any, update: Any, param: Any) -> None:
    """Refuse what would be broadcast to the parameter of its path, or from it."""
    if np.shape(update) != np.shape(param):
        raise ValueError(
            f"the {kind} of parameter {quoted(path)} has shape {np.shape(update)}, "
            f"but the parameter has shape {np.shape(param)}: pass one of that shape."
        )


def _first_difference(
    wanted: Any, found: Any, path: Path = ()
) -> tuple[Path, Any, Any] | None:
    """The first two nodes that differ in their types or the names of their children."""
    mine, other = children(wanted), children(found)
    if all(map(_is_leaf, (wanted, found))):
        return None
    if type(wanted) is not type(found) or mine.keys() != other.keys():
        return path, wanted, found
    below = (_first_difference(mine[key], other[key], (*path, key)) for key in mine)
    return next(filter(None, below), None)


def _in_words(
    path: Path, wanted: Any, found: Any, wanted_tree: str, found_tree: str
) -> str:
    """A difference, given what the trees are, such as "the gradients"."""

    def place(*path: str) -> str:
        return repr(".".join(path)) if path else "the whole tree"

    def kind(node: Any) -> str:
        if hasattr(node, "shape"):
            return f"an array of shape {np.shape(node)}"
        name = type(node).__name__
        article = "an" if name[0] in "AEIOUaeiou" else "a"
        return "None" if node is None else f"{article} {name}"

    if type(wanted) is not type(found):
        return (
            f"{place(*path)} is {kind(found)} in {found_tree}, and {kind(wanted)} in "
            f"{wanted_tree}"
        )
    ours, theirs = children(wanted), children(found)
    for key in ours:
        if key not in theirs:
            return f"{place(*path, key)} is missing from {found_tree}"
    surplus = next(key for key in theirs if key not in ours)
    return f"{place(*path, surplus)} is in {found_tree}, but not in {wanted_tree}"


def _misfit(state: PyTree, wanted: PyTree, params: PyTree) -> str:
    """Where the structure of a state differs, and what to do."""
    difference = _first_difference(wanted, state)
    if difference is None:
        return (
            "the state does not fit: its nodes have other static fields than those of "
            "optimizer.init(params)."
        )
    path, expected, found = difference
    types, node, owner = _types_in(params), wanted, None
    for depth, key in enumerate(path, start=1):
        parent, node = node, children(node)[key]
        if owner is None and _holds_params(node, parent, path[:depth], types):
            owner = path[depth:]
    if owner and is_absent(expected):
        return (
            f"the gradient of parameter {'.'.join(owner)!r} is None, but "
            "optimizer.init was given this parameter: pass its gradient, which is zero "
            "if the loss does not use it. To freeze it, pass optimizer.init the "
            "parameters with None in its place."
        )
    if isinstance(expected, tuple) and isinstance(found, dict | list | None):
        remedy = (
            "If it was restored without a target, restore it into the structure of "
            "optimizer.init(params), such as with flax.serialization.from_state_dict"
        )
    elif owner is not None:
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
    where = _in_words(*difference, "optimizer.init(params)", "the state")
    return f"the state does not fit: {where}. {remedy}."
