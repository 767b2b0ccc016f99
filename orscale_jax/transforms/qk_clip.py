"""QK-Clip: rescale query and key heads whose attention logits grow too large."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import compute_dtype
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.checks import require_shapes
from orscale_jax.trees.names import dotted


class QKClipState(NamedTuple):
    """State of :func:`qk_clip`, for readouts: the next step does not depend on it."""

    #: Tree like ``attentions``: the last gamma, (layers..., query heads), float32.
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
      span: ``(start, stop)`` along ``axis``: the positions of these heads, if other heads
        (keys, values) share the axis. None: the whole axis.
      part: ``(start, stop)`` along ``part_axis``: the features to scale, such as the
        features of k in a projection to k and v. None: all features.
      part_axis: The axis of ``part``. If it is ``axis``, ``part`` counts in each head.
      layer_axes: The axes that count layers, if they are not the ``layer_axes`` of the
        :class:`QueryKey`.

    Example:
      >>> from orscale_jax import AttentionHeads
      >>> flat = AttentionHeads("attention.query.kernel", axis=-1, heads=16)
    """

    path: str
    axis: int = -2
    heads: int | None = None
    span: tuple[int, int] | None = None
    part: tuple[int, int] | None = None
    part_axis: int = -1
    layer_axes: tuple[int, ...] | None = None


Heads: TypeAlias = str | AttentionHeads | Sequence[str | AttentionHeads]
_REMEDY = "pass a path, an AttentionHeads, or several"


@dataclasses.dataclass(frozen=True)
class QueryKey:
    """The query and key projections of one attention module, or of a stack of them.

    ``query``, ``key`` and ``rotary_query`` are each the path of a parameter, an
    :class:`AttentionHeads`, or a tuple of these, such as kernel and bias. If there are
    fewer key heads than query heads, each serves a group of neighbouring query heads.

    Attributes:
      query: The query projections. In latent attention: the parts without rotation.
      key: The key projections. In latent attention: the parts without rotation.
      rotary_query: The parts of the queries that are multiplied by a key that all heads
        share and that is not scaled. Latent attention has such a rotated part. Leave the
        argument empty for other attention.
      layer_axes: The axes of these parameters that count layers, in the order of the
        leading axes of ``max_logits``: ``(0,)`` for scanned layers.

    Example:
      >>> from orscale_jax import AttentionHeads, QueryKey
      >>> q_up, kv_up = "attention.q_up.kernel", "attention.kv_up.kernel"
      >>> q, k = (AttentionHeads(path, part=(0, 128)) for path in (q_up, kv_up))
      >>> latent = QueryKey(q, k, rotary_query=AttentionHeads(q_up, part=(128, 192)))
    """

    query: Heads
    key: Heads
    rotary_query: Heads = ()
    layer_axes: tuple[int, ...] = ()


class Place(NamedTuple):
    """The heads of an :class:`AttentionHeads` in the parameter of a path."""

    path: Any
    shape: tuple[int, ...]  # (layers..., heads)
    head: np.ndarray[Any, Any]  # Which of these scales each entry; broadcasts to it.
    mask: np.ndarray[Any, Any]  # Whether it does.


def qk_clip(
    attentions: PyTree, *, threshold: ArrayLike = 100.0, alpha: ArrayLike = 0.5
) -> optax.GradientTransformationExtraArgs:
    r"""QK-Clip: scale down the query and key heads whose largest logit is too large.

    Put it last in a chain, and pass the largest attention logits of the forward pass to
    ``update``. Let :math:`S_h` be the largest logit of query head h over batch and
    positions. Then

    .. math::

      \gamma_h = \begin{cases}
        \tau / S_h & \text{where } S_h > \tau, \\ 1 & \text{elsewhere,} \end{cases}
      \qquad W_h \leftarrow \text{factor} \cdot (W_h + u_h)

    in place of :math:`W_h + u_h`, with the factors

    .. math::

      k_h &: \quad f_g = \min_{h \in g} \gamma_h^{1 - \alpha} \text{ of its group } g, \\
      q_h &: \quad \gamma_h / f_g \; (= \gamma_h^\alpha \text{ in a group of one}), \\
      q^R_h &: \quad \gamma_h, \qquad k^R : \quad 1,

    so that all logits of head h are multiplied by :math:`\gamma_h`. If only other heads
    of its group are clipped, :math:`q_h` grows as its key shrinks. If the factor is 1,
    the update does not change, bit for bit. :math:`q^R` and :math:`k^R` are the rotated
    parts in latent attention, where all heads share one :math:`k^R`.

    Args:
      attentions: Which parameters are queries and keys: a :class:`QueryKey`, any pytree
        of them, or a callable from the parameters to one.
      threshold: :math:`\tau`, above 0, for logits as they enter the softmax.
      alpha: :math:`\alpha` in [0, 1], the share of the clip that the queries take.

    Returns:
      A transformation with :class:`QKClipState`. Its ``update`` needs ``params`` and
      ``max_logits``, a pytree like ``attentions`` of arrays of shape ``(layers..., query
      heads)``. A head whose logits are all masked has the largest logit :math:`-\infty`,
      and is not clipped. NaN and :math:`\infty` give NaN in their heads, and in the heads
      that share a key with them. The factors are computed in float32 (float64 for
      float64), and updates keep their dtypes.

    Raises:
      ValueError: If an argument is not valid; from ``init`` and ``update``, if heads do
        not fit the parameters, or ``params`` or ``max_logits`` is missing or unfit.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import QueryKey, qk_clip
      >>> clip = qk_clip(QueryKey("q", "k"))  # Last in an optax.chain.
      >>> params = {"q": jnp.ones((4, 2, 3)), "k": jnp.ones((4, 2, 3))}  # 2 heads
      >>> logits = jnp.array([400.0, 50.0])
      >>> _, state = clip.update(params, clip.init(params), params, max_logits=logits)
      >>> print(state.qk_clip_factor)
      [0.25 1.  ]

    References:
      Kimi Team 2025, *Kimi K2*, arXiv:2507.20534, section 2.1 and Algorithm 1 (MuonClip).
    """
    validate.number("threshold", threshold, at_least=float(np.finfo(np.float32).tiny))
    validate.number("alpha", alpha, at_least=0, below=np.nextafter(1, 2))

    def init(params: PyTree) -> QKClipState:
        # For the placeholder of optax.tree.map_params, as in Matrices.scalars.
        if not jax.tree.leaves(params):
            return QKClipState(jnp.ones(()))
        modules, structure = _find(attentions, params)
        factors = [jnp.ones(query.shape, jnp.float32) for _, [[query, *_], *_] in modules]
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
        modules, structure = _find(attentions, params)
        dtype = compute_dtype(params)
        tau, share = jnp.asarray(threshold, dtype), 1 - jnp.asarray(alpha, dtype)
        gammas, factors = list[jax.Array](), dict[Any, jax.Array]()
        remedy = (
            "pass to update, as max_logits=..., a tree like attentions with the largest "
            "attention logits over batch and positions of the forward pass"
        )
        try:
            logits_of_modules = structure.flatten_up_to(max_logits)
        except (TypeError, ValueError) as error:
            raise ValueError(f"max_logits does not fit ({error}): {remedy}.") from error
        for (name, parts), logits in zip(modules, logits_of_modules, strict=True):
            shape, kind = np.shape(logits), getattr(logits, "dtype", type(logits))
            wanted = parts[0][0].shape
            if shape != wanted or not validate.is_real(kind):
                raise ValueError(
                    f"max_logits of {name} has shape {shape} and dtype {kind}: {remedy}, "
                    f"here a real array of shape (layers..., query heads) = {wanted}."
                )
            largest = typed_sharding.gather(jnp.asarray(logits, dtype))
            groups = parts[1][0].shape[-1]
            query, key, gamma = _factors(largest, tau, share, groups)
            gammas.append(gamma.astype(jnp.float32))
            for places, scale in zip(parts, (query, key, gamma), strict=True):
                for place in places:
                    of_entries = jnp.take(scale, place.head, mode="clip")
                    factor = jnp.where(place.mask, of_entries, 1)
                    # Parts of one parameter do not overlap: one of the factors is 1.
                    factors[place.path] = factors.get(place.path, 1) * factor
        weights = dict(jax.tree.leaves_with_path(params))

        def rescale(path: Any, update: jax.Array) -> jax.Array:
            if path not in factors:
                return update
            arrays = update, weights[path], factors.pop(path)
            u, w, factor = (x.astype(compute_dtype(arrays[:2])) for x in arrays)
            moved = (factor * (w + u) - w).astype(update.dtype)
            return jnp.where(factor == 1, update, moved)

        new = jax.tree.map_with_path(rescale, updates)
        for path in factors:
            raise ValueError(
                f"parameter {dotted(path)!r} has no update: pass zeros for QK-Clip."
            )
        return new, QKClipState(structure.unflatten(gammas))

    return optax.GradientTransformationExtraArgs(init, update)


def _factors(
    largest: jax.Array, tau: jax.Array, share: jax.Array, groups: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The factors of queries, of keys, one for each group, and γ of rotary queries."""
    gamma = jnp.where(largest > tau, tau / jnp.maximum(largest, tau), 1)
    # A gamma of zero has underflowed, and would erase the head for good.
    gamma = jnp.where((largest < jnp.inf) & (gamma > 0), gamma, jnp.nan)
    # A shared key takes the strongest clip of its queries, and they the rest.
    grouped = gamma.reshape(*gamma.shape[:-1], groups, gamma.shape[-1] // groups)
    # A minimum may lose NaN on CPUs, and NaN to the power of 0 is 1.
    known = ~jnp.isnan(grouped).any(axis=-1)
    key = jnp.where(known, jnp.min(grouped, axis=-1) ** share, jnp.nan)
    return (grouped / key[..., None]).reshape(gamma.shape), key, gamma


def _find(attentions: PyTree, params: PyTree) -> tuple[list[Any], Any]:
    """The name and the places of each query, key, rotary query; their structure."""
    if callable(attentions):
        attentions = attentions(params)
    entries, structure = jax.tree.flatten_with_path(attentions)
    leaves = dict(jax.tree.leaves_with_path(params))
    modules, covered = [], dict[Any, Any]()  # Where each parameter is scaled already.
    for path, entry in entries or [((), attentions)]:
        name = f"attention {dotted(path)!r}" if path else "the attention"
        if not isinstance(entry, QueryKey):
            validate.refuse("attentions", entry, "pass a QueryKey, or a pytree of them")
        parts = []
        for part in ("query", "key", "rotary_query"):
            heads = getattr(entry, part)
            several = heads if isinstance(heads, tuple | list) else (heads,)
            if not several and part != "rotary_query":
                validate.refuse(part, heads, _REMEDY)
            where = f"{part} of {name}"
            parts.append([_place(where, x, entry.layer_axes, leaves) for x in several])
        of_query, of_key = parts[0][0].shape, parts[1][0].shape
        shapes = of_query, (*of_query[:-1], of_key[-1]), of_query
        for shape, places in zip(shapes, parts, strict=True):
            for place in places:
                parameter, before = dotted(place.path), covered.get(place.path, False)
                if place.shape != shape or of_query[-1] % of_key[-1]:
                    raise ValueError(
                        f"parameter {parameter!r} of {name} has (layers..., heads) = "
                        f"{place.shape}, but its first query has {of_query} and its "
                        f"first key {of_key}: correct its AttentionHeads."
                    )
                if np.any(before & place.mask):
                    raise ValueError(
                        f"parameter {parameter!r} is named twice in attentions, with "
                        "parts that overlap: set span or part, or name it once. For a "
                        "module that layers share, pass the maximum of their logits."
                    )
                covered[place.path] = before | place.mask
        modules.append((name, parts))
    return modules, structure


def _place(
    where: str, projection: Any, layer_axes: Any, leaves: Mapping[Any, Any]
) -> Place:
    """The heads in the one parameter that has their path, or is below it."""
    heads = AttentionHeads(projection) if isinstance(projection, str) else projection
    if not isinstance(heads, AttentionHeads):
        validate.refuse(where, projection, _REMEDY)
    names = {path: dotted(path) for path in leaves}
    matches = [(p, x) for p, x in names.items() if f"{x}.".startswith(f"{heads.path}.")]
    if len(matches) != 1:
        near = difflib.get_close_matches(heads.path, names.values(), n=3, cutoff=0)
        near = [name for _, name in matches[:3]] or near
        raise ValueError(
            f"{where}: {heads.path!r} is the name of {len(matches)} parameters. Pass the "
            f"keys of one path, joined by dots, or several paths, such as {near}."
        )
    [(path, name)] = matches
    shape, dtype = np.shape(leaves[path]), jnp.result_type(leaves[path])

    def require(fits: Any, why: str) -> None:
        if not fits:
            raise ValueError(
                f"{where}: {heads} does not fit parameter {name!r} of shape {shape} and "
                f"dtype {dtype}: {why}."
            )

    def axis_of(argument: str, axis: Any) -> int:
        fits = validate.is_whole(axis) and -len(shape) <= axis < len(shape)
        axes = "axis" if len(shape) == 1 else "axes"
        why = f"it has {len(shape)} {axes}, so pass another {argument} than {axis}"
        require(fits, why)
        return int(axis) % len(shape)

    def along(axis: int, values: Any) -> Any:
        """A vector that broadcasts along one axis of the parameter."""
        return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])

    def within(argument: str, positions: Any, size: int) -> Any:
        """Whether positions are between the limits of span or part."""
        match (0, size) if getattr(heads, argument) is None else getattr(heads, argument):
            case (int(start), int(stop)) if 0 <= start < stop <= size:
                return (start <= positions) & (positions < stop)
        require(False, f"pass {argument}=(start, stop) with 0 <= start < stop <= {size}")

    require(jnp.issubdtype(dtype, jnp.floating), "only real floats can be scaled")
    layer_axes = layer_axes if heads.layer_axes is None else heads.layer_axes
    require(isinstance(layer_axes, tuple), "layer_axes must be a tuple, such as (0,)")
    axes = [axis_of("layer_axes", axis) for axis in layer_axes]
    axes.append(axis := axis_of("axis", heads.axis))
    require(len({*axes}) == len(axes), "axis and layer_axes name one axis twice")
    sizes = [shape[i] for i in axes]
    positions = np.arange(shape[axis])
    inside = within("span", positions, shape[axis])
    length = int(inside.sum())
    sizes[-1] = count = length if heads.heads is None else heads.heads
    whole = validate.is_whole(count) and count > 0 and length % count == 0
    require(whole, f"{count} heads do not divide the {length} positions of axis")
    head, feature = np.divmod(positions - np.argmax(inside), length // count)
    mask = along(axis, inside)
    if heads.part is not None:
        part_axis = axis_of("part_axis", heads.part_axis)
        require(part_axis not in axes[:-1], "part_axis is among the layer_axes")
        size = length // count if part_axis == axis else shape[part_axis]
        feature = feature if part_axis == axis else np.arange(size)
        mask = mask & along(part_axis, within("part", feature, size))
    of_axes = [*map(np.arange, sizes[:-1]), np.where(inside, head, 0)]
    index = tuple(along(i, values) for i, values in zip(axes, of_axes, strict=True))
    return Place(path, tuple(sizes), np.ravel_multi_index(index, sizes), mask)
