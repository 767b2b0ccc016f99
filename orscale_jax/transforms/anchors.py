"""The anchors of the trust ratio: rules that set c, one number for each matrix."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp


class Norms(NamedTuple):
    """Norms of matrices, of the batch shape of their leaf."""

    #: ‖W‖.
    weight: jax.Array
    #: ‖D‖.
    direction: jax.Array
    #: The norm of a D of full rank; ‖D‖ where no anchor asks for it.
    full_rank: jax.Array


class Limits(NamedTuple):
    """Hyperparameters of the trust ratio."""

    eps: jax.Array
    r_min: jax.Array
    r_max: jax.Array
    anchor_steps: jax.Array


class History(NamedTuple):
    """What the largest of several directions needs, of the batch shape."""

    #: ‖W‖ at the first direction, 0 before it.
    anchor_weight_norm: jax.Array
    #: The number of directions that have entered c, dtype int32.
    anchor_count: jax.Array


# Of c, what is remembered (nothing, or a History), the norms and the limits: c, and what
# is remembered from now on.
SetC: TypeAlias = Callable[
    [jax.Array, tuple[jax.Array, ...], Norms, Limits],
    tuple[jax.Array, tuple[jax.Array, ...]],
]


def uncalibrated(
    c: jax.Array, history: tuple[jax.Array, ...], norms: Norms, limits: Limits
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Set c to 1."""
    return jnp.ones_like(norms.weight), history


def by_first_direction(
    c: jax.Array, history: tuple[jax.Array, ...], norms: Norms, limits: Limits
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Set c at the first direction of each matrix (Definition 2)."""
    return _anchored(c, norms.direction, norms, limits.eps), history


def by_full_rank(
    c: jax.Array, history: tuple[jax.Array, ...], norms: Norms, limits: Limits
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Set c at the first direction, by the norm of one of full rank."""
    return _anchored(c, norms.full_rank, norms, limits.eps), history


def by_largest_direction(
    c: jax.Array, history: tuple[jax.Array, ...], norms: Norms, limits: Limits
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Set c at the first direction, and lower it at larger ones of the first steps."""
    weight_norm, count = history
    first = _anchored(c, norms.direction, norms, limits.eps)
    is_first = _unset(c) & ~_unset(first)
    weight_norm = jnp.where(is_first, norms.weight, weight_norm)
    # A c that another anchor has set has no history: it stays.
    entering = (
        (weight_norm > 0)
        & (norms.direction > 0)
        & jnp.isfinite(norms.direction)
        & (count < limits.anchor_steps)
    )
    largest = weight_norm / (jnp.where(entering, norms.direction, 1) + limits.eps)
    lowered = jnp.where(entering, jnp.minimum(first, not_one(largest)), first)
    return lowered, History(weight_norm, count + entering.astype(count.dtype))


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A rule that sets c.

    Attributes:
      set_c: The rule.
      needs_full_rank: Whether it needs the norm of a D of full rank.
      remembers: Whether it has a :class:`History`.
    """

    set_c: SetC
    needs_full_rank: bool = False
    remembers: bool = False


FIRST = "first"
ANCHORS = {
    FIRST: Anchor(by_first_direction),
    "full_rank": Anchor(by_full_rank, needs_full_rank=True),
    "largest": Anchor(by_largest_direction, remembers=True),
}
UNCALIBRATED = Anchor(uncalibrated)


def _anchored(
    c: jax.Array, anchor_norm: jax.Array, norms: Norms, eps: jax.Array
) -> jax.Array:
    """Set c to ‖W‖ over a norm, where there is a direction and c is unset."""
    directed = (norms.direction > 0) & jnp.isfinite(norms.direction)
    # No division by zero: jax_debug_nans also sees what a where discards.
    anchor = norms.weight / (jnp.where(directed, anchor_norm, 1) + eps)
    ready = _unset(c) & directed & jnp.isfinite(anchor)
    return jnp.where(ready, jnp.where(anchor > 0, not_one(anchor), jnp.inf), c)


def _unset(c: jax.Array) -> jax.Array:
    """Whether c is 0 (from ``init``) or 1 (from a run without calibration)."""
    return (c == 0) | (c == 1)


def not_one(c: jax.Array) -> jax.Array:
    """Replace 1, which stands for no calibration, by the float32 number next to it.

    A c that is computed in float64 may be stored in float32.
    """
    next_to_one = 1 - jnp.finfo(jnp.float32).epsneg
    return jnp.where(c.astype(jnp.float32) == 1, next_to_one, c)
