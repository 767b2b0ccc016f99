"""Dimension numbers from regular expressions over the parameters' paths."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import _checks
from orscale_jax._matrix import (
    DimensionNumbers,
    PyTree,
    WeightDimensionNumbers,
    check_prefix,
    default_axes,
    dotted,
    explicit_axes,
    is_resolvable,
    listed,
    name_and_shape,
    refuse_ambiguous,
)

Rule: TypeAlias = Literal["matrix", "adamw"] | DimensionNumbers
Rules: TypeAlias = (  # A mapping's type has to name that of its keys exactly.
    Mapping[str, Rule]
    | Mapping[re.Pattern[str], Rule]
    | Mapping[str | re.Pattern[str], Rule]
    | Iterable[tuple[str | re.Pattern[str], Rule]]
)

_Compiled: TypeAlias = list[tuple[re.Pattern[str], Rule]]
_PLAIN = MuonDimensionNumbers(reduction_axis=0, output_axis=1)
_DEFAULT = object()


def by_path(
    rules: Rules, *, otherwise: WeightDimensionNumbers = None
) -> Callable[[PyTree], PyTree]:
    r"""Weight dimension numbers by the names of the parameters.

    A path is written with dots, as :func:`describe` and the error messages write it:
    ``blocks.0.attention.query.kernel``. An expression matches if :func:`re.search` finds
    it anywhere in the path, and the first that matches decides. One that decides nothing
    is an error: it is misspelt, or stands behind a wider one.

    Args:
      rules: Mapping, or sequence of pairs, from a regular expression to ``"matrix"`` (a
        leaf of two axes, rows and columns), ``"adamw"``, or
        :class:`optax.contrib.MuonDimensionNumbers` or :class:`BlockDimensionNumbers`
        for leaves of any shape.
      otherwise: For the parameters that no expression matches, anything that
        ``weight_dimension_numbers`` may be in :func:`orscale`. None: the default rule.

    Returns:
      A callable from a tree of parameters (also abstract ones) to its tree of dimension
      numbers, with None for AdamW. It is meant for ``weight_dimension_numbers``.

    Raises:
      ValueError: At once, if an expression or a rule is not valid. From the callable, if
        an expression decides nothing, a rule does not fit a leaf, or the default rule
        finds a leaf ambiguous.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax.contrib import MuonDimensionNumbers
      >>> from orscale_jax import by_path, orscale
      >>> numbers = by_path({
      ...     "router": "adamw",
      ...     r"experts\.(up|down)": MuonDimensionNumbers(-2, -1),
      ... })
      >>> params = {
      ...     "router": jnp.ones((8, 4)),
      ...     "experts": {"up": jnp.ones((4, 8, 6)), "down": jnp.ones((4, 6, 8))},
      ...     "out": jnp.ones((8, 8)),
      ... }
      >>> numbers(params)["out"]
      MuonDimensionNumbers(reduction_axis=0, output_axis=1)
      >>> print(numbers(params)["router"])
      None
      >>> optimizer = orscale(1e-3, weight_dimension_numbers=numbers)
    """
    compiled = _compiled(rules)

    def numbers(tree: PyTree) -> PyTree:
        if not jax.tree.leaves(tree):  # As in matrix_axes.
            return tree
        decisions = _decisions(compiled, tree)
        default = otherwise(tree) if callable(otherwise) else otherwise
        if default is None:
            default = _DEFAULT
            refuse_ambiguous(_decided(decisions, None, tree))
        else:
            check_prefix(default, tree, argument="otherwise")

        def broadcast(prefix: Any, default: Any, subtree: PyTree) -> PyTree:
            def at(path: Any, leaf: jax.Array) -> Any:
                path = prefix + path
                index = decisions[dotted(path)]
                if index is not None:
                    return _apply(compiled[index], path, leaf)
                if default is not _DEFAULT:
                    return default
                masked = isinstance(default_axes(path, leaf), optax.MaskedNode)
                return None if masked else _PLAIN

            return jax.tree_util.tree_map_with_path(at, subtree)

        _refuse_stacks(compiled, decisions, tree)
        return jax.tree_util.tree_map_with_path(
            broadcast, default, tree, is_leaf=is_resolvable
        )

    return numbers


def _compiled(rules: Any) -> _Compiled:
    remedy = "pass a mapping, or pairs, from regular expressions to rules"
    if isinstance(rules, Mapping):
        rules = rules.items()
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        _checks.refuse("rules", rules, remedy)
    pairs = list(rules)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        _checks.refuse("rules", pairs, remedy)
    return [
        (_expression(expression), _rule(expression, rule)) for expression, rule in pairs
    ]


def _expression(expression: Any) -> re.Pattern[str]:
    name = "an expression of rules"
    if isinstance(expression, re.Pattern) and isinstance(expression.pattern, str):
        return expression
    if not isinstance(expression, str):
        _checks.refuse(name, expression, "pass a string or a compiled pattern of one")
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(
            f"{name}={expression!r} is not valid: {error}; see Python's module re."
        ) from error


def _rule(expression: Any, rule: Any) -> Rule:
    named = isinstance(rule, str) and rule in ("matrix", "adamw")
    if not named and not isinstance(rule, DimensionNumbers):
        _checks.refuse(
            f"rules[{expression!r}]",
            rule,
            'pass "matrix", "adamw", an optax.contrib.MuonDimensionNumbers or an '
            "orscale_jax.BlockDimensionNumbers",
        )
    return rule


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
    """The leaves and, as expressions may be meant for them, the masked nodes."""
    return jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )


def _decisions(compiled: _Compiled, tree: PyTree) -> dict[str, int | None]:
    """By path, the index of the first expression that matches."""

    def first(name: str) -> int | None:
        matches = (i for i, (e, _) in enumerate(compiled) if e.search(name))
        return next(matches, None)

    decisions = {
        name: first(name) for name in (dotted(path) for path, _ in _leaves(tree))
    }
    deciding = set(decisions.values())
    for index, (expression, _) in enumerate(compiled):
        if index not in deciding:
            _refuse_idle(expression, compiled, decisions)
    return decisions


def _refuse_idle(
    expression: re.Pattern[str], compiled: _Compiled, decisions: dict[str, int | None]
) -> None:
    for name, index in decisions.items():
        if index is not None and expression.search(name):
            earlier = compiled[index][0].pattern
            raise ValueError(
                f"the expression {expression.pattern!r} of by_path decides nothing: "
                f"earlier ones match all its parameters, as {earlier!r} does {name!r}. "
                "Put it before them, or leave it out."
            )

    def likeness(name: str) -> int:
        matcher = difflib.SequenceMatcher(None, expression.pattern, name, autojunk=False)
        return matcher.find_longest_match().size

    nearest = sorted(decisions, key=likeness, reverse=True)[:5]
    raise ValueError(
        f"the expression {expression.pattern!r} of by_path matches no parameter. Correct "
        f"it, or leave it out; of {len(decisions)} paths the nearest are "
        f"{', '.join(map(repr, nearest))}."
    )


def _decided(
    decisions: dict[str, int | None], index: int | None, tree: PyTree
) -> list[tuple[Any, jax.Array]]:
    """The leaves that one expression decides; None: that no expression decides."""
    return [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if decisions[dotted(path)] == index
    ]


def _refuse_stacks(
    compiled: _Compiled, decisions: dict[str, int | None], tree: PyTree
) -> None:
    """Refuse "matrix", all leaves of an expression at once, but for two axes."""
    for index, (expression, rule) in enumerate(compiled):
        found = [
            name_and_shape(path, leaf)
            for path, leaf in _decided(decisions, index, tree)
            if rule == "matrix" and np.ndim(leaf) != 2
        ]
        if found:
            raise ValueError(
                f'the expression {expression.pattern!r} of by_path says "matrix", which '
                f"takes two axes, and {listed(found)} not so. Name the axes with "
                "optax.contrib.MuonDimensionNumbers(reduction_axis=..., "
                'output_axis=...), or put a narrower expression with "adamw" before it.'
            )


def _apply(
    decision: tuple[re.Pattern[str], Rule], path: Any, leaf: jax.Array
) -> DimensionNumbers | None:
    expression, rule = decision
    if rule == "adamw":
        return None
    numbers = _PLAIN if rule == "matrix" else rule
    try:
        explicit_axes(path, leaf, numbers)
    except ValueError as error:
        raise ValueError(
            f"by_path, expression {expression.pattern!r}: {error}"
        ) from error
    return numbers
