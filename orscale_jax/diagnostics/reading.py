"""Norms, ratios and steps of every matrix, read off an optimizer's state."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.family.sphere import InitialNormState
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers, matrix_axes
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.master_weights import MasterWeightsState, with_master_weights
from orscale_jax.transforms.matrices import MATRIX, Matrices, compute_dtype
from orscale_jax.transforms.momentum import Int8TraceState
from orscale_jax.transforms.trust_ratio import NUMBERS, CalibratedTrustRatioState
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.names import Path, by_name, name_and_shape, names_on
from orscale_jax.trees.nodes import Labels, nodes_in_groups, nodes_of

LearningRate: TypeAlias = (
    ArrayLike | optax.Schedule | Mapping[Any, ArrayLike | optax.Schedule] | None
)
# Arrays of the leaves of matrices, by path.
ByPath: TypeAlias = dict[Path, Any]
_Value = TypeVar("_Value")

_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_FORMS = (
    "pass a number, a schedule, or a mapping from the labels of optax.partition to them"
)


class Reading(NamedTuple):
    r"""The result of :func:`read`: trees like the parameters.

    For a leaf of matrices, each field has an array with one entry per matrix, of shape
    ``()`` for a plain matrix. Its dtype is float32 (float64 for float64 parameters) or
    bool. Every other leaf has :class:`optax.MaskedNode`. A field is None if the state of
    the optimizer does not hold the quantity: with :func:`orscale_jax.muon`, a reading has
    only ``weight_norm`` and ``started``. In a partition of several optimizers, a leaf is
    masked if its own optimizer does not hold the quantity.

    The *last update* is the one that led to ``params``. :math:`W` are the weights before
    this update, and :math:`W'` are the weights after it.
    """

    #: The ratio r̂ of the last update. 1 before the first one.
    trust_ratio: PyTree
    #: Its ratio r before the clip. 1 where it is not measured; NaN if D is not finite.
    raw_trust_ratio: PyTree
    #: The constant c, 0 while unset, 1 without calibration, inf without initial scale.
    calibration: PyTree
    #: ‖W'‖, of ``params``.
    weight_norm: PyTree
    #: ‖D‖ of the last update, 0 before the first one.
    direction_norm: PyTree
    #: η·r̂·‖D‖/‖W‖ of the last update, the distance that W has moved relative to its norm.
    relative_step: PyTree
    #: ‖W'‖/‖W₀‖, where W₀ are the weights at the first direction at which W was not zero.
    #: c was set with these weights. 1 before this direction.
    growth: PyTree
    #: Whether the lower bound has raised r.
    at_r_min: PyTree
    #: Whether the upper bound has lowered r.
    at_r_max: PyTree
    #: Whether the matrix has had a direction. For an optimizer without ratios, whether
    #: the momentum of the matrix is not zero.
    started: PyTree
    #: Whether c is set, and finite.
    anchored: PyTree


def read(
    state: Any,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    learning_rate: LearningRate = None,
) -> Reading:
    r"""Read the norms, ratios and steps of every matrix from the state of an optimizer.

    Call it with state and parameters after ``optax.apply_updates``, inside or outside of
    ``jax.jit``. The update itself has computed everything but ``weight_norm``. The cost
    is therefore one norm of the parameters and, without ratios, one norm of the momentum.
    Nothing is sent to the host. On a mesh, one number per matrix is summed over the
    devices that share it.

    Args:
      state: The state after the update, of :func:`orscale_jax.orscale`,
        :func:`orscale_jax.muon` or one of the family, in any of Optax's wrappers; or an
        object that holds it as ``opt_state``: a ``flax.nnx.Optimizer`` or a
        ``TrainState``.
      params: The parameters after the update, or a model of Flax NNX or Equinox.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      learning_rate: The :math:`\eta` of the last update, or the schedule of the
        optimizer, whose count is in the state. If groups of :func:`optax.partition` have
        different rates, a mapping from their labels to numbers and schedules. None: the
        rates of :func:`optax.inject_hyperparams`, if the state has them; otherwise
        ``relative_step`` is None. A later :func:`orscale_jax.scale_by_path` is ignored.

    Returns:
      A :class:`Reading`. It shares no array with ``state``.

    Raises:
      ValueError: If the state belongs to another optimizer, or has other matrices or no
        matrices. Also if you pass a schedule and the state has no count, or if you pass
        one rate although the state shows that groups have different rates.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import diagnostics, orscale
      >>> optimizer = orscale(0.1)
      >>> params = {"kernel": 2 * jnp.eye(4), "bias": jnp.zeros(4)}
      >>> grads = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
      >>> updates, state = optimizer.update(grads, optimizer.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> reading = diagnostics.read(state, params, learning_rate=0.1)
      >>> print(reading.trust_ratio["kernel"], reading.relative_step["kernel"].round(2))
      1.0 0.03

    References:
      Lou & You, *OrScale*, Definitions 1 and 2; section 5.4 reports these statistics.
    """
    params = unbox(trained(params, state))
    state = unbox(getattr(state, "opt_state", state))
    params = with_master_weights(nodes_of(state, MasterWeightsState), params)
    # For each leaf with trust ratios: the labels around it, and its arrays by field.
    groups: dict[Path, Labels] = {}
    ratios: dict[Path, dict[str, jax.Array]] = {}
    for labels, node in nodes_in_groups(state, CalibratedTrustRatioState):
        for path, numbers in by_name(node.numbers).items():
            of_matrices = jnp.unstack(jnp.asarray(numbers))
            ratios[path] = dict(zip(NUMBERS, of_matrices, strict=True))
            groups[path] = labels
    initial = _by_path(x.initial_norm for x in nodes_of(state, InitialNormState))
    if (like := held(state)) is None:
        remedy = "pass the state of an optimizer of orscale_jax"
        validate.refuse("state", type(state), remedy)
    matrices = matrices_of(params, weight_dimension_numbers, like, "the state")
    norms: ByPath = {}
    quantities: dict[Path, dict[str, Any]] = {}
    momenta = _momenta(state)
    for path, (axes, leaf) in zip(matrices.paths, matrices.each(params), strict=True):
        name = names_on(path)
        norm = axes.norms(jnp.asarray(leaf).astype(compute_dtype(leaf)))
        if like[name] is not None:
            norm = typed_sharding.shard_like(norm, jnp.asarray(like[name]))
        norms[name], quantities[name] = norm, {"weight_norm": norm}
        if name in momenta and name not in ratios:
            size = jnp.abs(jnp.asarray(momenta[name]).astype(norm.dtype))
            started = axes.reduce(jnp.sum, size) != 0
            quantities[name]["started"] = typed_sharding.shard_like(started, norm)
    rates = _learning_rates(learning_rate, state, groups)
    for path, at in ratios.items():
        quantities[path] |= _of_matrices(at, norms[path], rates.get(path))
    for path, norm in initial.items():
        quantities[path]["growth"] = norms[path] / norm

    def tree(field: str) -> PyTree:
        if not any(field in readouts for readouts in quantities.values()):
            return None
        masked = optax.MaskedNode()
        return jax.tree.map_with_path(
            lambda path, _: quantities.get(names_on(path), {}).get(field, masked), params
        )

    return Reading(*map(tree, Reading._fields))


def fields_of(reading: Any) -> dict[str, PyTree]:
    """The fields that are not None; refuses what is no reading, such as a state."""
    if not isinstance(reading, Reading):
        raise ValueError(
            f"reading is of type {type(reading).__name__}: pass what diagnostics.read "
            "returns."
        )
    return {name: tree for name, tree in reading._asdict().items() if tree is not None}


def known_leaves(tree: PyTree, reading: Reading) -> list[jax.Array | None]:
    """A tree like those of a reading at each leaf of matrices; None where it has none."""
    leaves = by_name(tree)
    norms = jax.tree.leaves_with_path(reading.weight_norm)
    return [leaves.get(names_on(path)) for path, _ in norms]


def _by_path(trees: Iterable[PyTree]) -> ByPath:
    leaves = (leaf for tree in trees for leaf in jax.tree.leaves_with_path(tree))
    return {names_on(path): array for path, array in leaves}


def held(state: Any) -> ByPath | None:
    """An array with an entry for each matrix, of each leaf; None of other optimizers.

    It is None for a leaf of which the state holds the momentum alone.
    """
    nodes = nodes_of(state, CalibratedTrustRatioState)
    ratios = [node.trust_ratio for node in nodes]
    initial = [node.initial_norm for node in nodes_of(state, InitialNormState)]
    known = dict.fromkeys(_momenta(state)) | _by_path(ratios + initial)
    return known if known or nodes else None


def _momenta(state: Any) -> ByPath:
    """The momentum, or its 8-bit codes, of what this library's optimizers train."""
    nodes = nodes_in_groups(state, optax.TraceState, Int8TraceState)
    return _by_path(node.trace for labels, node in nodes if labels[-1:] == (MATRIX,))


def matrices_of(
    params: PyTree, numbers: WeightDimensionNumbers, like: ByPath, where: str
) -> Matrices:
    """The matrices of which ``where`` has these arrays, by path."""

    def kept(tree: PyTree) -> PyTree:
        return jax.tree.map_with_path(
            lambda path, leaf: leaf if names_on(path) in like else optax.MaskedNode(),
            tree,
        )

    if not like:
        raise ValueError(f"{where} has no matrices: there is nothing to read.")
    try:
        axes_by_leaf = matrix_axes(numbers, kept(params) if numbers is None else params)
    except ValueError:  # Of parameters that the optimizer has not seen.
        axes_by_leaf = matrix_axes(numbers, kept(params))
    axes_tree = kept(axes_by_leaf)
    axes_of, leaves = by_name(axes_tree), jax.tree.leaves_with_path(params)
    if missing := like.keys() - {names_on(path) for path, _ in leaves}:
        raise ValueError(
            f"{where} has matrices that params does not have, such as "
            f"{'.'.join(min(missing))!r}: pass the parameters that the optimizer updates."
        )
    for path, leaf in leaves:
        if (name := names_on(path)) not in like:
            continue
        axes, shape = axes_of.get(name), np.shape(like[name])
        batch_shape = None if axes is None else axes.batch_shape(leaf)
        if axes is None or (batch_shape != shape and like[name] is not None):
            here = (
                "no matrix" if axes is None else f"matrices of batch shape {batch_shape}"
            )
            raise ValueError(
                f"parameter {name_and_shape(path, leaf)} is {here}, but in {where} "
                f"matrices of batch shape {shape}: pass the weight_dimension_numbers "
                "that the optimizer was built with."
            )
    return Matrices.of(axes_tree, params)


def _of_matrices(
    at: dict[str, jax.Array], weight_norm: jax.Array, eta: ArrayLike | None
) -> dict[str, jax.Array]:
    """The readouts of the matrices in one leaf, and its fields of the state."""
    ratio, raw, c = at["trust_ratio"], at["raw_trust_ratio"], at["calibration"]
    first, is_set = at["anchor_weight_norm"], at["anchor_count"] > 0
    known = first > 0
    readouts = at | {
        "calibration": jnp.where(is_set & (c == 0), jnp.inf, c),
        "weight_norm": weight_norm,
        "growth": jnp.where(known, weight_norm / jnp.where(known, first, 1), 1),
        "at_r_min": raw < ratio,
        "at_r_max": raw > ratio,
        "started": is_set | known | (at["direction_norm"] != 0),
        "anchored": is_set & (c != 0),
    }
    if eta is not None:
        moved = jnp.asarray(eta, ratio.dtype) * ratio * at["direction_norm"]
        readouts["relative_step"] = moved / jnp.where(moved == 0, 1, at["weight_norm"])
    return readouts


def _learning_rates(
    learning_rate: LearningRate, state: PyTree, groups: Mapping[Path, Labels]
) -> ByPath:
    """η of the last update of each matrix; none if not known."""
    injected = list(_injected(state))
    schedules = nodes_in_groups(state, optax.ScaleByScheduleState)
    counts = [(labels, node.count) for labels, node in schedules]
    if learning_rate is not None and not isinstance(learning_rate, Mapping):
        _require_one_rate(groups, [labels for labels, *_ in injected], counts)
    rates: ByPath = {}
    for path, labels in groups.items():
        rate: Any = learning_rate
        if learning_rate is None:
            rate = _injected_rate(injected, labels)
        elif isinstance(learning_rate, Mapping):
            rate = _rate_of_group(learning_rate, path, labels)
        if callable(rate):
            count = _innermost(counts, labels)
            if count is None:
                raise ValueError(
                    "learning_rate is a schedule, but the state has no count for it: "
                    "pass the number that the optimizer used, or the schedule that it "
                    "was built with."
                )
            rate = rate(jnp.maximum(jnp.asarray(count) - 1, 0))
        if rate is not None:
            if np.ndim(rate):
                validate.refuse("learning_rate", rate, _FORMS)
            if not isinstance(rate, jax.Array):  # Looking at one would wait for its step.
                validate.number("learning_rate", rate, at_least=0)
            rates[path] = rate
    unknown = [path for path in groups if path not in rates]
    if rates and unknown:
        raise ValueError(
            f"the state holds the learning rates of some matrices, but not that of "
            f"{'.'.join(unknown[0])!r}: {_FORMS}."
        )
    return rates


def _require_one_rate(
    groups: Mapping[Path, Labels],
    injected: Sequence[Labels],
    counts: list[tuple[Labels, jax.Array]],
) -> None:
    """Refuse one rate for all matrices where the state shows several."""
    places = [(labels, labels) for labels in injected]
    if len({_innermost(places, labels) for labels in groups.values()}) > 1:
        raise ValueError(
            "learning_rate is one for all matrices, but their groups have their own "
            "in the state (optax.inject_hyperparams): leave learning_rate out."
        )
    if len({_innermost(counts, labels) is None for labels in groups.values()}) > 1:
        raise ValueError(
            "learning_rate is one for all matrices, but some groups have a schedule "
            "and others do not: pass a mapping from the labels of optax.partition to "
            "numbers and schedules."
        )


def _rate_of_group(rates: Mapping[Any, Any], path: Path, labels: Labels) -> Any:
    """The rate of the innermost label that has one."""
    known = [rates[label] for label in labels if rates.get(label) is not None]
    if not known:
        raise ValueError(
            f"learning_rate has no entry for {'.'.join(path)!r} in the group "
            f"{' / '.join(map(str, labels))!r}: {_FORMS}."
        )
    return known[-1]


def _injected_rate(
    injected: Sequence[tuple[Labels, ArrayLike, bool]], labels: Labels
) -> ArrayLike | None:
    """The rate that optax.inject_hyperparams holds for a group; None if none does."""
    around = [each for each in injected if each[0] == labels[: len(each[0])]]
    inside = [each for each in around if each[2]]
    if len(around) > 1 and not inside:
        raise ValueError(
            "the state holds several learning rates, none of them of the "
            f"optimizer that has the ratios: {_FORMS}."
        )
    # The innermost of nested injections is the last one.
    return _innermost([each[:2] for each in inside[::-1] or around], labels)


def _injected(
    tree: PyTree, labels: Labels = ()
) -> Iterator[tuple[Labels, ArrayLike, bool]]:
    """Labels around the rates of optax.inject_hyperparams; if these are around ratios."""
    for inside, node in nodes_in_groups(tree, *_INJECTED, labels=labels):
        rate, inner = node.hyperparams.get("learning_rate"), node.inner_state
        if rate is not None:
            yield inside, rate, bool(nodes_of(inner, CalibratedTrustRatioState))
        yield from _injected(inner, inside)


def _innermost(labelled: list[tuple[Labels, _Value]], labels: Labels) -> _Value | None:
    """What stands in the innermost group around a leaf; the first of several."""
    around = [(at, value) for at, value in labelled if at == labels[: len(at)]]
    return max(around, key=lambda pair: len(pair[0]), default=(None, None))[1]
