"""Read norms, ratios and steps of every matrix off an optimizer's state."""

from collections.abc import Iterable
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.diagnostics.readouts.learning_rates import LearningRate, learning_rates
from orscale_jax.diagnostics.readouts.reading import Reading, with_matrices
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.master_weights import MasterWeightsState, with_master_weights
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.relatives import InitialNormState
from orscale_jax.transforms.stages import FromFirstNonzeroUpdateState, RateMultiplierState
from orscale_jax.transforms.trust_ratio import CalibratedTrustRatioState
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.names import Path, name_and_shape, names_on
from orscale_jax.trees.nodes import Labels, nodes_in_groups, nodes_of

# Arrays of the leaves of matrices, by path.
ByPath: TypeAlias = dict[Path, Any]

# The fields with one entry per matrix that all states of the ratio have.
_FIELDS = [
    name
    for name in CalibratedTrustRatioState._fields
    if name not in ("anchor_count", "bounds")
]


def read(
    state: Any,
    params: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
    *,
    learning_rate: LearningRate = None,
) -> Reading:
    r"""Read norms, ratios and steps of every matrix off an optimizer's state.

    Call it with what a training loop holds after ``optax.apply_updates``, inside or
    outside of ``jax.jit``. The update itself computed everything but ``weight_norm``, and
    keeps it in its state; the cost is one norm of the parameters. Nothing is sent to the
    host. On a mesh, one number per matrix is summed over the devices that share it.

    Args:
      state: The state after the update, of :func:`orscale_jax.orscale`,
        :func:`orscale_jax.muon`, an ablation or one of the family, in any of Optax's
        wrappers; or an object that holds it as ``opt_state``: a ``flax.nnx.Optimizer`` or
        a ``TrainState``.
      params: The parameters after the update; of an NNX model
        ``nnx.state(model, nnx.Param)``.
      weight_dimension_numbers: The dimension numbers of the optimizer.
      learning_rate: The :math:`\eta` of the last update, or the schedule that the
        optimizer was given, whose count is in the state. Where groups of
        :func:`optax.partition` have different ones: a mapping from their labels to
        numbers and schedules, or a tree of them like the parameters, or a prefix of one.
        None: the rates of :func:`optax.inject_hyperparams`, if the state has them;
        otherwise ``relative_step`` is None. Without the ``learning_rate_multipliers`` of
        the optimizer: these are in the state.

    Returns:
      A :class:`Reading`.

    Raises:
      ValueError: If the state is of another optimizer, has other matrices or has none, a
        schedule is given and the state has no count, or one rate is given although the
        state shows that the groups have different ones: some have a schedule and others
        do not, or each has its own in the state.

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
    state, params = unbox(getattr(state, "opt_state", state)), unbox(params)
    params = with_master_weights(nodes_of(state, MasterWeightsState), params)
    ratios = _with_ratios(state)
    started = _by_path(
        node.started for node in nodes_of(state, FromFirstNonzeroUpdateState)
    )
    initial = _by_path(node.initial_norm for node in nodes_of(state, InitialNormState))
    like = {path: at["trust_ratio"] for path, (_, at) in ratios.items()}
    like |= started | initial
    if not like:
        _refuse_without_matrices(state)
    axes_of = _axes_of(params, weight_dimension_numbers, like)
    found = {
        path: {"weight_norm": norm}
        for path, norm in _weight_norms(params, axes_of, like).items()
    }
    groups = {path: labels for path, (labels, _) in ratios.items()}
    rates = learning_rates(learning_rate, state, params, groups) if groups else None
    rates = _multiplied(rates or {}, state)
    for path, (_, at) in ratios.items():
        found[path] |= _of_matrices(at, found[path]["weight_norm"], rates.get(path))
    for path, norm in initial.items():
        found[path]["growth"] = found[path]["weight_norm"] / norm
    for path, on in started.items():
        found[path]["started"] = on != 0

    def tree(field: str) -> PyTree:
        if not any(field in readouts for readouts in found.values()):
            return None
        masked = optax.MaskedNode()
        return jax.tree.map_with_path(
            lambda path, _: found.get(names_on(path), {}).get(field, masked), params
        )

    paths = (path for path, _ in jax.tree.leaves_with_path(params))
    axes = tuple(axes_of.get(names_on(path)) for path in paths)
    matrices = Matrices(jax.tree.structure(params), axes)
    return with_matrices(matrices, map(tree, Reading._fields))


def _refuse_without_matrices(state: PyTree) -> NoReturn:
    if nodes_of(state, FromFirstNonzeroUpdateState, InitialNormState):
        raise ValueError("the optimizer has no matrices: there is nothing to read.")
    remedy = "pass the state of an optimizer of orscale_jax"
    _checks.refuse("state", type(state), remedy)


def _with_ratios(state: PyTree) -> dict[Path, tuple[Labels, dict[str, jax.Array]]]:
    """For each leaf with trust ratios: the labels around it, and its arrays by field."""
    found: dict[Path, tuple[Labels, dict[str, jax.Array]]] = {}
    for labels, node in nodes_in_groups(state, CalibratedTrustRatioState):
        fields = {name: _by_path([getattr(node, name)]) for name in _FIELDS}
        for path in fields["trust_ratio"]:
            at = {name: jnp.asarray(arrays[path]) for name, arrays in fields.items()}
            found[path] = labels, at | {"bounds": jnp.asarray(node.bounds)}
    return found


def _multiplied(rates: dict[Path, ArrayLike], state: PyTree) -> ByPath:
    """The rate of each matrix, from that of its leaf and the multipliers in the state."""
    multipliers = _by_path(
        node.learning_rate_multiplier for node in nodes_of(state, RateMultiplierState)
    )
    return {
        path: rate * multipliers[path] if path in multipliers else rate
        for path, rate in rates.items()
    }


def _by_path(trees: Iterable[PyTree]) -> ByPath:
    leaves = (leaf for tree in trees for leaf in jax.tree.leaves_with_path(tree))
    return {names_on(path): array for path, array in leaves}


def _axes_of(
    params: PyTree, weight_dimension_numbers: WeightDimensionNumbers, like: ByPath
) -> dict[Path, MatrixAxes]:
    """The axes of the matrices that the state has."""
    tree = params
    if weight_dimension_numbers is None:  # Other leaves may be another optimizer's.
        tree = jax.tree.map_with_path(
            lambda path, leaf: leaf if names_on(path) in like else optax.MaskedNode(),
            params,
        )
    matrices = Matrices.of(weight_dimension_numbers, tree)
    found = zip(map(names_on, matrices.paths), matrices.of_leaves, strict=True)
    return {path: axes for path, axes in found if path in like}


def _weight_norms(
    params: PyTree, axes_of: dict[Path, MatrixAxes], like: ByPath
) -> ByPath:
    """‖W‖ of the matrices that the state has, with the shardings of its arrays."""
    norms = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        array, axes = like.get(names_on(path)), axes_of.get(names_on(path))
        if array is not None:
            _require_same(path, leaf, axes, array)
            norms[names_on(path)] = _norms(axes, jnp.asarray(leaf), array)
    if missing := [path for path in like if path not in norms]:
        raise ValueError(
            f"the state has matrices that params does not have, such as "
            f"{'.'.join(missing[0])!r}: pass the parameters that the optimizer updates."
        )
    return norms


def _require_same(path: Any, leaf: Any, axes: MatrixAxes | None, array: Any) -> None:
    ours = None if axes is None else axes.batch_shape(leaf)
    if ours != np.shape(array):
        here = "no matrix" if ours is None else f"matrices of batch shape {ours}"
        raise ValueError(
            f"parameter {name_and_shape(path, leaf)} is {here}, but in the state "
            f"matrices of batch shape {np.shape(array)}: pass read() the "
            "weight_dimension_numbers that the optimizer was built with."
        )


def _norms(axes: Any, leaf: jax.Array, like: Any) -> jax.Array:
    norms = axes.norms(leaf.astype(compute_dtype(leaf)))
    return typed_sharding.shard_like(norms, jnp.asarray(like))


def _of_matrices(
    at: dict[str, jax.Array], weight_norm: jax.Array, eta: ArrayLike | None
) -> dict[str, jax.Array]:
    """The readouts of the matrices in one leaf, from its fields of the state."""
    ratio, c = at["trust_ratio"], at["calibration"]
    r_min, r_max = at["bounds"].astype(ratio.dtype)
    readouts = {
        "trust_ratio": ratio,
        "raw_trust_ratio": at["raw_trust_ratio"],
        "calibration": c,
        "weight_norm": weight_norm,
        "direction_norm": at["direction_norm"],
        "growth": _growth(weight_norm, at["anchor_weight_norm"], c),
        "at_r_min": ratio <= r_min,
        "at_r_max": ratio >= r_max,
        "anchored": (c != 0) & (c != 1) & jnp.isfinite(c),
    }
    if eta is not None:
        moved = jnp.asarray(eta, ratio.dtype) * ratio * at["direction_norm"]
        norm = jnp.where(moved == 0, 1, at["weight_norm"])
        readouts["relative_step"] = moved / norm
    return readouts


def _growth(norm: jax.Array, anchor_norm: jax.Array, c: jax.Array) -> jax.Array:
    """‖W‖/‖W₀‖; 1 where W₀ is still to come, NaN where it is not known."""
    known = anchor_norm > 0
    to_come = (c == 0) | (c == 1) | jnp.isinf(c)
    growth = jnp.where(known, norm / jnp.where(known, anchor_norm, 1), 1)
    return jnp.where(known | to_come, growth, jnp.nan)
