"""Dimension numbers from regular expressions over the parameters' paths."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from orscale_jax import validate
from orscale_jax.parameters import expressions, heads
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
from orscale_jax.parameters.heads import HeadSizes
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import (
    Path,
    by_name,
    dotted,
    keys_on,
    listed,
    names_on,
    of_shape,
)
from orscale_jax.trees.nodes import is_function, is_masked, leaves_and_masks

Rule: TypeAlias = Literal["matrix", "adamw"] | DimensionNumbers
Rules: TypeAlias = expressions.ByExpression[Rule]


def by_path(
    rules: Rules,
    *,
    otherwise: WeightDimensionNumbers = None,
    head_size: HeadSizes = False,
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
      head_size: The number of features of a head, if each head of attention should be a
        matrix of its own, such as 64. With 128, two neighbouring heads of 64 are one
        matrix. A tuple has the sizes of the parts of each head, such as the key and the
        value of latent attention. True is for projections whose shapes count the heads
        along an axis. A mapping, or a sequence of pairs, from regular expressions to
        these values chooses by path; False keeps a projection whole, and a projection
        that no expression matches is treated as with True. After all other rules,
        ``head_size`` splits the matrices of all projections whose class
        (:func:`orscale_jax.diagnostics.layer_classes`) is attention's query, key, value
        or output, or a fusion of these.

    Returns:
      A callable from a tree of parameters, which may be abstract, to its tree of
      dimension numbers, with None for AdamW. Pass it as ``weight_dimension_numbers``.

    Raises:
      ValueError: At once, if an expression or a rule is not valid. From the callable, if
        an expression applies to no parameter, a rule does not fit a leaf, the default
        rule finds a leaf ambiguous, or ``head_size`` does not fit a projection.

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
    return resolver(rules, otherwise, head_size, "rules", "by_path")


def resolver(
    rules: Rules,
    otherwise: WeightDimensionNumbers,
    head_size: HeadSizes,
    argument: str,
    source: str,
) -> Callable[[PyTree], PyTree]:
    """:func:`by_path`, with the argument and the source of the rules for messages."""
    pairs = expressions.compiled(rules, argument, "rules", _checked)
    default_size, sizes = heads.compiled(head_size)

    def numbers(tree: PyTree) -> PyTree:
        if not jax.tree.leaves(tree):  # As in matrix_axes.
            return tree
        expressions.refuse_step_count(tree)
        leaves = leaves_and_masks(tree)
        decided = _decided(pairs, leaves, source)
        default = otherwise(tree) if is_function(otherwise, is_resolvable) else otherwise
        guessed = default is None
        if guessed:
            default = default_numbers(tree, decided)
        note_decisions(dict.fromkeys(decided, RULE))  # After the notes of the default.

        def of_all(known: Mapping[Path, Any]) -> PyTree:
            def own(path: Any, default: Any, _: Any) -> Any:
                return known.get(names_on(path), default)

            return spread(
                own, default, tree, "otherwise" if source == "by_path" else "rules"
            )

        whole = of_all(decided)
        if not sizes and default_size is False:
            return whole
        by_rule = by_name(whole, is_resolvable)
        by_head = heads.divided(leaves, by_rule, default_size, sizes)
        unclear = [
            (dotted(path), of_shape(leaf))
            for path, leaf in leaves
            if guessed
            and names_on(path) in by_head.keys() - decided
            and keys_on(path)[-1].endswith("weight")
        ]
        if unclear:
            raise ValueError(
                f"{listed(unclear)} to be divided by head_size, and a weight is "
                "(outputs, inputs) in PyTorch and Equinox, and (inputs, outputs) "
                "elsewhere. Say which by a rule for its path: "
                "optax.contrib.MuonDimensionNumbers(1, 0) or MuonDimensionNumbers(0, 1)."
            )
        return of_all(decided | by_head)

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
    pairs: expressions.Pairs[Rule], leaves: list[tuple[Any, Any]], source: str
) -> dict[Path, DimensionNumbers | None]:
    """The numbers of the leaves that an expression matches, by path."""
    named = tuple((pattern, (pattern.pattern, rule)) for pattern, rule in pairs)
    rules = expressions.values(named, leaves, source)
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
