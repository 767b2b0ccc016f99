"""QK-Clip: rescale query and key heads whose attention logits grow too large."""

from collections.abc import Callable
from typing import Any, NamedTuple

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


class QKFactors(NamedTuple):
    """What the heads of one attention, or of a stack of them, are multiplied by."""

    query: jax.Array  # (layers..., query heads); of the parts without rotation.
    key: jax.Array  # (layers..., key heads)
    rotary_query: jax.Array  # (layers..., query heads), of latent attention.


def qk_clip(
    rescale: Callable[[PyTree, PyTree], PyTree],
    *,
    key_heads: int | None = None,
    threshold: ArrayLike = 100.0,
    alpha: ArrayLike = 0.5,
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
      rescale: A function that multiplies queries and keys, kernels and biases, by their
        factors. It takes a copy of the parameters, which it may change and return, and a
        tree like ``max_logits`` of :class:`QKFactors`.
      key_heads: The number of key heads, if each serves a group of neighbouring query
        heads. None: as many as query heads.
      threshold: :math:`\tau`, above 0, for logits as they enter the softmax.
      alpha: :math:`\alpha` in [0, 1], the share of the clip that the queries take.

    Returns:
      A stateless transformation. Its ``update`` needs ``params`` and ``max_logits``, a
      pytree of arrays of shape ``(layers..., query heads)``. A head whose logits are all
      masked has the largest logit :math:`-\infty`, and is not clipped. NaN and
      :math:`\infty` give NaN in their heads, and in the heads that share a key with them.
      The factors are computed in float32 (float64 for float64), and updates keep their
      dtypes.

    Raises:
      ValueError: If an argument is not valid; from ``update``, if ``params`` or
        ``max_logits`` is missing, or ``rescale`` changes a shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import qk_clip
      >>> def rescale(params, factors):
      ...     params["q"] *= factors.query[:, None]  # (inputs, heads, features)
      ...     params["k"] *= factors.key[:, None]
      ...     return params
      >>> clip = qk_clip(rescale)  # Last in an optax.chain.
      >>> params = {"q": jnp.ones((4, 2, 3)), "k": jnp.ones((4, 2, 3))}  # 2 heads
      >>> logits = jnp.array([400.0, 50.0])
      >>> zero = {"q": jnp.zeros((4, 2, 3)), "k": jnp.zeros((4, 2, 3))}
      >>> updates, _ = clip.update(zero, clip.init(params), params, max_logits=logits)
      >>> print(updates["q"][0, :, 0])
      [-0.5  0. ]

    References:
      Kimi Team 2025, *Kimi K2*, arXiv:2507.20534, section 2.1 and Algorithm 1 (MuonClip).
    """
    validate.number("threshold", threshold, at_least=float(np.finfo(np.float32).tiny))
    validate.number("alpha", alpha, at_least=0, below=np.nextafter(1, 2))

    def update(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree | None = None,
        *,
        max_logits: PyTree | None = None,
        **_: Any,
    ) -> tuple[PyTree, optax.EmptyState]:
        require_shapes(updates, params)
        if not jax.tree.leaves(max_logits):
            raise ValueError(
                "pass to update, as max_logits=..., the largest attention logits over "
                "batch and positions of the forward pass: arrays of shape (layers..., "
                "query heads)."
            )
        dtype = compute_dtype(params)
        tau, share = jnp.asarray(threshold, dtype), 1 - jnp.asarray(alpha, dtype)

        def factors(logits: Any) -> QKFactors:
            largest = typed_sharding.gather(jnp.asarray(logits, dtype))
            return _factors(largest, tau, share, key_heads or largest.shape[-1])

        def new(update: jax.Array, param: jax.Array, moved: Any, scaled: Any) -> Any:
            step = (scaled - param.astype(scaled.dtype)).astype(update.dtype)
            return jnp.where(scaled == moved, update, step)

        moved = jax.tree.map(
            lambda w, u: w.astype(dtype) + u.astype(dtype), params, updates
        )
        scaled = rescale(
            jax.tree.map(lambda x: x, moved), jax.tree.map(factors, max_logits)
        )
        require_shapes(scaled, params, "result of rescale")
        return jax.tree.map(new, updates, params, moved, scaled), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _factors(
    largest: jax.Array, tau: jax.Array, share: jax.Array, groups: int
) -> QKFactors:
    """The factors of queries, of keys, one for each group, and γ of rotary queries."""
    gamma = jnp.where(largest > tau, tau / jnp.maximum(largest, tau), 1)
    # A gamma of zero has underflowed, and would erase the head for good.
    gamma = jnp.where((largest < jnp.inf) & (gamma > 0), gamma, jnp.nan)
    # A shared key takes the strongest clip of its queries, and they the rest.
    grouped = gamma.reshape(*gamma.shape[:-1], groups, gamma.shape[-1] // groups)
    # A minimum may lose NaN on CPUs, and NaN to the power of 0 is 1.
    known = ~jnp.isnan(grouped).any(axis=-1)
    key = jnp.where(known, jnp.min(grouped, axis=-1) ** share, jnp.nan)
    return QKFactors((grouped / key[..., None]).reshape(gamma.shape), key, gamma)
