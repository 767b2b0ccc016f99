"""Norms, ratios and steps of every matrix, read off an optimizer's state."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

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
from orscale_jax.trees.nodes import broadcast_prefix, nodes_in_groups, nodes_of

# Arrays of the leaves of matrices, by path.
ByPath: TypeAlias = dict[Path, Any]


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
    learning_rate: PyTree | optax.Schedule | None = None,
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
        optimizer, whose count is in the state. If parameters have different rates, a tree
        of numbers like the parameters, or a prefix of one. None: the rate of
        :func:`optax.inject_hyperparams`, if the state has exactly one; otherwise
        ``relative_step`` is None. A later :func:`orscale_jax.scale_by_path` is ignored.

    Returns:
      A :class:`Reading`. It shares no array with ``state``.

    Raises:
      ValueError: If the state belongs to another optimizer, or has other matrices or no
        matrices. Also if you pass a schedule and the state has no count.

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
    ratios = {
        path: dict(zip(NUMBERS, jnp.unstack(jnp.asarray(numbers)), strict=True))
        for node in nodes_of(state, CalibratedTrustRatioState)
        for path, numbers in by_name(node.numbers).items()
    }
    initial = _by_path(x.initial_norm for x in nodes_of(state, InitialNormState))
    if (like := entries_of(state)) is None:
        remedy = "pass the state of an optimizer of orscale_jax"
        validate.refuse("state", type(state), remedy)
    matrices = matrices_of(params, weight_dimension_numbers, like)
    quantities: dict[Path, dict[str, Any]] = {}
    momenta = _momenta(state)
    for path, (axes, leaf) in zip(matrices.paths, matrices.each(params), strict=True):
        name = names_on(path)
        norm = axes.norms(jnp.asarray(leaf).astype(compute_dtype(leaf)))
        if like[name] is not None:
            norm = typed_sharding.shard_like(norm, jnp.asarray(like[name]))
        quantities[name] = {"weight_norm": norm}
        if name in momenta and name not in ratios:
            size = jnp.abs(jnp.asarray(momenta[name]).astype(norm.dtype))
            started = axes.reduce(jnp.sum, size) != 0
            quantities[name]["started"] = typed_sharding.shard_like(started, norm)
    rates = by_name(_learning_rates(learning_rate, state, params))
    for path, at in ratios.items():
        norm = quantities[path]["weight_norm"]
        quantities[path] |= _of_matrices(at, norm, rates.get(path))
    for path, first in initial.items():
        quantities[path]["growth"] = quantities[path]["weight_norm"] / first

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
    return [leaves.get(name) for name in by_name(reading.weight_norm)]


def _by_path(trees: Iterable[PyTree]) -> ByPath:
    return {name: array for tree in trees for name, array in by_name(tree).items()}


def entries_of(state: Any) -> ByPath | None:
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
    params: PyTree, numbers: WeightDimensionNumbers, like: ByPath
) -> Matrices:
    """The matrices of which the state has these arrays, by path."""

    def kept(tree: PyTree) -> PyTree:
        return jax.tree.map_with_path(
            lambda path, leaf: leaf if names_on(path) in like else optax.MaskedNode(),
            tree,
        )

    if not like:
        raise ValueError("the state has no matrices: there is nothing to read.")
    try:
        axes_by_leaf = matrix_axes(numbers, kept(params) if numbers is None else params)
    except ValueError:  # Of parameters that the optimizer has not seen.
        axes_by_leaf = matrix_axes(numbers, kept(params))
    axes_tree = kept(axes_by_leaf)
    axes_of, leaves = by_name(axes_tree), jax.tree.leaves_with_path(params)
    if missing := like.keys() - {names_on(path) for path, _ in leaves}:
        raise ValueError(
            "the state has matrices that params does not have, such as "
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
                f"parameter {name_and_shape(path, leaf)} is {here}, but in the state "
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


def _learning_rates(given: Any, state: PyTree, params: PyTree) -> PyTree:
    """η of the last update of each parameter; none if it is not known."""
    if given is None:
        # A parameter may be called like a hyperparameter.
        injected = [
            rate
            for path, rate in optax.tree.get_all_with_path(state, "learning_rate")
            if len(path) > 1 and getattr(path[-2], "name", "") == "hyperparams"
        ]
        given = injected[0] if len(injected) == 1 else None
    if callable(given):
        steps = nodes_of(state, optax.ScaleByScheduleState)
        if not steps:
            raise ValueError(
                "learning_rate is a schedule, but the state has no count for it: pass "
                "the number that the optimizer used, or its own schedule."
            )
        given = given(jnp.maximum(jnp.asarray(steps[0].count) - 1, 0))
    if given is None:
        return {}
    misfit = "learning_rate must be a number, a schedule, or a tree like the parameters"
    rates = broadcast_prefix(given, params, misfit)
    for rate in jax.tree.leaves(rates):
        if np.ndim(rate):
            validate.refuse("learning_rate", rate, "pass a number for each parameter")
        if not isinstance(rate, jax.Array):  # Looking at one would wait for its step.
            validate.number("learning_rate", rate, at_least=0)
    return rates
