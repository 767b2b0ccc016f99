"""Rules by regular expressions over the paths of parameters; the public ``by_path``."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import validate
from orscale_jax.parameters.dimension_numbers import (
    PLAIN,
    RULE,
    DimensionNumbers,
    WeightDimensionNumbers,
    default_numbers,
    explicit_axes,
    is_resolvable,
    note_decisions,
    spread,
)
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, dotted, listed, names_on, of_shape
from orscale_jax.trees.nodes import is_function, is_masked, leaves_and_masks

Value = TypeVar("Value")
# What users pass: a mapping's type has to name that of its keys exactly.
ByExpression: TypeAlias = (
    Mapping[str, Value]
    | Mapping[re.Pattern[str], Value]
    | Mapping[str | re.Pattern[str], Value]
    | Iterable[tuple[str | re.Pattern[str], Value]]
)
Pairs: TypeAlias = tuple[tuple[re.Pattern[str], Value], ...]
Rule: TypeAlias = Literal["matrix", "adamw"] | DimensionNumbers
Rules: TypeAlias = ByExpression[Rule]


def by_path(
    rules: Rules, *, otherwise: WeightDimensionNumbers = None
) -> Callable[[PyTree], PyTree]:
    r"""Make weight dimension numbers from rules on the paths of the parameters.

    Paths are written with dots, as in :func:`describe` and in error messages:
    ``blocks.0.attention.query.kernel``. An expression matches if :func:`re.search` finds
    it anywhere in the path, and the first expression that matches applies. If an
    expression applies to no parameter, it is misspelt, or comes after a broader
    expression, and an error says so. (If Optax has masked a part of the parameters, their
    names are unknown, and there is no error.)

    Args:
      rules: A mapping, or a sequence of pairs, from regular expressions to rules. A rule
        is ``"matrix"`` (for a leaf of two axes, rows and columns), ``"adamw"``, or an
        :class:`optax.contrib.MuonDimensionNumbers` or :class:`BlockDimensionNumbers` for
        leaves of any shape.
      otherwise: Dimension numbers of the parameters that no expression matches, in any
        form that ``weight_dimension_numbers`` of :func:`orscale` may have. None: the
        default rule.

    Returns:
      A callable from a tree of parameters, which may be abstract, to its tree of
      dimension numbers, with None for AdamW. Pass it as ``weight_dimension_numbers``.

    Raises:
      ValueError: At once, if an expression or a rule is not valid. From the callable, if
        an expression applies to no parameter, a rule does not fit a leaf, or the default
        rule finds a leaf ambiguous.

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
    return resolver(rules, otherwise, "rules", "by_path")


def resolver(
    rules: Rules, otherwise: WeightDimensionNumbers, argument: str, source: str
) -> Callable[[PyTree], PyTree]:
    """:func:`by_path`, with the argument and the source of the rules for messages."""
    pairs = compiled(rules, argument, "rules", _checked)

    def numbers(tree: PyTree) -> PyTree:
        if not jax.tree.leaves(tree):  # As in matrix_axes.
            return tree
        refuse_step_count(tree)
        decided = _decided(pairs, leaves_and_masks(tree), source)
        default = otherwise(tree) if is_function(otherwise, is_resolvable) else otherwise
        if default is None:
            default = default_numbers(tree, decided)
        note_decisions(dict.fromkeys(decided, RULE))  # After the notes of the default.
        argument = "otherwise" if source == "by_path" else "rules"
        return spread(
            lambda path, own, _: decided.get(names_on(path), own), default, tree, argument
        )

    return numbers


def _checked(name: str, value: Any) -> Rule:
    """Refuse a value that is no rule."""
    named = isinstance(value, str) and value in ("matrix", "adamw")
    if not named and not isinstance(value, DimensionNumbers):
        remedy = (
            'pass "matrix", "adamw", an optax.contrib.MuonDimensionNumbers or an '
            "orscale_jax.BlockDimensionNumbers"
        )
        validate.refuse(name, value, remedy)
    return value


def _decided(
    pairs: Pairs[Rule], leaves: list[tuple[Any, Any]], source: str
) -> dict[Path, DimensionNumbers | None]:
    """The numbers of the leaves that an expression matches, by path."""
    named = tuple((pattern, (pattern.pattern, rule)) for pattern, rule in pairs)
    rules = values(named, leaves, source)
    arrays = [
        (path, leaf, *rules[names_on(path)])
        for path, leaf in leaves
        if names_on(path) in rules and not is_masked(leaf)
    ]
    for pattern, _ in pairs:
        misfits = [
            (dotted(path), of_shape(leaf))
            for path, leaf, matched, rule in arrays
            if matched == pattern.pattern and rule == "matrix" and np.ndim(leaf) != 2
        ]
        if misfits:
            raise ValueError(
                f"the expression {pattern.pattern!r} of {source} says "
                f'"matrix", but {listed(misfits)} not of two axes. Name '
                "the axes with optax.contrib.MuonDimensionNumbers("
                "reduction_axis=..., output_axis=...), or put a narrower expression "
                'with "adamw" before it.'
            )
    numbers: dict[Path, DimensionNumbers | None] = {}
    for path, leaf, expression, rule in arrays:
        if rule == "adamw":
            numbers[names_on(path)] = None
            continue
        numbers[names_on(path)] = own = PLAIN if rule == "matrix" else rule
        try:
            explicit_axes(path, leaf, own)
        except ValueError as error:
            raise ValueError(f"{source}, expression {expression!r}: {error}") from error
    return numbers


# Expressions.


def compiled(
    rules: Any, argument: str, kind: str, checked: Callable[[str, Any], Value]
) -> Pairs[Value]:
    """Check a mapping, or pairs; ``kind`` says what the values are, for messages."""
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    if isinstance(pairs, Iterable) and not isinstance(pairs, str):
        pairs = list(pairs)
    if not isinstance(pairs, list) or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
    ):
        remedy = f"pass a mapping, or pairs, from regular expressions to {kind}"
        validate.refuse(argument, pairs, remedy)

    name = f"an expression of {argument}"
    return tuple(
        (_pattern(name, key), checked(f"{argument}[{key!r}]", value))
        for key, value in pairs
    )


def matching(argument: str, expression: Any, names: Iterable[str]) -> set[str]:
    """The names in which an expression has a match; refuses one that has none."""
    pattern, names = _pattern(argument, expression), list(names)
    matches = {name for name in names if pattern.search(name)}
    if not matches:
        remedy = f"no name has it; the first are {names[:3]}"
        validate.refuse(argument, expression, remedy)
    return matches


def values(
    pairs: Pairs[Value], leaves: Iterable[tuple[Any, Any]], source: str
) -> dict[Path, Value]:
    """The values of the leaves that an expression matches, by path."""

    def first(name: str) -> int | None:
        return next((i for i, (e, _) in enumerate(pairs) if e.search(name)), None)

    leaves = list(leaves)
    by_dotted = {dotted(path): first(dotted(path)) for path, _ in leaves}
    idle = sorted({*range(len(pairs))} - {*by_dotted.values()})
    # A masked node may stand for a subtree, whose names are not known.
    if idle and not any(is_masked(leaf) for _, leaf in leaves):
        expression, _ = pairs[idle[0]]
        this = f"the expression {expression.pattern!r} of {source}"
        for name, earlier in by_dotted.items():
            if earlier is not None and expression.search(name):
                raise ValueError(
                    f"{this} decides nothing: earlier ones match all its parameters, as "
                    f"{pairs[earlier][0].pattern!r} matches {name!r}. Move it before "
                    "them, or leave it out."
                )
        alike = {}
        for name in by_dotted:
            pair = difflib.SequenceMatcher(None, expression.pattern, name, autojunk=False)
            alike[name] = pair.find_longest_match().size
        nearest = sorted(alike, key=alike.__getitem__, reverse=True)[:5]
        raise ValueError(
            f"{this} matches no parameter. Correct it, or leave it out; of {len(alike)} "
            f"paths the nearest are {', '.join(map(repr, nearest))}."
        )
    indices = ((names_on(path), by_dotted[dotted(path)]) for path, _ in leaves)
    return {path: pairs[index][1] for path, index in indices if index is not None}


def _pattern(name: str, expression: Any) -> re.Pattern[str]:
    if isinstance(expression, re.Pattern) and isinstance(expression.pattern, str):
        return expression
    if not isinstance(expression, str):
        validate.refuse(name, expression, "pass a string or a compiled pattern of one")
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(
            f"{name}={expression!r} is not valid: {error}; see Python's module re."
        ) from error


def refuse_step_count(tree: PyTree) -> None:
    """Refuse a step count: optax.inject_hyperparams takes functions for schedules."""
    integer = isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jnp.integer)
    if integer and tree.ndim == 0:
        raise ValueError(
            "weight_dimension_numbers was called with a step count, as a schedule is: "
            'pass static_args="weight_dimension_numbers" to optax.inject_hyperparams.'
        )
