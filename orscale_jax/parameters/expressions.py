"""Regular expressions over the parameters' paths: the first that matches decides."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from orscale_jax import validate
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, dotted, names_on
from orscale_jax.trees.nodes import is_masked

Value = TypeVar("Value")
# What users pass: a mapping's type has to name that of its keys exactly.
ByExpression: TypeAlias = (
    Mapping[str, Value]
    | Mapping[re.Pattern[str], Value]
    | Mapping[str | re.Pattern[str], Value]
    | Iterable[tuple[str | re.Pattern[str], Value]]
)
Pairs: TypeAlias = tuple[tuple[re.Pattern[str], Value], ...]


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


def refuse_step_count(tree: PyTree, argument: str = "weight_dimension_numbers") -> None:
    """Refuse a step count: optax.inject_hyperparams takes functions for schedules."""
    integer = isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jnp.integer)
    if integer and tree.ndim == 0:
        raise ValueError(
            f"{argument} was called with a step count, as a schedule is: pass "
            f'static_args="{argument}" to optax.inject_hyperparams.'
        )
