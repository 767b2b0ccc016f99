"""Regular expressions over the parameters' paths: the first that matches decides."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from orscale_jax import _checks
from orscale_jax.trees.names import Path, dotted, names_on
from orscale_jax.trees.nodes import is_masked

Value = TypeVar("Value")
ByExpression: TypeAlias = (  # A mapping's type has to name that of its keys exactly.
    Mapping[str, Value]
    | Mapping[re.Pattern[str], Value]
    | Mapping[str | re.Pattern[str], Value]
    | Iterable[tuple[str | re.Pattern[str], Value]]
)


@dataclasses.dataclass(frozen=True)
class Expressions(Generic[Value]):
    """Expressions, each with the value of the parameters whose first match it is.

    Attributes:
      pairs: The compiled expressions with their values, in the order given.
      source: Where they come from, for error messages.
    """

    pairs: tuple[tuple[re.Pattern[str], Value], ...]
    source: str
    kind: ClassVar[str]  # What the values are, for error messages.

    @classmethod
    def compile(cls, rules: Any, argument: str, source: str) -> Self:
        """Check a mapping, or a sequence of pairs, given in an ``argument``."""
        remedy = f"pass a mapping, or pairs, from regular expressions to {cls.kind}"
        if isinstance(rules, Mapping):
            rules = rules.items()
        if isinstance(rules, str) or not isinstance(rules, Iterable):
            _checks.refuse(argument, rules, remedy)
        pairs = list(rules)
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            _checks.refuse(argument, pairs, remedy)
        compiled = (
            (
                _expression(expression, argument),
                cls.checked(f"{argument}[{expression!r}]", value),
            )
            for expression, value in pairs
        )
        return cls(tuple(compiled), source)

    @staticmethod
    def checked(name: str, value: Any) -> Value:
        """Refuse a value that is not valid; ``name`` is for the message."""
        raise NotImplementedError

    def values(self, leaves: Iterable[tuple[Any, Any]]) -> dict[Path, Value]:
        """The values of the leaves that an expression matches, by path.

        Raises:
          ValueError: If an expression applies to no path.
        """
        return {
            path: self.pairs[index][1]
            for path, index in self._decisions(list(leaves)).items()
            if index is not None
        }

    def _decisions(self, leaves: list[tuple[Any, Any]]) -> dict[Path, int | None]:
        """The index of the first expression that matches, by path."""
        masked = any(is_masked(leaf) for _, leaf in leaves)

        def first(name: str) -> int | None:
            matches = (i for i, (e, _) in enumerate(self.pairs) if e.search(name))
            return next(matches, None)

        by_name = {dotted(path): first(dotted(path)) for path, _ in leaves}
        deciding = set(by_name.values())
        for index, (expression, _) in enumerate(self.pairs):
            # A masked node may stand for a subtree, whose names are not known.
            if index not in deciding and not masked:
                self._refuse_idle(expression, by_name)
        return {names_on(path): by_name[dotted(path)] for path, _ in leaves}

    def _refuse_idle(
        self, expression: re.Pattern[str], by_name: dict[str, int | None]
    ) -> None:
        this = f"the expression {expression.pattern!r} of {self.source}"
        for name, index in by_name.items():
            if index is not None and expression.search(name):
                earlier = self.pairs[index][0].pattern
                raise ValueError(
                    f"{this} decides nothing: earlier ones match all its parameters, as "
                    f"{earlier!r} matches {name!r}. Move it before them, or leave it out."
                )
        nearest = sorted(by_name, key=_likeness(expression.pattern), reverse=True)
        raise ValueError(
            f"{this} matches no parameter. Correct it, or leave it out; of "
            f"{len(by_name)} paths the nearest are {', '.join(map(repr, nearest[:5]))}."
        )


def _expression(expression: Any, argument: str) -> re.Pattern[str]:
    name = f"an expression of {argument}"
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


def _likeness(pattern: str) -> Callable[[str], int]:
    def likeness(name: str) -> int:
        matcher = difflib.SequenceMatcher(None, pattern, name, autojunk=False)
        return matcher.find_longest_match().size

    return likeness
