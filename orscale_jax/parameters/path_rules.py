"""Dimension numbers from regular expressions over the parameters' paths."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from optax.contrib import MuonDimensionNumbers

from orscale_jax import _checks
from orscale_jax.parameters.default_rule import default_rule
from orscale_jax.parameters.dimension_numbers import (
    DimensionNumbers,
    WeightDimensionNumbers,
    check_prefix,
    explicit_axes,
    is_resolvable,
    refuse_step_count,
)
from orscale_jax.parameters.expressions import ByExpression, Expressions
from orscale_jax.parameters.head_rules import HeadRules, PerHeadRules
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, keys_on, listed, name_and_shape, names_on
from orscale_jax.trees.nodes import is_function, is_masked, leaves_and_masks, mask_like

Rule: TypeAlias = Literal["matrix", "adamw"] | DimensionNumbers
Rules: TypeAlias = ByExpression[Rule]

_PLAIN = MuonDimensionNumbers(reduction_axis=0, output_axis=1)


def by_path(
    rules: Rules,
    *,
    otherwise: WeightDimensionNumbers = None,
    per_head: PerHeadRules = False,
) -> Callable[[PyTree], PyTree]:
    r"""Make weight dimension numbers from rules on the paths of the parameters.

    Paths are written with dots, as in :func:`describe` and in error messages:
    ``blocks.0.attention.query.kernel``. An expression matches if :func:`re.search` finds
    it anywhere in the path, and the first that matches applies. An expression that
    applies to no parameter is an error: it is misspelt, or comes after a broader one.
    (Not where Optax has masked a part of the parameters, whose names are unknown then.)

    Args:
      rules: Mapping, or sequence of pairs, from a regular expression to ``"matrix"`` (a
        leaf of two axes, rows and columns), ``"adamw"``, or
        :class:`optax.contrib.MuonDimensionNumbers` or :class:`BlockDimensionNumbers`
        for leaves of any shape.
      otherwise: Dimension numbers of the parameters that no expression matches, in any
        form that ``weight_dimension_numbers`` of :func:`orscale` may have. None: the
        default rule.
      per_head: Whether each head of attention is a matrix of its own. True: each head of
        the projections whose shapes count heads, such as ``(inputs, heads, features)``.
        A number: so many heads, also where an axis holds heads × features. A
        :class:`PerHead` says more, as for grouped-query attention. Mapping, or sequence
        of pairs, from a regular expression to one of these, or to False for a projection
        that stays whole; True where none matches. It divides the matrices of all
        projections that :func:`orscale_jax.diagnostics.layer_classes` knows, as of
        queries, keys, values and outputs, after all other rules.

    Returns:
      A callable from a tree of parameters (also abstract ones) to its tree of dimension
      numbers, with None for AdamW: pass it as ``weight_dimension_numbers``.

    Raises:
      ValueError: At once, if an expression or a rule is not valid. From the callable, if
        an expression applies to no parameter, a rule does not fit a leaf, the default
        rule finds a leaf ambiguous, or ``per_head`` cannot divide a projection.

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
    compiled = PathRules.compile(rules, "rules", "by_path")
    by_head = HeadRules.of(per_head)

    def numbers(tree: PyTree) -> PyTree:
        if not jax.tree.leaves(tree):  # As in matrix_axes.
            return tree
        refuse_step_count(tree)
        decided = compiled.numbers(leaves_and_masks(tree))
        default = otherwise
        if is_function(otherwise, is_resolvable):
            default = otherwise(tree)
        by_rules = decided if default is None else None
        if default is None:
            default = _by_default_rule(tree, decided)
        else:
            default = mask_like(default, tree, is_resolvable)
            check_prefix(default, tree, argument="otherwise")

        def broadcast(prefix: Any, default: Any, subtree: PyTree) -> PyTree:
            return jax.tree.map_with_path(
                lambda path, _: decided.get(names_on(prefix + path), default), subtree
            )

        whole = jax.tree.map_with_path(broadcast, default, tree, is_leaf=is_resolvable)
        if per_head is False:
            return whole
        return _divide(whole, tree, by_head, by_rules)

    return numbers


def _divide(
    numbers: PyTree,
    tree: PyTree,
    by_head: HeadRules,
    by_rules: Collection[Path] | None,
) -> PyTree:
    """The numbers of a tree, with the projections of attention divided into heads.

    ``by_rules`` are the parameters whose numbers were given; None: all of them.
    """
    leaves = jax.tree.leaves_with_path(numbers, is_leaf=is_resolvable)
    by_path = {names_on(path): own for path, own in leaves}
    divided = by_head.divide(leaves_and_masks(tree), by_path, {})
    if by_rules is not None:
        _refuse_unclear_layout(tree, divided.keys() - by_rules)
    return jax.tree.map_with_path(
        lambda path, own: divided.get(names_on(path), own), numbers, is_leaf=is_resolvable
    )


def _by_default_rule(tree: PyTree, decided: Collection[Path]) -> PyTree:
    """The numbers of the default rule, for the leaves that no expression matches."""
    axes = default_rule(tree, lambda path: names_on(path) in decided)

    def numbers(path: Any, leaf: jax.Array) -> DimensionNumbers | None:
        return None if is_masked(axes(path, leaf)) else _PLAIN

    return jax.tree.map_with_path(numbers, tree)


def _refuse_unclear_layout(tree: PyTree, guessed: Collection[Path]) -> None:
    """Refuse to look for heads where inputs and outputs may be the other way round."""
    unclear = [
        name_and_shape(path, leaf)
        for path, leaf in leaves_and_masks(tree)
        if names_on(path) in guessed and keys_on(path)[-1].endswith("weight")
    ]
    if unclear:
        raise ValueError(
            f"{listed(unclear)} to be divided by per_head, and a weight is (outputs, "
            "inputs) in PyTorch and Equinox, and (inputs, outputs) elsewhere. Say which "
            "by a rule for its path: optax.contrib.MuonDimensionNumbers(1, 0) or "
            "MuonDimensionNumbers(0, 1)."
        )


class PathRules(Expressions[Rule]):
    """The rules of :func:`by_path`."""

    kind = "rules"

    @staticmethod
    def checked(name: str, value: Any) -> Rule:
        """Refuse a value that is no rule."""
        named = isinstance(value, str) and value in ("matrix", "adamw")
        if not named and not isinstance(value, DimensionNumbers):
            _checks.refuse(
                name,
                value,
                'pass "matrix", "adamw", an optax.contrib.MuonDimensionNumbers or an '
                "orscale_jax.BlockDimensionNumbers",
            )
        return value

    def numbers(
        self, leaves: Iterable[tuple[Any, Any]]
    ) -> dict[Path, DimensionNumbers | None]:
        """The numbers of the leaves that an expression matches, by path.

        Raises:
          ValueError: If an expression applies to no leaf, or a rule does not fit one.
        """
        leaves = list(leaves)
        decisions = self._decisions(leaves)
        arrays = [leaf for leaf in leaves if not is_masked(leaf[1])]
        self._refuse_stacks(decisions, arrays)
        return {
            names_on(path): _apply(self.pairs[index], path, leaf, self.source)
            for path, leaf in arrays
            if (index := decisions[names_on(path)]) is not None
        }

    def _refuse_stacks(
        self, decisions: dict[Path, int | None], leaves: list[tuple[Any, Any]]
    ) -> None:
        """Refuse "matrix" where a leaf's rank is not 2, in one error per expression."""
        for index, (expression, rule) in enumerate(self.pairs):
            misfits = [
                name_and_shape(path, leaf)
                for path, leaf in leaves
                if decisions[names_on(path)] == index
                and rule == "matrix"
                and np.ndim(leaf) != 2
            ]
            if misfits:
                raise ValueError(
                    f"the expression {expression.pattern!r} of {self.source} says "
                    f'"matrix", but {listed(misfits)} not of two axes. Name '
                    "the axes with optax.contrib.MuonDimensionNumbers("
                    "reduction_axis=..., output_axis=...), or put a narrower expression "
                    'with "adamw" before it.'
                )


def _apply(
    decision: tuple[re.Pattern[str], Rule], path: Any, leaf: jax.Array, source: str
) -> DimensionNumbers | None:
    expression, rule = decision
    if rule == "adamw":
        return None
    numbers = _PLAIN if rule == "matrix" else rule
    try:
        explicit_axes(path, leaf, numbers)
    except ValueError as error:
        raise ValueError(
            f"{source}, expression {expression.pattern!r}: {error}"
        ) from error
    return numbers
