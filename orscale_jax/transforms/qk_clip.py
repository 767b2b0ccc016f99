"""QK-Clip: rescale query and key heads whose attention logits grow too large."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.attention import (
    Attention,
    Attentions,
    Place,
    check_attentions,
    find_attentions,
    named_leaves,
)
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.checks import require_shapes
from orscale_jax.trees.names import dotted


class QKClipState(NamedTuple):
    """State of :func:`qk_clip`, for readouts: the next step does not depend on it."""

    #: Tree like ``attentions``; the last gamma, (layers..., query heads), float32.
    #: 1 where nothing was clipped, and before the first step.
    qk_clip_factor: PyTree


def _gamma(logits: jax.Array, threshold: ArrayLike, dtype: DTypeLike) -> jax.Array:
    largest, tau = logits.astype(dtype), jnp.asarray(threshold, dtype)
    clipped = largest > tau
    # jax_debug_nans also sees what jnp.where discards: nothing is divided by zero.
    gamma = jnp.where(clipped, tau / jnp.where(clipped, largest, 1), 1)
    # A gamma of zero has underflowed, and would erase the head for good.
    return jnp.where(jnp.isfinite(largest) & (gamma > 0), gamma, jnp.nan)


def _factors(
    attention: Attention, gamma: jax.Array, alpha: ArrayLike
) -> Iterator[tuple[Place, jax.Array]]:
    """Every place with its factors, of shape (layers..., its heads)."""
    heads = attention.key[0].heads
    group = gamma.shape[-1] // heads
    grouped = gamma.reshape(*gamma.shape[:-1], heads, group)
    # A shared key takes the strongest clip of its queries; they take the rest of theirs.
    key = jnp.min(grouped, axis=-1) ** (1 - jnp.asarray(alpha, gamma.dtype))
    # A minimum may lose NaN on CPUs, and NaN to the power of 0 is 1.
    key = jnp.where(jnp.isnan(grouped).any(axis=-1), jnp.nan, key)
    query = (grouped / key[..., None]).reshape(gamma.shape)
    for places, factors in (
        (attention.query, query),
        (attention.key, key),
        (attention.rotary_query, gamma),
    ):
        yield from ((place, factors) for place in places)


def _factors_by_name(
    modules: list[Attention], gammas: list[jax.Array], alpha: ArrayLike
) -> dict[str, jax.Array]:
    """The factor of each parameter, by name."""
    factors: dict[str, jax.Array] = {}
    for attention, gamma in zip(modules, gammas, strict=True):
        for place, scale in _factors(attention, gamma, alpha):
            # Parts of one parameter do not overlap: one of the factors is 1.
            factors[place.name] = factors.get(place.name, 1) * place.spread(scale)
    return factors


def _rescale(updates: PyTree, params: PyTree, factors: dict[str, jax.Array]) -> PyTree:
    """The updates that take each parameter W to factor · (W + u)."""
    weights = named_leaves(params)
    rescaled = set()

    def rescale(path: Any, update: jax.Array) -> jax.Array:
        name = dotted(path)
        if name not in factors:
            return update
        rescaled.add(name)
        [weight] = weights[name]
        dtype = compute_dtype((update, weight))
        u, w, factor = (x.astype(dtype) for x in (update, weight, factors[name]))
        moved = (factor * (w + u) - w).astype(update.dtype)
        return jnp.where(factor == 1, update, moved)

    updates = jax.tree.map_with_path(rescale, updates)
    if missing := sorted(set(factors) - rescaled):
        raise ValueError(
            f"parameter {missing[0]!r} has no update (None, or masked), but QK-Clip has "
            "to scale it: pass zeros for it, or leave it out of attentions."
        )
    return updates


def _matched_logits(
    modules: list[Attention], structure: Any, max_logits: PyTree | None
) -> list[jax.Array]:
    """One array per attention module."""
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
    matched = zip(modules, entries, strict=True)
    return [_checked_logits(attention, logits) for attention, logits in matched]


def _checked_logits(attention: Attention, logits: Any) -> jax.Array:
    if not isinstance(logits, jax.Array | np.ndarray | np.generic):
        raise ValueError(
            f"max_logits of {attention.name} is a {type(logits).__name__}: pass an array "
            f"of shape (layers..., query heads) = {attention.shape}."
        )
    real = _checks.is_real(logits.dtype)
    if logits.shape != attention.shape or not real:
        raise ValueError(
            f"max_logits of {attention.name} has shape {logits.shape} and dtype "
            f"{logits.dtype}, but its queries have (layers..., heads) = "
            f"{attention.shape}: pass a real array of that shape, the maximum over batch "
            "and positions, or correct axis, heads and layer_axes in attentions."
        )
    logits = jnp.asarray(logits)
    return typed_sharding.gather(logits)


def _check_interval(
    name: str, value: Any, inside: Callable[[float], bool], wanted: str
) -> None:
    _checks.number(name, value)
    if isinstance(value, jax.core.Tracer):
        return
    if not inside(float(jax.device_get(value))):
        _checks.refuse(name, value, f"pass {wanted}")


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

    so that all logits of head h are multiplied by :math:`\gamma_h`. Where only other
    heads of a group are clipped, :math:`q_h` grows by :math:`1 / f_g` as its key shrinks
    by :math:`f_g`, and its logits do not change. Wherever the factor is 1, the update
    passes through bit for bit.

    :math:`q^R` and :math:`k^R` are the rotated parts in latent attention, where
    all heads share one :math:`k^R`.

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
    _check_interval("threshold", threshold, lambda x: x > 0, "a number above 0")
    _check_interval("alpha", alpha, lambda x: 0 <= x <= 1, "a number in [0, 1]")
    if not callable(attentions):
        check_attentions(attentions)

    def init(params: PyTree) -> QKClipState:
        if not jax.tree.leaves(params):  # optax.tree.map_params passes a placeholder.
            return QKClipState(
                params
                if callable(attentions)
                else jax.tree.map(lambda _: jnp.ones(()), attentions)
            )
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
        gammas = [
            _gamma(logits, threshold, compute_dtype(params))
            for logits in _matched_logits(modules, structure, max_logits)
        ]
        factors = _factors_by_name(modules, gammas, alpha)
        readout = structure.unflatten([gamma.astype(jnp.float32) for gamma in gammas])
        return _rescale(updates, params, factors), QKClipState(readout)

    return optax.GradientTransformationExtraArgs(init, update)
