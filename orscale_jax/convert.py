"""The state of a run that continues: converted, or checked after it was restored."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.family.sphere import InitialNormState
from orscale_jax.sharding import param_shardings, typed_sharding
from orscale_jax.transforms import momentum as int8_blocks, orthogonalize
from orscale_jax.transforms.momentum import TRACE, TRACE_SCALE
from orscale_jax.transforms.trust_ratio import NUMBERS, CalibratedTrustRatioState
from orscale_jax.trees.boxes import PyTree, rebox, trained, unbox
from orscale_jax.trees.checks import StateArray, array_type, require_state, state_arrays
from orscale_jax.trees.names import Path, by_name, listed, names_on
from orscale_jax.trees.nodes import nodes_of

_NUMBERS = "numbers"  # The field of the ratio's state that holds NUMBERS.
_CODES = {TRACE_SCALE: TRACE, "mu_scale": "mu", "nu_scale": "nu"}  # Of the scales.
_COUNTS = frozenset({"count", "gradient_step", "mini_step"})
_MOMENTS = frozenset({TRACE, "mu", "nu"})
# Fields of states that hold arguments: of optax.contrib.muon and of schedule_free. Those
# of inject_hyperparams are below "hyperparams".
_SETTINGS = frozenset({"ns_coeffs", "b1"})
_CHANGED = 0.25  # A step does not change most matrices' norms by so much.


class _OldState:
    """What a state holds."""

    def __init__(self, arrays: Sequence[StateArray]) -> None:
        #: The entries of parameters, by field and owner; the arrays of others, by place.
        self.of_params: dict[tuple[str, Path | None], list[StateArray]] = {}
        self.others: dict[Path, Any] = {}
        #: All entries but settings, by the place of the node that they are fields of.
        self.nodes: dict[Path, list[StateArray]] = {}
        for entry in arrays:
            if entry.field not in _SETTINGS:
                self.nodes.setdefault(entry.place[:-1], []).append(entry)
            if entry.owner is None:
                self.others[entry.place] = entry.array
            else:
                self.of_params.setdefault((entry.field, entry.owner), []).append(entry)
        self.owners = dict.fromkeys(x.owner for x in arrays if x.owner is not None)
        #: The counts of the run's steps, by place.
        self.steps = {at: n for at, n in self.others.items() if self.counts_steps(at)}

    def has(self, owner: Path | None, *fields: str) -> bool:
        return any((field, owner) in self.of_params for field in fields)

    def shapes(self, owner: Path | None, *fields: str) -> set[tuple[int, ...]]:
        entries = (x for f in fields for x in self.of_params.get((f, owner), []))
        return {np.shape(entry.array) for entry in entries}

    def array(self, field: str, wanted: StateArray) -> Any:
        """The array of a field of an entry's parameter, at its own place or the only."""
        candidates = self.of_params[field, wanted.owner]
        here = [x for x in candidates if x.place == wanted.place] or candidates
        if len(here) > 1:
            places = " and ".join(repr(".".join(entry.place)) for entry in candidates)
            raise ValueError(
                f"the old state holds {field} of {wanted.name} several times, at "
                f"{places}: pass the part of it that the new optimizer continues."
            )
        return here[0].array

    def fields_beside(self, place: Path) -> set[str]:
        """The fields of the node that has a field at this place, but that one."""
        beside = {entry.field for entry in self.nodes.get(place[:-1], [])}
        return beside - {place[-1]}

    def counts_steps(self, place: Path) -> bool:
        """Whether a count is that of a schedule or of moments, and so the run's step."""
        beside = self.fields_beside(place)
        return place[-1] == "count" and (not beside or not _MOMENTS.isdisjoint(beside))

    def age(self, field: str, owner: Path | None) -> Any:
        """The count beside a moment of a parameter, or None."""
        moments = self.of_params.get((field, owner), [])
        counts = ((*moment.place[:-1], "count") for moment in moments)
        return next((self.others[at] for at in counts if at in self.others), None)


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """From what the old state holds to the arrays of the new one."""

    old: _OldState
    new: _OldState
    shapes: dict[Path, tuple[int, ...]]
    norms: dict[Path, jax.Array]  # Of the matrices of each parameter.
    momentum: Any
    nesterov: bool
    allow_new: bool

    def array(self, entry: StateArray) -> jax.Array:
        """The array that replaces an initial one in the new state."""
        owner, shape, old = entry.owner, np.shape(entry.array), self.found(entry)
        of_param = self.shapes.get(owner or (), shape)
        resized = self.old.shapes(owner, TRACE, "mu") - {of_param}
        if old is None or (shape != of_param and (resized or np.shape(old) != shape)):
            return entry.array  # What was kept of other matrices starts over, too.
        if entry.field in NUMBERS and (now := self.norms.get(owner or ())) is not None:
            then = self.old.array("weight_norm", entry)
            pairs = (jnp.linalg.norm(now), jnp.linalg.norm(then)), (now, then)
            whole, each = ((abs(x - y) <= _CHANGED * y).all() for x, y in pairs)
            # The weights are those of the state, but they form other matrices.
            return jnp.where(whole & ~each, entry.array, old).astype(entry.array.dtype)
        if np.shape(old) != shape:
            if not self.allow_new:
                raise ValueError(
                    f"{entry.field} of {entry.name} has shape {np.shape(old)} in the "
                    f"old state and {shape} in the new one. If the parameter has another "
                    "length along one axis, pass allow_new=True: what both have is kept. "
                    "Otherwise start over with optimizer.init(params)."
                )
            lengths = list(itertools.zip_longest(shape, np.shape(old)))
            if len(shape) != np.ndim(old) or sum(a != b for a, b in lengths) != 1:
                return entry.array
            both = tuple(map(slice, map(min, lengths)))
            new, kept = map(typed_sharding.gather, map(jnp.asarray, (entry.array, old)))
            new = new.at[both].set(kept.astype(new.dtype)[both])
            old = typed_sharding.shard_like(new, entry.array)
        # A copy, so that a donated step does not delete the arrays of the old state.
        return jnp.array(old, jnp.result_type(entry.array), copy=True)

    def found(self, entry: StateArray) -> Any:
        """What the old state knows of an entry of the new one, or None."""
        old, (place, owner, initial), field = self.old, entry, entry.field
        setting = field in _SETTINGS or place[-2:-1] == ("hyperparams",)
        if setting and field not in _COUNTS:  # A stage may be called hyperparams, too.
            return None
        if owner is None:
            same = old.others.get(place)
            alike = same is not None and array_type(same) == array_type(initial)
            if alike and old.fields_beside(place) == self.new.fields_beside(place):
                return same
            return self._count(entry) if field in _COUNTS else None
        adamw = field in ("mu", "nu") and self.new.has(owner, "nu")
        if adamw and not old.has(owner, "nu"):
            return None  # A first moment alone would make its steps far too long.
        if old.has(owner, field):
            return old.array(field, entry)
        if field == "mu" and not self.new.has(owner, "nu") and old.has(owner, TRACE):
            return old.array(TRACE, entry) / self._sum_of_average(entry, self.new)
        if field == TRACE and old.has(owner, "mu"):
            average = jnp.asarray(old.array("mu", entry), jnp.result_type(initial))
            return self._sum_of_average(entry, old) * average
        return None

    def _sum_of_average(self, entry: StateArray, averages: _OldState) -> Any:
        """The factor that makes M of an average of gradients: the next Q is the same."""
        if (mu := self.momentum) is None:
            raise ValueError(
                f"the momentum of {entry.name} is an average in one of the states and a "
                "sum in the other: pass momentum=, the decay rate of Muon's momentum "
                "(0.95 by default; not AdamW's b1)."
            )
        factor = 1 / (1 - mu)
        # The corrections of Optax's Muon; Lion and AdamW have others, or none.
        average, *_ = averages.of_params["mu", entry.owner]
        muon = (*average.place[:-1], "ns_coeffs") in averages.others
        if muon and self.nesterov and self.old.steps:
            age = self.old.age("mu", entry.owner)
            t = self._step() if age is None else age
            whole, last = 1 / (1 - mu ** (t + 2.0)), 1 / (1 - mu ** (t + 1.0))
            factor = factor * (whole * (mu + 1) / (mu * whole + last))
        return factor

    def _count(self, entry: StateArray) -> Any:
        """The count of a schedule, of moments, or of optax.MultiSteps."""
        if entry.field != "count":
            others = self.old.others.items()
            named = [array for place, array in others if place[-1] == entry.field]
            if len(named) == 1:
                return named[0]
            return self._step() if entry.field == "gradient_step" else None
        if not self.new.counts_steps(entry.place):
            return None
        moments = [e for e in self.new.nodes[entry.place[:-1]] if e.owner is not None]
        ages = (self.old.age(moment.field, moment.owner) for moment in moments)
        age = next((age for age in ages if age is not None), None)
        if age is not None:
            return age
        begins = moments and all(self.found(moment) is None for moment in moments)
        return None if begins else self._step()

    def _step(self) -> Any:
        """The number of steps that the run has taken; None if no count tells."""
        steps, tracer = self.old.steps, jax.core.Tracer
        concrete = {at: n for at, n in steps.items() if not isinstance(n, tracer)}
        known = {at: int(n) for at, n in jax.device_get(concrete).items()}
        if len({*known.values()}) > 1:
            told = ", ".join(f"{n} at {'.'.join(at)!r}" for at, n in known.items())
            raise ValueError(
                f"the counts in the old state differ: {told}. Set those that are not the "
                "run's step to it, with the filtering= of optax.tree.set."
            )
        return next(iter(steps.values()), None)


def convert_state(
    state: optax.OptState,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    *,
    momentum: ArrayLike | None = None,
    nesterov: bool = True,
    allow_new: bool = False,
) -> optax.OptState:
    r"""Convert the state of another optimizer, so that ``optimizer`` continues the run.

    Each of the two optimizers may be :func:`orscale`, :func:`muon`, one of the family,
    :func:`optax.contrib.muon` or :func:`optax.adamw`, in any of Optax's wrappers
    (``chain``, ``partition``, ``MultiSteps``). The old optimizer may also be SGD or Lion.
    A state without a first moment of the gradients, as with :func:`optax.rmsprop` and
    :func:`optax.novograd`, is refused. Do not convert the states of :func:`optax.lars`,
    :func:`optax.adamax`, :func:`optax.adabelief` and :func:`optax.contrib.adopt`. They
    look like states of SGD and AdamW, but their moments are other quantities.

    Arrays that both states hold for a parameter under the same name are kept: momentum,
    AdamW's moments, c and r. Arrays of wrappers at the same place in both states are kept
    as well, such as the ``weight_sum`` of :func:`optax.contrib.schedule_free`. New
    schedules start at the step of the run, or at 0 if no count in the old state tells the
    step. Bias corrections start at the age of their moments. Momentum is rounded to the
    new ``mu_dtype``; a conversion from "int8" to float32 and back changes nothing. Of 16
    low bits the upper 8 stay with ``bits=8``: master weights are rounded toward zero.
    Hyperparameters are those of ``optimizer``. Everything else starts as in
    ``optimizer.init``, and a new c is set at the next direction.

    A leaf may hold other matrices than before, such as a matrix for each head or parts of
    a fused projection. Its momentum is kept, and the numbers of each matrix, such as c,
    start over. If there are as many matrices as before, such as with another ``stride``,
    the numbers start over if the norm of a matrix differs by more than a quarter from the
    stored one, and that of the leaf does not.

    The momentum of :func:`optax.contrib.muon` is an average, :math:`(1 - \mu)` times the
    sum M of this library. The two terms of its Nesterov momentum have different bias
    corrections, whose difference vanishes as :math:`\mu^t`. M is scaled so that the next
    Q is the same. Later Q differ by less than :math:`\mu^t`, or not at all without
    ``nesterov``. The first moments of AdamW and Lion are averages with other decay rates,
    so an M made from them is an estimate.

    Args:
      state: The state of the old optimizer, or its ``flax.nnx.Optimizer``. It may also be
        a tree of dictionaries and lists that was restored without a target, from a
        checkpoint of one of these, of ``nnx.state`` of the optimizer, or of a
        ``TrainState``.
      optimizer: The new optimizer. If it is a ``flax.nnx.Optimizer``, the result is for
        its ``opt_state``.
      params: The parameters, or a model of Flax NNX.
      momentum: :math:`\mu` of the matrices' momentum, in [0, 1). It is needed if one of
        the states has an average and the other one has a sum.
      nesterov: Whether :func:`optax.contrib.muon` uses Nesterov's momentum.
      allow_new: Whether the old state may lack something, which then starts over. It may
        lack parameters, the moments of parameters that AdamW did not train before, and
        the new entries of a parameter that has another length along one axis. Entries
        of the same index are kept, and the numbers of each matrix, such as c, start over.
        A parameter of a quite different shape starts over as a whole.

    Returns:
      A tree like ``optimizer.init(params)``, with its dtypes, also under ``jax.jit``. It
      shares no array with ``state``, so a step that donates the new state does not delete
      ``state``.

    Raises:
      ValueError: If a parameter is missing from the old state (and ``allow_new`` is not
        set), has another shape, or would need a second moment that the state does not
        hold. Also if the old state belongs to another kind of optimizer, if ``momentum``
        is missing, or if a schedule would have to start at one of several steps that
        differ (under ``jax.jit``, where steps are unknown, it starts at the first of
        them). Also if the old state holds an array of a parameter several times under one
        name, or if the moments of the new state belong to no single parameter
        (:func:`optax.flatten`).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import convert_state, diagnostics, orscale
      >>> params = {"kernel": jnp.eye(2)}
      >>> old = optax.contrib.muon(1e-3)
      >>> _, state = old.update(params, old.init(params), params)
      >>> optimizer = orscale(1e-3)
      >>> state = convert_state(state, optimizer, params, momentum=0.95)
      >>> print(diagnostics.read(state, params).calibration["kernel"])
      0.0
    """
    if hasattr(state, "tx"):  # A flax.nnx.Optimizer, or a TrainState.
        state = state.opt_state
    elif isinstance(state, Mapping) and "opt_state" in state:  # As saved by itself.
        state = state["opt_state"]
    transformation = getattr(optimizer, "tx", optimizer)
    if hasattr(optimizer, "wrt"):
        params = trained(params, optimizer)
    validate.transformation("optimizer", transformation)
    validate.number("momentum", momentum, at_least=0, below=1, optional=True)
    validate.flag("nesterov", nesterov)
    # A new state begins with numbers from the host, as that of optimizer.init does.
    with jax.transfer_guard_host_to_device("allow"):
        with orthogonalize.initialized.open() as traced:
            new = transformation.init(params)
        bare, bare_params = unbox(new), unbox(params)
        if isinstance(bare_params, optax.LookaheadParams):
            bare_params = bare_params.fast  # Of which the state is.
        wanted = state_arrays(bare, bare_params)
        fields = {entry.field for entry in wanted if entry.owner is not None}
        # Restored without a target, a state of NNX has each array under "value".
        without_variables = jax.tree.map(
            lambda node: node["value"] if _is_variable(node) else node,
            state,
            is_leaf=_is_variable,
        )
        found = (
            state_arrays(unbox(tree), bare_params, {*_CODES, *_CODES.values(), *fields})
            for tree in (state, without_variables)
        )
        entries = max(found, key=lambda each: sum(x.owner is not None for x in each))
        old = _OldState(_decoded(entries))
        decoded = _decoded(wanted)
        shapes = {name: np.shape(leaf) for name, leaf in by_name(bare_params).items()}
        norms = _norms(traced, bare_params)
        conversion = _Conversion(
            old, _OldState(decoded), shapes, norms, momentum, nesterov, allow_new
        )
        _refuse_other_parameters(conversion)
        _refuse_other_moments(conversion)
        arrays = {entry[:2]: conversion.array(entry) for entry in decoded}
        for place, owner, scales in wanted:
            if place[-1:] == (_NUMBERS,):
                of_matrices = [arrays[(*place[:-1], x), owner] for x in NUMBERS]
                arrays[place, owner] = jnp.stack(of_matrices)
            if (field := _CODES.get(place[-1] if place else "")) is not None:
                codes = (*place[:-1], field), owner
                axis = int8_blocks.axis_of(arrays[codes].shape, scales.shape)
                dtype = jnp.uint8 if field == "nu" else jnp.int8
                encoded = int8_blocks.encode(arrays[codes], axis, dtype)
                arrays[codes], arrays[place, owner] = encoded
            if place[-1:] == ("low_bits",) and scales.dtype == jnp.uint8:
                arrays[place, owner] = (arrays[place, owner] >> 8).astype(jnp.uint8)
        converted = [arrays[entry[:2]] for entry in wanted]
        if transformation is not optimizer:  # Its variables hold an array each.
            return jax.tree.unflatten(jax.tree.structure(optimizer.opt_state), converted)
        return rebox(jax.tree.unflatten(jax.tree.structure(bare), converted), new)


@param_shardings.audit()
def check_state(
    state: optax.OptState, optimizer: optax.GradientTransformation, params: PyTree
) -> None:
    """Refuse a restored state that does not belong to the optimizer and the parameters.

    Call it after a restore and before the first step, with any Optax optimizer. The state
    has to have the structure, shapes and kinds of dtypes of ``optimizer.init(params)``.
    The arrays of the parameters have to be finite. The states of :func:`orscale` and
    ``family.hyperball`` also hold the norms of the matrices, by which a state of another
    model is told from that of this one, even if all its names and shapes agree.

    Args:
      state: The restored state.
      optimizer: The optimizer, which may be a ``flax.nnx.Optimizer``.
      params: The restored parameters, or a model of Flax NNX.

    Raises:
      ValueError: If the state does not fit. The message names the array and the
        parameter.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import check_state, muon
      >>> params, optimizer = {"kernel": jnp.eye(2)}, muon(1e-3)
      >>> check_state(optimizer.init(params), optimizer, params)
    """
    params = trained(params, optimizer)
    optimizer = getattr(optimizer, "tx", optimizer)
    validate.transformation("optimizer", optimizer)
    with orthogonalize.initialized.open() as polar:
        # A new function, so that it is traced, here and when init is called.
        wanted = jax.eval_shape(lambda params: optimizer.init(params), params)
    bare, weights = unbox((state, params))
    require_state(bare, unbox(wanted), weights)
    for entry in state_arrays(bare, weights, by_structure=True):
        if entry.owner is None or not jnp.issubdtype(entry.array.dtype, jnp.inexact):
            continue
        # c is infinite for a matrix that was zero.
        bad = jnp.isnan if entry.field == "numbers" else lambda x: ~jnp.isfinite(x)
        if jax.device_get(bad(entry.array).any()):
            raise ValueError(
                f"{entry.field} of parameter {entry.name} is not finite in the restored "
                "state: restore an earlier checkpoint."
            )
    stored: dict[Path, Any] = {}
    for node in nodes_of(bare, CalibratedTrustRatioState):
        # Where W was zero, c is zero, and the norm grows fast at first.
        numbers = jax.device_get((node.calibration, node.weight_norm))
        stored |= by_name(jax.tree.map(lambda c, x: np.where(c > 0, x, 0), *numbers))
    for node in nodes_of(bare, InitialNormState):
        stored |= by_name(node.initial_norm)
    changes = list[Any]()
    for name, norms in _norms(polar, weights).items():
        if name in stored:
            now, then = map(np.ravel, jax.device_get((norms, stored[name])))
            changes += [*(abs(now - then)[then > 0] / then[then > 0])]
    if changes and np.quantile(changes, 0.25, method="lower") > _CHANGED:
        raise ValueError(
            "the state is that of another model: the norms of most matrices in it differ "
            f"by more than {_CHANGED:.0%} from the parameters' norms. Restore both from "
            "one checkpoint."
        )


def _norms(traced: Iterable[Any], params: PyTree) -> dict[Path, jax.Array]:
    """The norms of the matrices of each parameter, by a trace of ``init``."""
    leaf_of = by_name(params)
    return {
        names_on(path): axes.norms(jnp.asarray(leaf))
        for matrices, _ in traced
        for path, axes in zip(matrices.paths, matrices.of_leaves, strict=True)
        # Of an init in jax.vmap, the axes are those of one of several models.
        if np.ndim(leaf := leaf_of[names_on(path)]) == len(axes.batch + axes.matrix)
    }


def _is_variable(node: Any) -> bool:
    """Whether a node is what a variable of NNX becomes in a tree of dictionaries."""
    alone = isinstance(node, Mapping) and node.keys() == {"value"}
    return alone and bool(jax.tree_util.all_leaves([node["value"]]))


def _decoded(arrays: Sequence[StateArray]) -> list[StateArray]:
    """The entries of a state, with floats for codes, 16 low bits, and NUMBERS apart."""
    scales_of = {
        ((*place[:-1], _CODES[place[-1]]), owner): scales
        for place, owner, scales in arrays
        if place and place[-1] in _CODES
    }
    decoded = []
    for entry in arrays:
        if (scales := scales_of.get(entry[:2])) is not None:
            both = jnp.asarray(entry.array), jnp.asarray(scales)
            entry = entry._replace(array=int8_blocks.decode(*both, jnp.float32))
        if entry.field == "low_bits" and entry.array.dtype == jnp.uint8:
            entry = entry._replace(array=jnp.asarray(entry.array, jnp.uint16) << 8)
        if entry.field == _NUMBERS and entry.owner is not None:
            for name, number in zip(NUMBERS, jnp.asarray(entry.array), strict=True):
                place = (*entry.place[:-1], name)
                decoded.append(StateArray(place, entry.owner, number))
        elif entry.field not in _CODES:
            decoded.append(entry)
    return decoded


def _refuse_other_parameters(conversion: _Conversion) -> None:
    """Refuse states whose arrays belong to other parameters, or to none."""
    old, new = conversion.old, conversion.new
    names = [keys for keys in conversion.shapes if keys in new.owners]
    moments = any(
        np.ndim(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in old.others.values()
    )
    if names and not old.owners and moments:
        raise ValueError(
            "the old state holds nothing of these parameters: pass the parameters under "
            "the names of its run, and restore the state into the structure of its own "
            "optimizer's init, without which the names of its fields are lost. The names "
            f"passed are {', '.join(repr('.'.join(keys)) for keys in names[:5])}."
        )
    missing = [keys for keys in names if keys not in old.owners]
    if missing and not conversion.allow_new:
        raise ValueError(
            f"{_subject(missing)} not in the old state. Pass allow_new=True to start "
            "over there, or pass the parameters under the names of the old run."
        )
    for place, array in new.others.items():
        entry = StateArray(place, None, array)
        if entry.field in _MOMENTS and conversion.found(entry) is None:
            raise ValueError(
                f"the new optimizer keeps {'.'.join(place)!r} of shape {np.shape(array)} "
                "for no single parameter, as optax.flatten does: convert to the "
                "optimizer inside, or start over with optimizer.init(params)."
            )


def _refuse_other_moments(conversion: _Conversion) -> None:
    """Refuse a state whose moments cannot become those of the new optimizer."""
    old, new, allow_new = conversion.old, conversion.new, conversion.allow_new
    held = [owner for owner in new.owners if old.has(owner, TRACE, "mu")]
    unknown = [
        owner
        for owner in new.owners
        if owner in old.owners and new.has(owner, TRACE, "mu")
        # optax.rmsprop's trace is one of updates, not of gradients, and optax.novograd
        # divides gradients by the one number that it keeps for a parameter.
        if (old.has(owner, "nu") and not old.has(owner, "mu"))
        or len(old.shapes(owner, "mu", "nu")) > 1
        or not (allow_new or old.has(owner, TRACE, "mu"))
    ]
    averaged = [x for x in held if new.has(x, "ema") and not new.has(x, TRACE, "mu")]
    without = [
        x
        for x in held
        if new.has(x, "nu") and not (new.has(x, TRACE) or old.has(x, "nu"))
    ]
    if unknown:
        raise ValueError(
            f"{_subject(unknown)} in the old state without a first moment that could "
            "become the momentum: it is not the state of SGD with momentum, Muon or "
            "AdamW. Start over with optimizer.init(params)."
        )
    if averaged and not allow_new:
        raise ValueError(
            f"{_subject(averaged)} given to optax.ema, which does not tell whether it "
            "averages gradients. Keep their momentum in optax.trace, or pass "
            "allow_new=True to start over there."
        )
    if without and not allow_new:
        raise ValueError(
            f"{_subject(without)} given to AdamW, but the old state holds no second "
            "moment of theirs, as after Muon, SGD or Lion. Pass allow_new=True to start "
            "over there. What Muon trained as a matrix may also stay one, as with "
            "weight_dimension_numbers=by_path({'embed|head': 'matrix'})."
        )


def _subject(owners: Iterable[Path]) -> str:
    return listed([(".".join(owner), "") for owner in owners])
