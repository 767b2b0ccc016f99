"""The abstract state of an optimizer: what it keeps for each parameter, and who does."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.transforms import MaskedState, PartitionState

from orscale_jax import validate
from orscale_jax.family.sphere import InitialNormState
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import SHAPE, decisions, is_axes_leaf
from orscale_jax.sharding.state_shardings import state_shardings
from orscale_jax.transforms import orthogonalize, stages
from orscale_jax.transforms.matrices import ADAMW, MATRIX
from orscale_jax.transforms.momentum import Int8TraceState
from orscale_jax.transforms.stages import Scale
from orscale_jax.transforms.trust_ratio import CalibratedTrustRatioState
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.checks import state_arrays
from orscale_jax.trees.names import Path, name_and_shape, names_on
from orscale_jax.trees.nodes import is_masked, nodes_of

# Rules of other optimizers: with a state for the parameter, and without.
OTHER, STATELESS = "other", "stateless"
REFUSED = "refused"  # By an optimizer of this library, until it has dimension numbers.
# The states that only matrices of this library have.
_STATES = InitialNormState, CalibratedTrustRatioState
_OURS = frozenset(field for state in _STATES for field in state._fields)
_SUMMED = "acc_grads"  # Of optax.MultiSteps: kept for every parameter, by no optimizer.


class ParameterState(NamedTuple):
    """What an optimizer keeps for one parameter."""

    rule: str  # See ParameterRow, as for the label.
    label: str = ""
    arrays: list[Any] | None = None  # None if it is refused.
    axes: MatrixAxes | None = None  # Of its matrices, if it has any.
    scale: Scale | None = None  # Of their Q.
    why: str = ""  # What has decided that it has matrices, or none.
    stage: int = 0  # Which of those that orthogonalize has them.


class _Part(NamedTuple):
    """A part of a state, without the partitions and masks inside it."""

    label: str  # Of the user's partitions around it, such as "decoder/frozen".
    rule: str  # Of the parameters of which it keeps anything.
    is_innermost: bool  # Whether the user has no partition inside it.
    is_masked: bool  # Whether the user has a mask around it.
    has_trees: bool  # Whether it has trees like the parameters, if all is masked in them.
    arrays: Mapping[Path | None, Sequence[Any]]  # By parameter, or under None.
    owners: frozenset[Path | None]  # The parameters of which an optimizer keeps any.


class AbstractState(NamedTuple):
    """The state that an optimizer would have."""

    kept: Mapping[Any, ParameterState]  # By the path of the parameter.
    shared_bytes: int  # Of what belongs to no parameter.
    polar: Sequence[orthogonalize.PolarOptions]  # Of the stages that orthogonalize.

    @classmethod
    def of(cls, optimizer: Any, params: PyTree) -> "AbstractState":
        """Trace an optimizer's ``init``, and find what it keeps for each parameter."""
        # optax.tree.map_params would find it, too, but calls init with a placeholder that
        # most label functions of optax.partition cannot read.
        validate.transformation("optimizer", optimizer)
        with (
            orthogonalize.initialized.open() as polar,
            stages.scaled.open() as scaled,
            decisions.open() as decided,
        ):
            # A new function, so that it is traced, here and when init is called.
            state = jax.eval_shape(lambda params: optimizer.init(params), params)
        state, bare = unbox(state), unbox(params)
        axes_of = {
            names_on(path): (axes, stage)
            for stage, (matrices, _) in enumerate(polar)
            for path, axes in zip(matrices.paths, matrices.of_leaves, strict=True)
        }
        scales = {
            names_on(path): scale for matrices, scale in scaled for path in matrices.paths
        }
        whys = {name: why for note in decided for name, why in note.items()}
        parts = list(_parts(state, bare))
        kept, leaf_of = {}, leaves_by_path(bare)
        for path, leaf in leaf_of.items():
            name = names_on(path)
            holding = [part for part in parts if name in part.arrays]
            rules = {part.rule for part in holding if name in part.owners}
            axes, stage = axes_of.get(name, (None, 0))
            # Of an init in jax.vmap, they are those of one of several models.
            if axes and len(axes.batch + axes.matrix) != np.ndim(leaf):
                axes = None
            rules |= {MATRIX} if axes else set()
            rule = next((x for x in (MATRIX, ADAMW, OTHER) if x in rules), STATELESS)
            # A compiled init decides nothing here.
            given = SHAPE if np.ndim(leaf) < 2 else "numbers"
            ours = polar and rule in (MATRIX, ADAMW)
            kept[path] = ParameterState(
                rule,
                _label_of(name, parts),
                [array for part in holding for array in part.arrays[name]],
                axes,
                scales.get(name) if axes else None,
                whys.get(name, given) if ours else "",
                stage,
            )
        _refuse_vectors(parts, leaf_of, kept)
        shared = (array for part in parts for array in part.arrays.get(None, ()))
        return cls(kept, nbytes(shared), [options for _, options in polar])


def leaves_by_path(tree: PyTree) -> dict[Any, Any]:
    """The leaves that are not masked, by path."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_axes_leaf)
    return {path: leaf for path, leaf in leaves if not is_masked(leaf)}


def nbytes(arrays: Iterable[Any]) -> int:
    """The bytes of arrays, which may be abstract."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def nbytes_per_device(optimizer: Any, params: PyTree) -> int | None:
    """The bytes of a state on each device, where :func:`state_shardings` tells."""
    # It does not for parameters on several meshes, axes that do not divide what they
    # shard, and an init through which JAX cannot propagate shardings.
    try:
        shardings = jax.tree.leaves(state_shardings(optimizer, params))
        state = jax.eval_shape(lambda params: optimizer.init(params), params)
        return nbytes(
            jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)
            for array, sharding in zip(jax.tree.leaves(state), shardings, strict=True)
        )
    except Exception:  # An audit shows what it can, whatever a foreign init raises.
        return None


def _label_of(name: Path, parts: Sequence[_Part]) -> str:
    """The label of a parameter in the user's partitions: see :class:`ParameterRow`.

    With ``optax.partition({"body": optax.partition({"on": tx, "off": off}, f)}, g)`` the
    label is "body/on" where ``tx`` keeps something for the parameter, since "on" is an
    innermost group. If ``off`` keeps no state, it is "body/off" for all others.
    """
    innermost = {p.label for p in parts if p.is_innermost or p.is_masked} - {""}
    labels = [p.label for p in parts if name in p.arrays and p.label in innermost]
    if labels:
        return " and ".join(dict.fromkeys(labels))
    # No group has it: it belongs to one of those that have no trees of parameters.
    keeping = {part.label for part in parts if part.has_trees}
    possible = [
        part.label
        for part in parts
        if part.is_masked or (part.is_innermost and part.label not in keeping)
    ]
    names = dict.fromkeys(label or "no label" for label in possible)
    return " or ".join(names) if any(possible) else ""


def _parts(state: Any, params: PyTree) -> Iterator[_Part]:
    """The parts of a state, those around others first."""
    wrappers = PartitionState, MaskedState

    def part(
        node: Any, label: str, rule: str, is_innermost: bool, is_masked: bool
    ) -> _Part:
        arrays: dict[Path | None, list[Any]] = {}
        owners: set[Path | None] = set()
        for entry in state_arrays(node, params, by_structure=True):
            owner = entry.owner
            # Of a single array without a name, shapes and fields tell its state.
            if owner == () and entry.array.shape != np.shape(params):
                owner = owner if entry.field in _OURS else None
            arrays.setdefault(owner, []).append(entry.array)
            owners |= {owner} if entry.field != _SUMMED else set()
        trees = bool({*arrays} - {None} or nodes_of(node, optax.MaskedNode))
        kept = frozenset(owners - {None})
        return _Part(label, rule, is_innermost, is_masked, trees, arrays, kept)

    def is_ours(partition: PartitionState) -> bool:
        """Whether an optimizer of this library made a partition."""
        groups = partition.inner_states
        if {*groups} != {MATRIX, ADAMW}:
            return False
        momenta = optax.TraceState, Int8TraceState
        inside = nodes_of(groups[MATRIX], PartitionState, *momenta)
        return bool(inside) and not isinstance(inside[0], PartitionState)

    def below(node: Any, label: str = "", is_masked: bool = False) -> Iterator[_Part]:
        inside = nodes_of(node, *wrappers)
        partitions = [x for x in inside if isinstance(x, PartitionState)]
        rest = jax.tree.map(
            lambda x: None if isinstance(x, wrappers) else x,
            node,
            is_leaf=lambda x: isinstance(x, wrappers),
        )
        yield part(rest, label, OTHER, all(map(is_ours, partitions)), is_masked)
        for wrapper in inside:
            if isinstance(wrapper, MaskedState):
                yield from below(wrapper.inner_state, label, is_masked=True)
            elif is_ours(wrapper):
                for rule in (MATRIX, ADAMW):
                    group = wrapper.inner_states[rule]
                    yield part(group, label, rule, True, False)
            else:
                for key, group in wrapper.inner_states.items():
                    inner = f"{label}/{key}" if label else str(key)
                    yield from below(group.inner_state, inner)

    return below(state)


def _refuse_vectors(
    parts: Sequence[_Part], leaf_of: Mapping[Any, Any], kept: Mapping[Any, ParameterState]
) -> None:
    """Refuse a state of vectors that hold several parameters, as optax.flatten makes."""
    without = [path for path, state in kept.items() if state.rule == STATELESS]
    sizes = (math.prod(leaf_of[path].shape) for path in without if path)
    smallest = min(sizes, default=0)
    for part in parts:
        known = part.rule == MATRIX or (part.rule == OTHER and not without)
        for array in () if known or part.owners else part.arrays.get(None, ()):
            floating = jnp.issubdtype(array.dtype, jnp.floating)
            if (shape := array.shape) and floating and math.prod(shape) >= smallest:
                path = next(iter(without or leaf_of))
                raise ValueError(
                    f"the optimizer keeps an array of shape {shape} for no single "
                    "parameter, and nothing for parameter "
                    f"{name_and_shape(path, leaf_of[path])}: it trains other arrays, as "
                    "inside optax.contrib.split_real_and_imaginary, or inside "
                    "optax.flatten, which makes one vector of all parameters, so that "
                    "AdamW would train all of them. Take that wrapper away."
                )
