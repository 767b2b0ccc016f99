"""The stage that replays the trust ratios of another run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks


def scale_by_recorded_trust_ratio(
    trust_ratio: ArrayLike | Callable[[jax.Array], jax.Array],
) -> optax.GradientTransformation:
    r"""Scale all directions by a recorded trust ratio: :math:`D_t \mapsto \hat r_t D_t`.

    It is the control experiment that separates the effect of a ratio that responds to its
    own run from that of a learning-rate schedule: Muon+Moonlight with the rate
    :math:`\eta_t \hat r_t`.

    Args:
      trust_ratio: The ratio of each step, of shape ``(T,)``, whose last entry applies to
        all later steps; a schedule, from the step to the ratio; or one number.

    Returns:
      A transformation with the state of :func:`optax.scale_by_schedule` (the step), or
      without state for one number. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If the array is empty, has other axes, or holds anything but finite
        numbers of at least 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import scale_by_recorded_trust_ratio
      >>> stage = scale_by_recorded_trust_ratio([1.0, 1.5])
      >>> updates = {"kernel": jnp.ones((2, 2))}
      >>> _, state = stage.update(updates, stage.init(updates))
      >>> print(stage.update(updates, state)[0]["kernel"][0, 0])
      1.5

    References:
      This library's own.
    """
    if callable(trust_ratio):
        return optax.scale_by_schedule(_checks.scheduled("trust_ratio", trust_ratio))
    recorded = _checked(trust_ratio)
    if not recorded.ndim:
        return optax.stateless_with_tree_map(lambda u, _: u * recorded.astype(u.dtype))

    def at(step: jax.Array) -> jax.Array:
        return jnp.asarray(recorded)[jnp.minimum(step, recorded.size - 1)]

    return optax.scale_by_schedule(at)


def _checked(trust_ratio: ArrayLike) -> jax.Array | np.ndarray:
    """Numbers of shape (T,) or (), refused unless finite as far as they are known.

    Those that are on the host stay there, as jax.transfer_guard demands.
    """
    remedy = "pass finite ratios of shape (T,), all at least 0, one number, or a schedule"
    given = jax.tree.leaves(trust_ratio)
    of = jnp if any(isinstance(leaf, jax.Array) for leaf in given) else np
    try:
        recorded = of.asarray(trust_ratio)
    except (TypeError, ValueError):
        _checks.refuse("trust_ratio", trust_ratio, remedy)
    if not _checks.is_real(recorded.dtype) or recorded.ndim > 1 or not recorded.size:
        _checks.refuse("trust_ratio", trust_ratio, remedy)
    if isinstance(recorded, jax.core.Tracer):
        return recorded
    values = np.asarray(jax.device_get(recorded), np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        _checks.refuse("trust_ratio", trust_ratio, remedy)
    return recorded
