"""The parameters that hold queries and keys of attention, and the places of heads."""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax import _checks
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import dotted

_Array: TypeAlias = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class AttentionHeads:
    """The place of a projection's heads in one parameter.

    The defaults fit Flax: a kernel of shape ``(inputs, heads, features)`` and a bias of
    shape ``(heads, features)``.

    Attributes:
      path: The parameter's path in the tree, its keys joined by dots. (A trailing key,
        such as ``value`` in an ``nnx.State``, may be left out.)
      axis: The axis of the heads.
      heads: The number of heads, if ``axis`` holds heads × features, head by head.
        None: ``axis`` counts heads alone.
      span: ``(start, stop)`` along ``axis``: the positions of these heads, if others
        (keys, values) share the axis. None: all of it.
      part: ``(start, stop)`` along ``part_axis``: the features to scale, such as those of
        k in a projection to k and v. None: all of them.
      part_axis: The axis of ``part``. If it is ``axis`` itself, ``part`` counts within
        each head.
      layer_axes: Axes that count layers, if they are not the ``layer_axes`` of the
        :class:`QueryKey`.

    Raises:
      ValueError: If an attribute is not as described above.

    Example:
      >>> from orscale_jax import AttentionHeads
      >>> kernel = AttentionHeads("attention.query.kernel", axis=-1, heads=16)
      >>> keys_and_values = AttentionHeads("attention.kv_up.kernel", part=(0, 128))
    """

    path: str
    axis: int = -2
    heads: int | None = None
    span: tuple[int, int] | None = None
    part: tuple[int, int] | None = None
    part_axis: int = -1
    layer_axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse attributes that no parameter could fit."""
        if not isinstance(self.path, str) or not self.path:
            _checks.refuse("path", self.path, "pass dotted keys, such as 'query.kernel'")
        for name in ("axis", "part_axis"):
            if not _checks.is_whole(getattr(self, name)):
                _checks.refuse(name, getattr(self, name), "pass one whole number")
        if self.heads is not None:
            _checks.count("heads", self.heads)
        for name in ("span", "part"):
            _check_range(name, getattr(self, name))
        if self.layer_axes is not None:
            _check_layer_axes(self.layer_axes)


Heads: TypeAlias = str | AttentionHeads | Sequence[str | AttentionHeads]


@dataclasses.dataclass(frozen=True)
class QueryKey:
    """The query and key projections of one attention module, or of a stack of them.

    ``query``, ``key`` and ``rotary_query`` are each the path of a parameter, an
    :class:`AttentionHeads`, or a sequence of these, such as kernel and bias.

    With fewer key heads than query heads, key head k serves the query heads
    ``k * group`` to ``(k + 1) * group - 1``.

    Attributes:
      query: The query projections. In latent attention: the parts without rotation.
      key: The key projections. In latent attention: the parts without rotation.
      rotary_query: Parts of the queries that are multiplied by a key that all heads share
        and that is not scaled: the rotated part in latent attention. Otherwise empty.
      layer_axes: The axes of these parameters that count layers, in the order of the
        leading axes of ``max_logits``: ``(0,)`` for scanned layers.

    Raises:
      ValueError: If an attribute is not as described above.

    Example:
      >>> from orscale_jax import AttentionHeads, QueryKey
      >>> biased = QueryKey(
      ...     query=("attention.query.kernel", "attention.query.bias"),
      ...     key=("attention.key.kernel", "attention.key.bias"),
      ... )
      >>> latent = QueryKey(  # 128 features without rotation, then 64 rotated ones.
      ...     query=AttentionHeads("attention.q_up.kernel", part=(0, 128)),
      ...     key=AttentionHeads("attention.kv_up.kernel", part=(0, 128)),
      ...     rotary_query=AttentionHeads("attention.q_up.kernel", part=(128, 192)),
      ... )
    """

    query: Heads
    key: Heads
    rotary_query: Heads = ()
    layer_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse attributes that name no parameters."""
        for name in ("query", "key", "rotary_query"):
            _entries(name, getattr(self, name))
        _check_layer_axes(self.layer_axes)


Attentions: TypeAlias = PyTree | Callable[[PyTree], PyTree]


class Place(NamedTuple):
    """The heads of an :class:`AttentionHeads` in the parameter that it names."""

    #: The parameter's dotted path.
    name: str
    #: The axes that count layers, and how many there are.
    layer_axes: tuple[int, ...]
    layers: tuple[int, ...]
    #: The axis of the heads, how many there are, and which head is at each position.
    axis: int
    heads: int
    head_at: _Array
    #: Which entries are scaled; broadcasts to the parameter's shape.
    mask: _Array

    def spread(self, factors: jax.Array) -> jax.Array:
        """Factors of shape (layers..., heads), to multiply the parameter with."""
        axes = (*self.layer_axes, self.axis)
        others = [axis for axis in range(self.mask.ndim) if axis not in axes]
        ordered = jnp.expand_dims(factors.transpose(np.argsort(axes)), others)
        along = jnp.take(ordered, self.head_at, axis=self.axis, mode="clip")
        return jnp.where(self.mask, along, 1)


class Attention(NamedTuple):
    """A :class:`QueryKey` and its parameters."""

    name: str
    query: list[Place]
    key: list[Place]
    rotary_query: list[Place]

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers..., query heads)."""
        return (*self.query[0].layers, self.query[0].heads)

    @property
    def places(self) -> list[Place]:
        """The places of queries and keys."""
        return self.query + self.key + self.rotary_query


def find_attentions(
    attentions: Attentions, params: PyTree
) -> tuple[list[Attention], Any]:
    """The attention modules with their parameters, and the structure they are in."""
    if callable(attentions):
        attentions = attentions(params)
        check_attentions(attentions)
    leaves = named_leaves(params)
    entries, structure = jax.tree.flatten_with_path(attentions)
    modules = [_find(_attention_name(path), entry, leaves) for path, entry in entries]
    _check_apart([place for attention in modules for place in attention.places])
    return modules, structure


def _find(name: str, entry: QueryKey, leaves: dict[str, list[Any]]) -> Attention:
    def places(part: str) -> list[Place]:
        return [
            _place(f"{part} of {name}", heads, entry.layer_axes, leaves)
            for heads in _entries(part, getattr(entry, part))
        ]

    attention = Attention(name, places("query"), places("key"), places("rotary_query"))
    layers, heads = attention.query[0].layers, attention.query[0].heads
    key_heads = attention.key[0].heads
    wanted = [
        *((place, heads) for place in attention.query + attention.rotary_query),
        *((place, key_heads) for place in attention.key),
    ]
    for place, count in wanted:
        if (place.layers, place.heads) != (layers, count):
            raise ValueError(
                f"parameter {place.name!r} of {name} has {place.heads} heads in layers "
                f"of shape {place.layers}, but the others have {count} in {layers}: "
                "correct axis, heads or layer_axes in its AttentionHeads."
            )
    if heads % key_heads:
        raise ValueError(
            f"{name} has {heads} query heads (in {attention.query[0].name!r}), which "
            f"{key_heads} key heads (in {attention.key[0].name!r}) do not divide: "
            "correct axis or heads in its AttentionHeads."
        )
    return attention


@dataclasses.dataclass(frozen=True)
class _Fitting:
    """One :class:`AttentionHeads`, and the parameter that it has to fit."""

    where: str
    heads: AttentionHeads
    name: str
    leaf: Any

    def misfit(self, why: str) -> NoReturn:
        raise ValueError(
            f"{self.where}: {self.heads} does not fit parameter {self.name!r} of shape "
            f"{np.shape(self.leaf)} and dtype {jnp.result_type(self.leaf)}: {why}."
        )

    def axis(self, argument: str, axis: int) -> int:
        rank = np.ndim(self.leaf)
        if not -rank <= axis < rank:
            self.misfit(f"it has {rank} axes, so pass another {argument} than {axis}")
        return axis % rank

    def window(self, argument: str, limits: tuple[int, int] | None, size: int) -> range:
        start, stop = limits or (0, size)
        if stop > size:
            self.misfit(f"{argument} ends at {stop}, and there are {size} positions")
        return range(start, stop)

    def along(self, axis: int, values: _Array) -> _Array:
        """A vector that broadcasts along one axis of the parameter."""
        others = [other for other in range(np.ndim(self.leaf)) if other != axis]
        return np.expand_dims(values, others)


def _place(
    where: str,
    heads: AttentionHeads,
    layer_axes: tuple[int, ...],
    leaves: dict[str, list[Any]],
) -> Place:
    name = _match(where, heads.path, leaves)
    [leaf] = leaves[name]
    fitting = _Fitting(where, heads, name, leaf)
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        fitting.misfit("only real floating-point parameters can be scaled")
    if heads.layer_axes is not None:
        layer_axes = heads.layer_axes
    layer_axes = tuple(fitting.axis("layer_axes", axis) for axis in layer_axes)
    axis = fitting.axis("axis", heads.axis)
    if len({*layer_axes, axis}) <= len(layer_axes):
        fitting.misfit("axis and layer_axes name one axis twice")
    size = np.shape(leaf)[axis]
    span = fitting.window("span", heads.span, size)
    count = heads.heads or len(span)
    if not span or len(span) % count:
        fitting.misfit(f"{count} heads do not divide the {len(span)} positions of axis")
    features = len(span) // count
    offset = np.arange(size) - span.start
    mask = fitting.along(axis, np.isin(offset + span.start, span))
    if heads.part is not None:
        mask = mask & _part(fitting, layer_axes, axis, features, offset % features)
    return Place(
        name=name,
        layer_axes=layer_axes,
        layers=tuple(np.shape(leaf)[axis] for axis in layer_axes),
        axis=axis,
        heads=count,
        head_at=np.clip(offset // features, 0, count - 1),
        mask=mask,
    )


def _part(
    fitting: _Fitting,
    layer_axes: tuple[int, ...],
    axis: int,
    features: int,
    feature_at: _Array,
) -> _Array:
    """Which features are scaled, along their axis."""
    heads = fitting.heads
    part_axis = fitting.axis("part_axis", heads.part_axis)
    if part_axis in layer_axes:
        fitting.misfit("part_axis is among the layer_axes")
    if part_axis != axis:
        features = np.shape(fitting.leaf)[part_axis]
        feature_at = np.arange(features)
    part = fitting.window("part", heads.part, features)
    return fitting.along(part_axis, np.isin(feature_at, part))


def _match(where: str, path: str, leaves: dict[str, list[Any]]) -> str:
    """The one parameter called ``path``, or below it."""
    names = [name for name in leaves if name == path or name.startswith(path + ".")]
    if not names:
        near = difflib.get_close_matches(path, leaves, n=3, cutoff=0) or ["none"]
        raise ValueError(
            f"{where}: no parameter is called {path!r}. Pass the keys of its path, "
            f"joined by dots. The nearest: {', '.join(map(repr, near))}."
        )
    if sum(len(leaves[name]) for name in names) > 1:
        raise ValueError(
            f"{where}: {path!r} is the name of several parameters, such as {names[0]!r} "
            f"and {names[-1]!r}: name each of them, as in ('query.kernel', 'query.bias')."
        )
    return names[0]


def _check_apart(places: list[Place]) -> None:
    """Refuse parameters that would be scaled twice."""
    covered: dict[str, Any] = {}
    for place in places:
        before = covered.get(place.name, False)
        if np.any(before & place.mask):
            raise ValueError(
                f"parameter {place.name!r} is named twice in attentions, with parts that "
                "overlap: set span or part of its AttentionHeads, or name it once. For a "
                "module that several layers use, pass the maximum of their logits."
            )
        covered[place.name] = before | place.mask


def check_attentions(attentions: PyTree) -> None:
    """Refuse what is not a :class:`QueryKey` or a pytree of them."""
    entries = jax.tree.leaves(attentions)
    for entry in entries or [attentions]:
        if not isinstance(entry, QueryKey):
            _checks.refuse("attentions", entry, "pass a QueryKey, or a pytree of them")


def _entries(name: str, heads: Any) -> tuple[AttentionHeads, ...]:
    single = isinstance(heads, str | AttentionHeads)
    entries = (heads,) if single else heads
    if not isinstance(entries, Sequence) or not (entries or name == "rotary_query"):
        _checks.refuse(name, heads, "pass a path, an AttentionHeads, or several of them")
    return tuple(
        entry if isinstance(entry, AttentionHeads) else AttentionHeads(entry)
        for entry in entries
    )


def _check_layer_axes(axes: Any) -> None:
    if not isinstance(axes, tuple) or not all(map(_checks.is_whole, axes)):
        _checks.refuse("layer_axes", axes, "pass a tuple of whole numbers, such as (0,)")


def _check_range(name: str, limits: Any) -> None:
    if limits is None:
        return
    whole = isinstance(limits, tuple) and all(map(_checks.is_whole, limits))
    if not whole or len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        _checks.refuse(name, limits, "pass (start, stop) with 0 <= start < stop, or None")


def named_leaves(tree: PyTree) -> dict[str, list[Any]]:
    """The leaves by dotted path; several under one name if a key contains a dot."""
    named: dict[str, list[Any]] = {}
    for path, leaf in jax.tree.flatten_with_path(tree)[0]:
        named.setdefault(dotted(path), []).append(leaf)
    return named


def _attention_name(path: Any) -> str:
    return f"attention {dotted(path)!r}" if path else "the attention"
