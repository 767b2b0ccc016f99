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
from orscale_jax.trees.names import quoted


class QKFactors(NamedTuple):
    """The factors of the heads of one attention, or of a stack of attention layers."""

    #: Of the queries, of shape ``(layers..., query heads)``. In latent attention, of the
    #: parts without rotation.
    query: jax.Array
    #: Of the keys, of shape ``(layers..., key heads)``. In latent attention, of the parts
    #: without rotation.
    key: jax.Array
    #: :math:`\gamma`, of shape ``(layers..., query heads)``. In latent attention, of the
    #: rotated parts of the queries.
    gamma: jax.Array


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
      rescale: A function of a tree of :math:`W + u` like the parameters and of a tree
        like ``max_logits`` with a :class:`QKFactors` for each attention. It multiplies
        the kernels and biases of queries and keys by their factors, which it broadcasts
        to them, and returns the tree. It may change the tree's containers.
      key_heads: The number of key heads, if each serves a group of neighbouring query
        heads. None: as many as query heads.
      threshold: :math:`\tau`, above 0, for logits as they enter the softmax.
      alpha: :math:`\alpha` in [0, 1], the share of the clip that the queries take.

    Returns:
      A transformation without a state. Its ``update`` needs ``params`` and
      ``max_logits``, a pytree of arrays of shape ``(layers..., query heads)``. A head
      whose logits are all masked has the largest logit :math:`-\infty`, and is not
      clipped. NaN and :math:`\infty` give NaN in their heads, and in the heads that share
      a key with them. The factors are computed in float32 (float64 for float64), and
      updates keep their dtypes.

    Raises:
      ValueError: If an argument is not valid; from ``update``, if ``params`` or
        ``max_logits`` is missing, ``key_heads`` does not divide the query heads, or
        ``rescale`` returns a tree of another structure or other shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import qk_clip
      >>> def rescale(params, factors):
      ...     params["q"] *= factors.query[None, :, None]  # (in, heads, out)
      ...     params["k"] *= factors.key[None, :, None]
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
    if key_heads is not None:
        validate.count("key_heads", key_heads)

    def update(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree | None = None,
        *,
        max_logits: PyTree | None = None,
        **_: Any,
    ) -> tuple[PyTree, optax.EmptyState]:
        require_shapes(updates, params)
        dtype = compute_dtype(params)
        if not jax.tree.leaves(max_logits):
            raise ValueError(
                "pass to update, as max_logits=..., the largest attention logits over "
                "batch and positions of the forward pass: arrays of shape (layers..., "
                "query heads)."
            )

        def add(param: jax.Array, update: Any) -> jax.Array:
            moves = hasattr(update, "dtype")  # It may be None or masked.
            return param.astype(dtype) + (update.astype(dtype) if moves else 0)

        moved = jax.tree.map(add, params, updates)
        copy = jax.tree.map(lambda x: x, moved)  # Its containers may be changed.
        tau, share = jnp.asarray(threshold, dtype), 1 - jnp.asarray(alpha, dtype)
        factors = jax.tree.map(lambda x: _factors(x, tau, share, key_heads), max_logits)
        scaled = rescale(copy, factors)
        structures: list[Any] = [jax.tree.structure(tree) for tree in (scaled, moved)]
        if structures[0] != structures[1]:
            raise ValueError(
                f"rescale returned {structures[0]}: return the tree that it takes first, "
                "in which only the values of arrays have changed."
            )
        require_shapes(scaled, moved, "result of rescale")

        def new(
            path: Any, param: jax.Array, update: Any, before: jax.Array, after: jax.Array
        ) -> Any:
            if after is before:
                return update
            if not hasattr(update, "dtype"):
                raise ValueError(
                    f"parameter {quoted(path)} has no update, and rescale changes it: "
                    "pass zeros."
                )
            step = (after - param.astype(dtype)).astype(update.dtype)
            return jnp.where(after == before, update, step)

        trees = params, updates, moved, scaled
        return jax.tree.map_with_path(new, *trees), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _factors(
    logits: Any, tau: jax.Array, share: jax.Array, key_heads: int | None
) -> QKFactors:
    shape, kind = np.shape(logits), getattr(logits, "dtype", type(logits))
    groups = key_heads or (shape or (1,))[-1]
    if not shape or shape[-1] % groups or not validate.is_real(kind):
        raise ValueError(
            f"max_logits has an array of shape {shape} and dtype {kind}: pass real "
            "arrays of shape (layers..., query heads), in which a multiple of "
            f"{groups} key heads is the number of query heads."
        )
    largest = typed_sharding.gather(jnp.asarray(logits, tau.dtype))
    gamma = jnp.where(largest > tau, tau / jnp.maximum(largest, tau), 1)
    # A gamma of zero has underflowed, and would erase the head for good.
    gamma = jnp.where((largest < jnp.inf) & (gamma > 0), gamma, jnp.nan)
    # A shared key takes the strongest clip of its queries, and they the rest.
    grouped = gamma.reshape(*gamma.shape[:-1], groups, gamma.shape[-1] // groups)
    # A minimum may lose NaN on CPUs, and NaN to the power of 0 is 1.
    known = ~jnp.isnan(grouped).any(axis=-1)
    key = jnp.where(known, jnp.min(grouped, axis=-1) ** share, jnp.nan)
    return QKFactors((grouped / key[..., None]).reshape(gamma.shape), key, gamma)
