"""QK-Clip: rescale query and key heads whose attention logits grow too large."""

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import compute_dtype
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.checks import require_shapes
from orscale_jax.trees.names import dotted

_Array: TypeAlias = np.ndarray[Any, Any]


class QKClipState(NamedTuple):
    """State of :func:`qk_clip`, for readouts: the next step does not depend on it."""

    #: Tree like ``attentions``; the last gamma, (layers..., query heads), float32.
    #: 1 where nothing was clipped, and before the first step.
    qk_clip_factor: PyTree


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
            limits = getattr(self, name)
            whole = isinstance(limits, tuple) and all(map(_checks.is_whole, limits))
            fits = whole and len(limits) == 2 and 0 <= limits[0] < limits[1]
            if limits is not None and not fits:
                wanted = "pass (start, stop) with 0 <= start < stop, or None"
                _checks.refuse(name, limits, wanted)
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
            _several(name, getattr(self, name))
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


def qk_clip(
    attentions: Attentions, *, threshold: ArrayLike = 100.0, alpha: ArrayLike = 0.5
) -> optax.GradientTransformationExtraArgs:
    r"""QK-Clip: scale down the query and key heads whose largest logit is too large.

    Put it last in a chain. Its ``update`` takes the largest attention logits of the
    forward pass as an extra argument::

        optimizer = optax.chain(orscale(1e-3), qk_clip(attentions))
        optimizer.update(grads, state, params, max_logits=max_logits)

    Query head h, whose largest logit over batch and positions is :math:`S_h`, has

    .. math::

      \gamma_h = \begin{cases}
        \tau / S_h & \text{where } S_h > \tau, \\ 1 & \text{elsewhere,} \end{cases}
      \qquad W_h \leftarrow \text{factor} \cdot (W_h + u_h)

    in place of :math:`W_h + u_h`, with the factors

    .. math::

      k_h &: \quad f_g = \min_{h \in g} \gamma_h^{1 - \alpha}
        \quad \text{for the group g of queries that share it,} \\
      q_h &: \quad \gamma_h / f_g
        \quad (= \gamma_h^\alpha \text{ if the key serves this query alone}), \\
      q^R_h &: \quad \gamma_h, \qquad k^R : \quad 1,

    so that all logits of head h are multiplied by :math:`\gamma_h`, also where only other
    heads of its group are clipped: :math:`q_h` grows as its key shrinks. Where the factor
    is 1, the update passes through bit for bit. :math:`q^R` and :math:`k^R` are the
    rotated parts in latent attention, where all heads share one :math:`k^R`.

    Args:
      attentions: Which parameters are queries and keys: a :class:`QueryKey`, any pytree
        of them, or a callable from the parameters to one.
      threshold: :math:`\tau`, above 0: larger logits are clipped. It applies to logits as
        they enter the softmax.
      alpha: :math:`\alpha` in [0, 1]: the queries' share of the clip.

    Returns:
      A transformation whose ``update`` needs ``params`` and ``max_logits``, a pytree like
      ``attentions``, with an array of shape ``(layers..., query heads)`` for each
      :class:`QueryKey`. Logits that are not finite give NaN in the heads concerned (and
      in those that share their key). Computed in float32 (float64 for float64); updates
      keep their dtypes. The state holds the last :math:`\gamma`:
      ``optax.tree.get(state, "qk_clip_factor")``.

    Raises:
      ValueError: If an argument is not valid; from ``init`` and ``update``, if a name
        matches no parameter or its heads do not fit; from ``update``, if ``params`` or
        ``max_logits`` is missing or does not fit.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import QueryKey, qk_clip
      >>> optimizer = optax.chain(
      ...     optax.sgd(0.1), qk_clip(QueryKey("query.kernel", "key.kernel"))
      ... )
      >>> params = {  # 4 inputs, 2 heads of 3 features
      ...     "query": {"kernel": jnp.ones((4, 2, 3))},
      ...     "key": {"kernel": jnp.ones((4, 2, 3))},
      ... }
      >>> grads = optax.tree.zeros_like(params)
      >>> updates, state = optimizer.update(
      ...     grads, optimizer.init(params), params, max_logits=jnp.array([400.0, 50.0])
      ... )
      >>> print(optax.tree.get(state, "qk_clip_factor"))
      [0.25 1.  ]
      >>> params = optax.apply_updates(params, updates)
      >>> print(params["key"]["kernel"][0])
      [[0.5 0.5 0.5]
       [1.  1.  1. ]]

    References:
      Kimi Team 2025, *Kimi K2*, arXiv:2507.20534, section 2.1 and Algorithm 1 (MuonClip).
    """
    for name, value in (("threshold", threshold), ("alpha", alpha)):
        _checks.number(name, value)
    if not isinstance(threshold, jax.core.Tracer) and not jax.device_get(threshold) > 0:
        _checks.refuse("threshold", threshold, "pass a number above 0")
    if not isinstance(alpha, jax.core.Tracer) and not 0 <= jax.device_get(alpha) <= 1:
        _checks.refuse("alpha", alpha, "pass a number in [0, 1]")
    if not callable(attentions):
        check_attentions(attentions)

    def init(params: PyTree) -> QKClipState:
        # optax.tree.map_params passes a placeholder. One array instead of a tree tells it
        # that these arrays do not have the parameters' shapes.
        if not jax.tree.leaves(params):
            return QKClipState(jnp.ones(()))
        modules, structure = find_attentions(attentions, params)
        factors = [jnp.ones(attention.shape, jnp.float32) for attention in modules]
        return QKClipState(structure.unflatten(factors))

    def update(
        updates: PyTree,
        state: QKClipState,
        params: PyTree | None = None,
        *,
        max_logits: PyTree | None = None,
        **_: Any,
    ) -> tuple[PyTree, QKClipState]:
        del state
        require_shapes(updates, params)
        modules, structure = find_attentions(attentions, params)
        dtype = compute_dtype(params)
        tau = jnp.asarray(threshold, dtype)
        gammas: list[jax.Array] = []
        factors: dict[str, jax.Array] = {}
        matched = _matched_logits(modules, structure, max_logits)
        for attention, logits in zip(modules, matched, strict=True):
            largest = logits.astype(dtype)
            clipped = largest > tau
            # jax_debug_nans also sees what jnp.where discards: nothing is divided by 0.
            gamma = jnp.where(clipped, tau / jnp.where(clipped, largest, 1), 1)
            # A gamma of zero has underflowed, and would erase the head for good.
            gamma = jnp.where(jnp.isfinite(largest) & (gamma > 0), gamma, jnp.nan)
            gammas.append(gamma.astype(jnp.float32))
            # A shared key takes the strongest clip of its queries, and they the rest.
            heads = attention.key[0].heads
            grouped = gamma.reshape(*gamma.shape[:-1], heads, gamma.shape[-1] // heads)
            key = jnp.min(grouped, axis=-1) ** (1 - jnp.asarray(alpha, dtype))
            # A minimum may lose NaN on CPUs, and NaN to the power of 0 is 1.
            key = jnp.where(jnp.isnan(grouped).any(axis=-1), jnp.nan, key)
            query = (grouped / key[..., None]).reshape(gamma.shape)
            scaled = [(place, query) for place in attention.query]
            scaled += [(place, key) for place in attention.key]
            scaled += [(place, gamma) for place in attention.rotary_query]
            for place, scale in scaled:
                # Parts of one parameter do not overlap: one of the factors is 1.
                before = factors.get(place.name, 1)
                factors[place.name] = before * place.spread(scale)
        weights = named_leaves(params)

        def rescale(path: Any, update: jax.Array) -> jax.Array:
            if (name := dotted(path)) not in factors:
                return update
            [weight] = weights[name]
            dtype = compute_dtype((update, weight))
            u, w, factor = (x.astype(dtype) for x in (update, weight, factors.pop(name)))
            moved = (factor * (w + u) - w).astype(update.dtype)
            return jnp.where(factor == 1, update, moved)

        new = jax.tree.map_with_path(rescale, updates)
        if factors:
            raise ValueError(
                f"parameter {min(factors)!r} has no update (None, or masked), but "
                "QK-Clip has to scale it: pass zeros for it, or leave it out of "
                "attentions."
            )
        return new, QKClipState(structure.unflatten(gammas))

    return optax.GradientTransformationExtraArgs(init, update)


def check_attentions(attentions: PyTree) -> None:
    """Refuse what is not a :class:`QueryKey` or a pytree of them."""
    entries = jax.tree.leaves(attentions)
    for entry in entries or [attentions]:
        if not isinstance(entry, QueryKey):
            _checks.refuse("attentions", entry, "pass a QueryKey, or a pytree of them")


def named_leaves(tree: PyTree) -> dict[str, list[Any]]:
    """The leaves by dotted path; several under one name if a key contains a dot."""
    named: dict[str, list[Any]] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        named.setdefault(dotted(path), []).append(leaf)
    return named


def find_attentions(
    attentions: Attentions, params: PyTree
) -> tuple[list[Attention], Any]:
    """The attention modules with their parameters, and the structure they are in."""
    if callable(attentions):
        attentions = attentions(params)
        check_attentions(attentions)
    leaves = named_leaves(params)
    entries, structure = jax.tree.flatten_with_path(attentions)
    modules = []
    covered: dict[str, Any] = {}  # Where each parameter is scaled already.
    for path, entry in entries:
        name = f"attention {dotted(path)!r}" if path else "the attention"
        query, key, rotary = (
            [
                _place(f"{part} of {name}", heads, entry.layer_axes, leaves)
                for heads in _several(part, getattr(entry, part))
            ]
            for part in ("query", "key", "rotary_query")
        )
        layers, heads, key_heads = query[0].layers, query[0].heads, key[0].heads
        counts = [heads] * len(query) + [key_heads] * len(key) + [heads] * len(rotary)
        for place, count in zip(query + key + rotary, counts, strict=True):
            if (place.layers, place.heads) != (layers, count):
                raise ValueError(
                    f"parameter {place.name!r} of {name} has {place.heads} heads in "
                    f"layers of shape {place.layers}, but the others have {count} in "
                    f"{layers}: correct axis, heads or layer_axes in its AttentionHeads."
                )
            before = covered.get(place.name, False)
            if np.any(before & place.mask):
                raise ValueError(
                    f"parameter {place.name!r} is named twice in attentions, with parts "
                    "that overlap: set span or part of its AttentionHeads, or name it "
                    "once. For a module that several layers use, pass the maximum of "
                    "their logits."
                )
            covered[place.name] = before | place.mask
        if heads % key_heads:
            raise ValueError(
                f"{name} has {heads} query heads (in {query[0].name!r}), which "
                f"{key_heads} key heads (in {key[0].name!r}) do not divide: correct axis "
                "or heads in its AttentionHeads."
            )
        modules.append(Attention(name, query, key, rotary))
    return modules, structure


def _place(
    where: str,
    heads: AttentionHeads,
    layer_axes: tuple[int, ...],
    leaves: dict[str, list[Any]],
) -> Place:
    """The heads in the one parameter that has their path, or is below it."""
    path = heads.path
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
    [name] = names
    [leaf] = leaves[name]
    shape, dtype = np.shape(leaf), jnp.result_type(leaf)

    def misfit(why: str) -> NoReturn:
        raise ValueError(
            f"{where}: {heads} does not fit parameter {name!r} of shape {shape} and "
            f"dtype {dtype}: {why}."
        )

    def axis_of(argument: str, axis: int) -> int:
        rank = len(shape)
        if not -rank <= axis < rank:
            misfit(f"it has {rank} axes, so pass another {argument} than {axis}")
        return axis % rank

    def window(argument: str, limits: tuple[int, int] | None, size: int) -> range:
        start, stop = limits or (0, size)
        if stop > size:
            misfit(f"{argument} ends at {stop}, and there are {size} positions")
        return range(start, stop)

    def along(axis: int, values: _Array) -> _Array:
        """A vector that broadcasts along one axis of the parameter."""
        others = [other for other in range(len(shape)) if other != axis]
        return np.expand_dims(values, others)

    if not jnp.issubdtype(dtype, jnp.floating):
        misfit("only real floating-point parameters can be scaled")
    if heads.layer_axes is not None:
        layer_axes = heads.layer_axes
    layer_axes = tuple(axis_of("layer_axes", axis) for axis in layer_axes)
    axis = axis_of("axis", heads.axis)
    if len({*layer_axes, axis}) <= len(layer_axes):
        misfit("axis and layer_axes name one axis twice")
    span = window("span", heads.span, shape[axis])
    count = heads.heads or len(span)
    if not span or len(span) % count:
        misfit(f"{count} heads do not divide the {len(span)} positions of axis")
    features = len(span) // count
    positions = np.arange(shape[axis])
    offset = positions - span.start
    mask = along(axis, np.isin(positions, span))
    if heads.part is not None:
        part_axis = axis_of("part_axis", heads.part_axis)
        if part_axis in layer_axes:
            misfit("part_axis is among the layer_axes")
        feature_at, size = offset % features, features
        if part_axis != axis:
            size = shape[part_axis]
            feature_at = np.arange(size)
        part = window("part", heads.part, size)
        mask = mask & along(part_axis, np.isin(feature_at, part))
    return Place(
        name=name,
        layer_axes=layer_axes,
        layers=tuple(shape[axis] for axis in layer_axes),
        axis=axis,
        heads=count,
        head_at=np.clip(offset // features, 0, count - 1),
        mask=mask,
    )


def _matched_logits(
    modules: list[Attention], structure: Any, max_logits: PyTree | None
) -> list[jax.Array]:
    """The largest logits of each attention module, on every device."""
    if max_logits is None:
        raise ValueError(
            "qk_clip needs the largest attention logits of the forward pass: pass them "
            "to update, as in optimizer.update(grads, state, params, max_logits=...), as "
            "a tree like attentions with arrays of shape (layers..., query heads)."
        )
    try:
        entries = structure.flatten_up_to(max_logits)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "max_logits must be a tree of the structure of attentions, with one array "
            f"for each QueryKey: {error}"
        ) from error
    for attention, logits in zip(modules, entries, strict=True):
        if not isinstance(logits, jax.Array | np.ndarray | np.generic):
            raise ValueError(
                f"max_logits of {attention.name} is a {type(logits).__name__}: pass an "
                f"array of shape (layers..., query heads) = {attention.shape}."
            )
        if logits.shape != attention.shape or not _checks.is_real(logits.dtype):
            raise ValueError(
                f"max_logits of {attention.name} has shape {logits.shape} and dtype "
                f"{logits.dtype}, but its queries have (layers..., heads) = "
                f"{attention.shape}: pass a real array of that shape, the maximum over "
                "batch and positions, or correct axis, heads and layer_axes in "
                "attentions."
            )
    return [typed_sharding.gather(jnp.asarray(logits)) for logits in entries]


def _several(name: str, given: Any) -> list[AttentionHeads]:
    """The parameters of queries or of keys, of which there may be one."""
    several = (given,) if isinstance(given, str | AttentionHeads) else given
    if not isinstance(several, Sequence) or not (several or name == "rotary_query"):
        _checks.refuse(name, given, "pass a path, an AttentionHeads, or several of them")
    return [x if isinstance(x, AttentionHeads) else AttentionHeads(x) for x in several]


def _check_layer_axes(axes: Any) -> None:
    if not isinstance(axes, tuple) or not all(map(_checks.is_whole, axes)):
        _checks.refuse("layer_axes", axes, "pass a tuple of whole numbers, such as (0,)")
