"""The learning rate of each matrix in the last update."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.transforms.trust_ratio import CalibratedTrustRatioState
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import Path, names_on
from orscale_jax.trees.nodes import Labels, nodes_in_groups, nodes_of

LearningRate: TypeAlias = ArrayLike | optax.Schedule | PyTree | None
_Value = TypeVar("_Value")

_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_FORMS = (
    "pass a number, a schedule, a mapping from the labels of optax.partition to them, or "
    "a tree of them like the parameters"
)


def learning_rates(
    given: LearningRate, state: PyTree, params: PyTree, groups: Mapping[Path, Labels]
) -> dict[Path, ArrayLike] | None:
    """η of the last update of each matrix; None if it is not known.

    Args:
      given: See :func:`read`.
      state: The state, without boxes.
      params: The parameters, without boxes.
      groups: The labels of the partitions around each leaf of matrices.
    """
    injected = list(_injected(state))
    if given is None:
        pairs = ((path, _injected_for(injected, at)) for path, at in groups.items())
        found = {path: rate for path, rate in pairs if rate is not None}
        unknown = [path for path in groups if path not in found]
        if found and unknown:
            raise ValueError(
                f"the state holds the learning rates of some matrices, but not that of "
                f"{'.'.join(unknown[0])!r}: {_FORMS}."
            )
        return found or None
    states = nodes_in_groups(state, optax.ScaleByScheduleState)
    counts = [(labels, node.count) for labels, node in states]
    if _is_one(given, params, groups):
        _refuse_one_for_all(groups, injected, counts)
        rates = dict.fromkeys(groups, given)
    else:
        rates = _separate(given, params, groups)
    return {path: _at(rate, groups[path], counts) for path, rate in rates.items()}


def _separate(
    given: PyTree, params: PyTree, groups: Mapping[Path, Labels]
) -> dict[Path, Any]:
    """The rate or schedule of each matrix, from those of groups or of parameters."""
    found = [_by_label(given, groups), _by_parameter(given, params, groups)]
    if not any(found):
        _checks.refuse("learning_rate", given, _FORMS)
    rates, others = found if found[0] else found[::-1]
    for path, labels in groups.items():
        if path not in rates:
            group = " / ".join(map(str, labels))
            raise ValueError(
                f"learning_rate has no entry for {'.'.join(path)!r} in the group "
                f"{group!r}: {_FORMS}."
            )
        if path in others and others[path] is not rates[path]:
            raise ValueError(
                f"learning_rate={given!r} may be a mapping from labels or from "
                f"parameters, which differ for {'.'.join(path)!r}: pass a tree with an "
                "entry for every parameter."
            )
    return rates


def _is_one(given: Any, params: PyTree, groups: Mapping[Path, Labels]) -> bool:
    """Whether it is one rate or schedule; a callable module may be a tree of rates."""
    if jax.tree_util.all_leaves([given]):
        return True
    return callable(given) and not _spread(given, params, groups)


def _by_label(given: PyTree, groups: Mapping[Path, Labels]) -> dict[Path, Any]:
    """The entry of the innermost label of each matrix that has one."""
    if not isinstance(given, Mapping):
        return {}
    own = {path: [x for x in labels if x in given] for path, labels in groups.items()}
    return {path: given[labels[-1]] for path, labels in own.items() if labels}


def _by_parameter(
    given: PyTree, params: PyTree, groups: Mapping[Path, Labels]
) -> dict[Path, Any]:
    """The entry of each matrix in a tree like the parameters; none in any other tree."""
    # A callable node is a module that holds rates, or else a schedule.
    return _spread(given, params, groups) or _spread(given, params, groups, callable)


def _spread(
    given: PyTree,
    params: PyTree,
    groups: Mapping[Path, Labels],
    is_rate: Callable[[Any], bool] = lambda _: False,
) -> dict[Path, Any]:
    """The rate of each matrix at or below a node that is one; none if a tree misfits."""
    rates: dict[Path, Any] = {}

    def spread(path: Any, rate: Any, part: PyTree) -> None:
        below = jax.tree.leaves_with_path(part)
        names = (names_on(path + rest) for rest, _ in below)
        rates.update((name, rate) for name in names if name in groups)

    def is_leaf(node: Any) -> bool:
        return node is None or is_rate(node)

    try:
        jax.tree.map_with_path(spread, given, params, is_leaf=is_leaf)
    except (TypeError, ValueError):
        return {}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _refuse_one_for_all(
    groups: Mapping[Path, Labels],
    injected: Sequence["_Injected"],
    counts: Sequence[tuple[Labels, Any]],
) -> None:
    """Refuse one rate for all groups if the state shows that their rates differ."""
    around = [(each.labels, each.labels) for each in injected]
    sources = {_innermost(around, labels) for labels in groups.values()}
    if len(sources) > 1:
        raise ValueError(
            "learning_rate is one for all matrices, but their groups have their own in "
            "the state (optax.inject_hyperparams): leave learning_rate out."
        )
    scheduled = {_innermost(counts, labels) is not None for labels in groups.values()}
    if len(scheduled) > 1:
        raise ValueError(
            "learning_rate is one for all matrices, but some groups have a schedule and "
            "others do not: pass a mapping from the labels of optax.partition to numbers "
            "and schedules."
        )


def _at(rate: Any, labels: Labels, counts: Sequence[tuple[Labels, Any]]) -> ArrayLike:
    """The rate of the last update, if need be of a schedule."""
    if callable(rate):
        count = _innermost(counts, labels)
        if count is None:
            raise ValueError(
                "learning_rate is a schedule, but the state has no count for it: pass the"
                " number that the optimizer used, or the schedule that it was built with."
            )
        rate = rate(jnp.maximum(jnp.asarray(count) - 1, 0))
    if np.ndim(rate):
        _checks.refuse("learning_rate", rate, _FORMS)
    _checks.number("learning_rate", rate, at_least=0)
    return rate


class _Injected(NamedTuple):
    """A rate of optax.inject_hyperparams.

    Attributes:
      labels: Of the partitions around it.
      rate: The rate.
      has_ratios: Whether an optimizer with trust ratios is in it.
    """

    labels: Labels
    rate: ArrayLike
    has_ratios: bool


def _injected(tree: PyTree, labels: Labels = ()) -> Iterator[_Injected]:
    """The rates of optax.inject_hyperparams in a state, the outermost first."""
    for inside, node in nodes_in_groups(tree, *_INJECTED, labels=labels):
        rate, inner = node.hyperparams.get("learning_rate"), node.inner_state
        if rate is not None:
            yield _Injected(
                inside, rate, bool(nodes_of(inner, CalibratedTrustRatioState))
            )
        yield from _injected(inner, inside)


def _injected_for(injected: Sequence[_Injected], labels: Labels) -> ArrayLike | None:
    """The rate that is injected next to the ratios of a group, or else beside them."""
    around = [each for each in injected if each.labels == labels[: len(each.labels)]]
    inside = [each for each in around if each.has_ratios]
    if len(around) > 1 and not inside:
        raise ValueError(
            "the state holds several learning rates, none of them of the optimizer that "
            f"has the ratios: {_FORMS}."
        )
    nearest = max(inside[::-1] or around, key=lambda each: len(each.labels), default=None)
    return None if nearest is None else nearest.rate


def _innermost(found: Iterable[tuple[Labels, _Value]], labels: Labels) -> _Value | None:
    """What stands in the innermost group around a leaf; the first of several."""
    around = [(len(at), value) for at, value in found if at == labels[: len(at)]]
    return max(around, key=lambda pair: pair[0], default=(0, None))[1]
