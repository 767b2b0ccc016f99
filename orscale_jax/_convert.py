"""Conversion of one optimizer's state to another's, for a run that continues."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.transforms import int8_blocks
from orscale_jax.transforms.momentum import TRACE, TRACE_SCALE
from orscale_jax.trees.boxes import PyTree, rebox, unbox
from orscale_jax.trees.checks import Entry, array_type, entries
from orscale_jax.trees.names import Path, listed, names_on

_COUNTS = frozenset({"count", "gradient_step", "mini_step"})
_MOMENTS = frozenset({TRACE, "mu", "nu"})
# Fields of states that hold arguments: of the ratio's stage, of optax.contrib.muon and of
# schedule_free. Those of inject_hyperparams are below "hyperparams".
_SETTINGS = frozenset({"bounds", "ns_coeffs", "b1"})

# The place of a field, and the parameter that it is of.
_Key: TypeAlias = tuple[Path, Path | None]


def convert_state(
    state: optax.OptState,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    *,
    momentum: ArrayLike | None = None,
    nesterov: bool = True,
    allow_new: bool = False,
) -> optax.OptState:
    r"""Convert another optimizer's state, so that ``optimizer`` continues the run.

    Both optimizers may be :func:`orscale`, :func:`muon`, an ablation, one of the family,
    :func:`optax.contrib.muon` or :func:`optax.adamw`, in any of Optax's wrappers
    (``chain``, ``partition``, ``MultiSteps``). States without a first moment, such as
    that of :func:`optax.rmsprop`, are refused. Do not convert those of
    :func:`optax.lars`, whose trace is one of updates, nor of :func:`optax.adamax`,
    :func:`optax.adabelief` and :func:`optax.contrib.adopt`, whose moments are other
    quantities: they look like those of SGD and AdamW. The new optimizer may have other
    hyperparameters or more parameters. Arrays that both states hold for a parameter under
    the same name are kept: momentum, AdamW's moments, c, r. So is what wrappers know of
    the run, at the same place in both states, such as the ``weight_sum`` of
    :func:`optax.contrib.schedule_free`. New schedules start at the run's step, or at 0
    where no count in the old state tells it, and bias corrections at the age of the
    moments that they correct. Momentum is rounded to the new ``mu_dtype``; "int8" to
    float32 and back changes nothing. Hyperparameters in the state are those of
    ``optimizer``, and everything else starts as in ``optimizer.init``; a c that is new is
    anchored at the next direction.

    The momentum of :func:`optax.contrib.muon` is an average, :math:`(1 - \mu)` times the
    sum M here, and the two terms of its Nesterov momentum have different bias
    corrections, whose difference vanishes as :math:`\mu^t`. M is scaled so that the next
    Q is the same; later ones differ by less than :math:`\mu^t`, or not at all without
    ``nesterov``. AdamW's first moment is an average with another decay rate, so an M made
    from it is an estimate.

    Args:
      state: The old optimizer's state; may be a restored tree of dictionaries and lists.
      optimizer: The new optimizer.
      params: The parameters.
      momentum: :math:`\mu` of the matrices' momentum, in [0, 1); needed where one of the
        states has an average and the other a sum.
      nesterov: Whether :func:`optax.contrib.muon` uses Nesterov's momentum.
      allow_new: Whether parameters may be missing from the old state.

    Returns:
      A tree like ``optimizer.init(params)``, with its dtypes, also under ``jax.jit``. It
      shares no array with ``state``: a step to which it is donated does not delete that.

    Raises:
      ValueError: If a parameter is missing from the old state (and ``allow_new`` is not
        set), the old state is of another kind of optimizer, an array has another shape,
        ``momentum`` is missing, AdamW would need a second moment that the state does not
        hold, a schedule would have to start at one of several steps that differ (under
        ``jax.jit``, where steps are unknown, it starts at the first), the state holds an
        array of a parameter several times under one name, or the new one holds moments of
        no single parameter (:func:`optax.flatten`).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import convert_state, orscale
      >>> params = {"kernel": jnp.eye(2)}
      >>> old = optax.contrib.muon(1e-3)
      >>> _, state = old.update(params, old.init(params), params)
      >>> optimizer = orscale(1e-3)
      >>> state = convert_state(state, optimizer, params, momentum=0.95)
      >>> print(optax.tree.get(state, "calibration")["kernel"])
      0.0
    """
    _checks.number("momentum", momentum, at_least=0, below=1, optional=True)
    _checks.flag("nesterov", nesterov)
    # A new state begins with numbers from the host, as that of optimizer.init does.
    with jax.transfer_guard_host_to_device("allow"):
        return _converted(state, optimizer, params, momentum, nesterov, allow_new)


def _converted(
    state: optax.OptState,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    momentum: ArrayLike | None,
    nesterov: bool,
    allow_new: bool,
) -> optax.OptState:
    new = optimizer.init(params)
    bare, bare_params = unbox(new), unbox(params)
    if isinstance(bare_params, optax.LookaheadParams):
        bare_params = bare_params.fast  # Of which the state is.
    wanted = entries(bare, bare_params)
    fields = {TRACE, TRACE_SCALE, "mu", "nu"}
    fields |= {entry.field for entry in wanted if entry.owner is not None}
    old = _Held.of(_decoded(entries(unbox(state), bare_params, fields)))
    decoded = _decoded(wanted)
    source = _Source(old, _Held.of(decoded), momentum, nesterov)
    _refuse_new(old, source.new, bare_params, allow_new)
    _refuse_other_moments(old, source.new, allow_new)
    _refuse_moments_of_all(source)
    _refuse_without_second_moment(old, source.new)
    arrays = _encoded({_key(entry): source.value(entry) for entry in decoded}, wanted)
    converted = [arrays[_key(entry)] for entry in wanted]
    return rebox(jax.tree.unflatten(jax.tree.structure(bare), converted), new)


def _key(entry: Entry) -> _Key:
    return entry.place, entry.owner


def _beside(key: _Key, field: str) -> _Key:
    """Another field of the same state."""
    place, owner = key
    return (*place[:-1], field), owner


def _scales_of(found: Iterable[Entry]) -> dict[_Key, Any]:
    """The scales of 8-bit momentum, by the key of its codes."""
    arrays = {_key(entry): entry.array for entry in found}
    pairs = (
        (key, _beside(key, TRACE_SCALE)) for key in arrays if key[0][-1:] == (TRACE,)
    )
    return {key: arrays[scales] for key, scales in pairs if scales in arrays}


def _decoded(found: Sequence[Entry]) -> list[Entry]:
    """The entries of a state, with float32 in place of 8-bit codes and their scales."""
    scales_of = _scales_of(found)
    dropped = {_beside(key, TRACE_SCALE) for key in scales_of}

    def decoded(entry: Entry) -> Entry:
        if (scales := scales_of.get(_key(entry))) is None:
            return entry
        both = jnp.asarray(entry.array), jnp.asarray(scales)
        return entry._replace(array=int8_blocks.decode(*both, jnp.float32))

    return [decoded(entry) for entry in found if _key(entry) not in dropped]


def _encoded(
    decoded: Mapping[_Key, jax.Array], wanted: Iterable[Entry]
) -> dict[_Key, jax.Array]:
    """The arrays of a state, from those of its decoded entries."""
    arrays = dict(decoded)
    for key, scales in _scales_of(wanted).items():
        axis = int8_blocks.axis_of(decoded[key].shape, scales.shape)
        arrays[key], arrays[_beside(key, TRACE_SCALE)] = int8_blocks.encode(
            decoded[key], axis
        )
    return arrays


class _Held(NamedTuple):
    """The entries of a state.

    Attributes:
      of_params: Those of parameters, by field and owner.
      others: The arrays of the others, by place.
      nodes: All of them but settings, by the place of the node that they are fields of.
    """

    of_params: dict[tuple[str, Path], list[Entry]]
    others: dict[Path, Any]
    nodes: dict[Path, list[Entry]]

    @classmethod
    def of(cls, found: Iterable[Entry]) -> "_Held":
        held = cls({}, {}, {})
        for entry in found:
            if entry.field not in _SETTINGS:
                held.nodes.setdefault(entry.place[:-1], []).append(entry)
            if entry.owner is None:
                held.others[entry.place] = entry.array
            else:
                held.of_params.setdefault((entry.field, entry.owner), []).append(entry)
        return held

    def has(self, field: str, owner: Path) -> bool:
        return (field, owner) in self.of_params

    def has_momentum(self, owner: Path) -> bool:
        return self.has(TRACE, owner) or self.has("mu", owner)

    def array(self, field: str, wanted: Entry) -> Any:
        """The array of a field for another state's entry, or None.

        Raises:
          ValueError: If there are several, none of them at the entry's own place.
        """
        assert wanted.owner is not None
        found = self.of_params.get((field, wanted.owner), [])
        here = [entry for entry in found if entry.place == wanted.place]
        if len(found) > 1 and not here:
            places = " and ".join(repr(".".join(entry.place)) for entry in found)
            raise ValueError(
                f"the old state holds {field} of {wanted.name} several times, at "
                f"{places}: pass the part of it that the new optimizer continues."
            )
        return next((entry.array for entry in here or found), None)

    def fields_beside(self, place: Path) -> set[str]:
        """The fields of the node that has a field at this place, but that one."""
        beside = {entry.field for entry in self.nodes.get(place[:-1], [])}
        return beside - {place[-1]}

    def counts_steps(self, place: Path) -> bool:
        """Whether a count is that of a schedule or of moments, and so the run's step.

        Others are not, such as that of :func:`optax.contrib.reduce_on_plateau`.
        """
        beside = self.fields_beside(place)
        return place[-1] == "count" and (not beside or not _MOMENTS.isdisjoint(beside))

    @property
    def steps(self) -> dict[Path, Any]:
        """The counts of the run's steps, by place."""
        return {at: array for at, array in self.others.items() if self.counts_steps(at)}

    def age(self, field: str, owner: Path | None) -> Any:
        """The count beside a moment of a parameter, or None."""
        moments = [] if owner is None else self.of_params.get((field, owner), [])
        counts = ((*moment.place[:-1], "count") for moment in moments)
        return next((self.others[at] for at in counts if at in self.others), None)


class _Source(NamedTuple):
    """The old state, from which the arrays of a new one are computed."""

    old: _Held
    new: _Held
    momentum: ArrayLike | None
    nesterov: bool

    def value(self, entry: Entry) -> jax.Array:
        """The array that replaces an initial one in the new state."""
        array = self._converted(entry)
        if array is None:
            return entry.array
        if np.shape(array) != np.shape(entry.array):
            raise ValueError(
                f"{entry.field} of {entry.name} has shape "
                f"{np.shape(array)} in the old state and {np.shape(entry.array)} in the "
                "new one: pass the parameters and dimension numbers of the old run."
            )
        # A copy, so that a donated step does not delete the arrays of the old state.
        return jnp.array(array, jnp.result_type(entry.array), copy=True)

    def _converted(self, entry: Entry) -> Any:
        if entry.owner is None and entry.field in _COUNTS:
            return self._count(entry)
        if entry.field in _SETTINGS or entry.place[-2:-1] == ("hyperparams",):
            return None
        if entry.owner is None:
            return self._same(entry)
        if self.old.has(entry.field, entry.owner):
            return self.old.array(entry.field, entry)
        if self._is_average_of_muon(entry) and self.old.has(TRACE, entry.owner):
            total = self.old.array(TRACE, entry)
            return (1 - self._mu(entry)) / self._of_nesterov(entry) * total
        if entry.field == TRACE and self.old.has("mu", entry.owner):
            average = self.old.array("mu", entry)
            factor = 1 / (1 - self._mu(entry))
            if not self.old.has("nu", entry.owner):
                factor = factor * self._of_nesterov(entry)
            return factor * jnp.asarray(average, jnp.result_type(entry.array))
        return None

    def _is_average_of_muon(self, entry: Entry) -> bool:
        assert entry.owner is not None
        return entry.field == "mu" and not self.new.has("nu", entry.owner)

    def _mu(self, entry: Entry) -> Any:
        if self.momentum is None:
            raise ValueError(
                f"the momentum of {entry.name} is an average in one of "
                "the states and a sum in the other: pass momentum= with its decay rate."
            )
        return self.momentum

    def _of_nesterov(self, entry: Entry) -> Any:
        """The second factor, after 1/(1 − μ), that makes M of Optax's average.

        It accounts for the bias corrections, so that the next Q is the same.
        """
        if not self.nesterov or not self.old.steps:
            return 1.0
        age = self.old.age("mu", entry.owner)
        mu, t = self._mu(entry), self._step() if age is None else age
        whole, last = 1 / (1 - mu ** (t + 2.0)), 1 / (1 - mu ** (t + 1.0))
        return whole * (mu + 1) / (mu * whole + last)

    def _count(self, entry: Entry) -> Any:
        if (same := self._same(entry)) is not None:
            return same
        if entry.field != "count":  # Of optax.MultiSteps.
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
        begins = moments and all(self._converted(moment) is None for moment in moments)
        return None if begins else self._step()

    def _same(self, entry: Entry) -> Any:
        """What a node of the same fields at the same place knows."""
        place, found = entry.place, self.old.others.get(entry.place)
        if found is None or array_type(found) != array_type(entry.array):
            return None
        alike = self.old.fields_beside(place) == self.new.fields_beside(place)
        return found if alike else None

    def _step(self) -> Any:
        """The number of steps that the run has taken; None if no count tells."""
        steps = self.old.steps
        concrete = {
            place: count
            for place, count in steps.items()
            if not isinstance(count, jax.core.Tracer)
        }
        known = {place: int(n) for place, n in jax.device_get(concrete).items()}
        if len({*known.values()}) > 1:
            told = ", ".join(f"{n} at {'.'.join(at)!r}" for at, n in known.items())
            raise ValueError(
                f"the counts in the old state differ: {told}. Set those that are not the "
                "run's step to it, with the filtering= of optax.tree.set."
            )
        return next(iter(steps.values()), None)


def _refuse_new(old: _Held, new: _Held, params: PyTree, allow_new: bool) -> None:
    leaves = jax.tree.leaves_with_path(params)
    owners, wanted = ({owner for _, owner in held.of_params} for held in (old, new))
    names = [keys for path, _ in leaves if (keys := names_on(path)) in wanted]
    missing = [repr(".".join(keys)) for keys in names if keys not in owners]
    if names and not owners:
        raise ValueError(
            "the old state holds nothing of these parameters: pass the parameters under "
            "the names of its run, and restore lists into the structure of its "
            "optimizer's init, since they have lost the names of fields. The names "
            "passed are "
            f"{', '.join(repr('.'.join(keys)) for keys in names[:5])}."
        )
    if missing and not allow_new:
        raise ValueError(
            f"{listed(missing)} not in the old state. Pass allow_new=True to start "
            "anew there, or pass the parameters under the names of the old run."
        )


def _refuse_other_moments(old: _Held, new: _Held, allow_new: bool) -> None:
    """Refuse states whose moments are not those of SGD, Muon or AdamW."""
    held = {owner for _, owner in old.of_params}
    unknown = [
        repr(".".join(owner))
        for owner in dict.fromkeys(owner for _, owner in new.of_params)
        if owner in held and new.has_momentum(owner)
        # optax.rmsprop's trace is one of updates, not of gradients.
        if (old.has("nu", owner) and not old.has("mu", owner))
        or not (allow_new or old.has_momentum(owner))
    ]
    if unknown:
        raise ValueError(
            f"{listed(unknown)} in the old state without a first moment that could "
            "become the momentum: it is not the state of SGD with momentum, Muon or "
            "AdamW. Begin anew with optimizer.init(params)."
        )


def _refuse_moments_of_all(source: _Source) -> None:
    for place, array in source.new.others.items():
        entry = Entry(place, None, array)
        if entry.field in _MOMENTS and source.value(entry) is array:
            raise ValueError(
                f"the new optimizer keeps {'.'.join(place)!r} of shape {np.shape(array)} "
                "for no single parameter, as optax.flatten does: convert to the "
                "optimizer inside, or begin anew with optimizer.init(params)."
            )


def _refuse_without_second_moment(old: _Held, new: _Held) -> None:
    missing = [
        repr(".".join(owner))
        for field, owner in new.of_params
        if field == "nu" and not new.has(TRACE, owner)
        if not old.has("nu", owner) and old.has_momentum(owner)
    ]
    if missing:
        raise ValueError(
            f"{listed(missing)} given to AdamW, but the old state holds no second moment "
            "for AdamW: pass weight_dimension_numbers to the new optimizer that make "
            "matrices of the same parameters as in the old run, or begin anew with "
            "optimizer.init(params)."
        )
