"""Multipliers of the learning rate, for each parameter: a tree, or rules on paths."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeGuard

import jax
import numpy as np
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.parameters import expressions
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import names_on, quoted
from orscale_jax.trees.nodes import Watch, broadcast_prefix, is_function, leaves_and_masks

RateMultipliers: TypeAlias = (
    PyTree
    | Mapping[str | re.Pattern[str], ArrayLike]
    | Iterable[tuple[str | re.Pattern[str], ArrayLike]]
    | Callable[[PyTree], PyTree]
    | None
)

NAME = "learning_rate_multipliers"
_VALUES = (
    "pass a positive finite number, or an array of them for stacked layers. A schedule "
    "or a rate of 0 for some parameters is a group of optax.partition"
)
_FORMS = (
    "pass a mapping from regular expressions over the paths to numbers, a tree of "
    "numbers like the parameters, a prefix of one, or a function that makes one"
)

resolved: Watch[PyTree] = Watch("multipliers of learning rates")


def check(given: RateMultipliers) -> None:
    """Refuse values that are not positive finite numbers, as far as they are known."""
    if given is None or is_function(given, _is_number):
        return
    if _is_sequence_of_rules(given):
        _compiled(given)
    elif _is_mapping_of_values(given):
        for key, value in given.items():
            if value is not None:  # In a tree, where the parameters have None, too.
                _multiplier(f"{NAME}[{key!r}]", value)
    else:
        once = isinstance(given, Iterable) and jax.tree_util.all_leaves([given])
        if once and not isinstance(given, str | Mapping | np.ndarray | jax.Array):
            _checks.refuse(NAME, given, "pass a dict or a list of pairs instead")
        for path, value in jax.tree.leaves_with_path(unbox(given)):
            if not path and isinstance(value, str):
                _checks.refuse(NAME, value, _FORMS)
            _multiplier(f"{NAME} of {quoted(path)}" if path else NAME, value)


def rate_multipliers(given: RateMultipliers, tree: PyTree) -> PyTree | None:
    """The multiplier of each bare parameter, 1 where no expression matches."""
    if given is None:
        return None
    if not jax.tree.leaves(tree):  # As in matrix_axes.
        return tree
    if is_function(given, _is_number):
        try:
            given = given(tree)
        except Exception as error:
            error.add_note(
                f"{NAME} was called with the parameters. A schedule for some of them is "
                "a group of optax.partition."
            )
            raise
        check(given)
    if isinstance(given, Mapping) and jax.tree_util.all_leaves([given]):
        given = dict(given)  # Some mappings are no trees to JAX.
    found = None
    if not _is_sequence_of_rules(given):
        try:
            found = broadcast_prefix(unbox(given), tree, f"{NAME} does not fit: {_FORMS}")
        except ValueError:
            # The keys of a mapping are the parameters' own, or else expressions.
            if not _is_mapping_of_values(given):
                raise
    if found is None:
        values = expressions.values(_compiled(given), leaves_and_masks(tree), NAME)
        found = jax.tree.map_with_path(lambda p, _: values.get(names_on(p), 1.0), tree)
    resolved.note(found)
    return found


def _is_sequence_of_rules(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and isinstance(pair[0], str | re.Pattern)
        for pair in given
    )


def _is_mapping_of_values(given: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(given, Mapping) and all(
        isinstance(key, str | re.Pattern)
        and (value is None or jax.tree_util.all_leaves([value]))
        for key, value in given.items()
    )


def _compiled(rules: Any) -> expressions.Pairs[ArrayLike]:
    return expressions.compiled(rules, NAME, "positive numbers", _multiplier)


def _is_number(value: Any) -> bool:
    dtype = getattr(value, "dtype", type(value))
    known = isinstance(value, int | float | np.generic | np.ndarray | jax.Array)
    return known and _checks.is_real(dtype)


def _multiplier(name: str, value: Any) -> ArrayLike:
    """The value, if it is positive and finite or not known yet."""
    if not _is_number(value):
        _checks.refuse(name, value, _VALUES)
    _checks.not_rounded(name, value)
    if not isinstance(value, jax.core.Tracer):
        with np.errstate(over="ignore", under="ignore"):
            known = np.asarray(jax.device_get(value)).astype(np.float32)
        if not (np.isfinite(known) & (known > 0)).all():
            _checks.refuse(name, value, _VALUES)
    return value
