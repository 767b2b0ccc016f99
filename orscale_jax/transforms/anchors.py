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
    #: d₀: ‖D‖, or the norm of a D of full rank if the anchor asks for that.
    anchor: jax.Array
    #: Whether Q is not zero: decay alone is no direction.
    moving: jax.Array


class Constants(NamedTuple):
    """Hyperparameters of the trust ratio."""

    eps: jax.Array
    r_min: jax.Array
    r_max: jax.Array
    anchor_steps: jax.Array


class Anchored(NamedTuple):
    """The state of the anchors of matrices, in arrays of the batch shape."""

    #: The constant c; see :class:`CalibratedTrustRatioState`.
    calibration: jax.Array
    #: ‖W‖ where c was anchored, or at the first direction without calibration; 0 before.
    weight_norm: jax.Array
    #: The number of directions that have entered c, dtype int32; None if not counted.
    directions: jax.Array | None = None


# From what is known, the norms and the constants to what is known after this step. It
# leaves weight_norm as it is.
SetC: TypeAlias = Callable[[Anchored, Norms, Constants], Anchored]


def anchor_weight_norm(
    before: Anchored, norms: Norms, weight_norm: jax.Array, *, calibrates: bool
) -> jax.Array:
    """‖W‖ at the direction at which c is set, given whether the rule sets it.

    Without such a c, at the first direction at which ‖W‖ is not zero; 0 before it. It
    stays 0 where c was set before states kept this norm.
    """
    unset = _unset(before.calibration)
    is_first = (unset | jnp.isinf(before.calibration)) & (before.weight_norm == 0)
    is_new = is_first | unset if calibrates else is_first
    is_new = is_new & _directed(norms) & jnp.isfinite(norms.weight)
    return jnp.where(is_new, weight_norm, before.weight_norm)


def uncalibrated(known: Anchored, norms: Norms, constants: Constants) -> Anchored:
    """Set c to 1."""
    return known._replace(calibration=jnp.ones_like(norms.weight))


def by_first_direction(known: Anchored, norms: Norms, constants: Constants) -> Anchored:
    """Set c at the first direction of each matrix (Definition 2)."""
    c = _anchored(known.calibration, norms, constants.eps)
    return known._replace(calibration=c)


def by_largest_direction(known: Anchored, norms: Norms, constants: Constants) -> Anchored:
    """Set c at the first direction, and lower it at larger ones of the first steps."""
    assert known.directions is not None
    first = _anchored(known.calibration, norms, constants.eps)
    is_new = _unset(known.calibration) & ~_unset(first)
    is_first = is_new & jnp.isfinite(first)
    count = jnp.where(is_new, 0, known.directions)
    weight_norm = jnp.where(is_first, norms.weight, known.weight_norm)
    # A c that another anchor has set has no count: it stays.
    counting = (is_first | (count > 0)) & (weight_norm > 0)
    early = count.astype(norms.direction.dtype) < constants.anchor_steps
    entering = counting & _directed(norms) & early
    largest = weight_norm / (jnp.where(entering, norms.direction, 1) + constants.eps)
    c = jnp.where(entering, jnp.minimum(first, not_one(largest)), first)
    return Anchored(c, known.weight_norm, count + entering.astype(count.dtype))


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A rule that sets c.

    Attributes:
      set_c: The rule.
      needs_full_rank: Whether it needs the norm of a D of full rank.
      counts: Whether it counts the directions that have entered c.
      calibrates: Whether it sets c by a direction.
    """

    set_c: SetC
    needs_full_rank: bool = False
    counts: bool = False
    calibrates: bool = True


FIRST = "first"
ANCHORS = {
    FIRST: Anchor(by_first_direction),
    "full_rank": Anchor(by_first_direction, needs_full_rank=True),
    "largest": Anchor(by_largest_direction, counts=True),
}
UNCALIBRATED = Anchor(uncalibrated, calibrates=False)


def _anchored(c: jax.Array, norms: Norms, eps: jax.Array) -> jax.Array:
    """Set c to ‖W‖ over d₀, where there is a direction and c is unset.

    Until then c is 0, also where it was 1, so that r is 1.
    """
    directed = _directed(norms)
    # No division by zero: jax_debug_nans also sees what a where discards.
    anchor = norms.weight / (jnp.where(directed, norms.anchor, 1) + eps)
    ready = _unset(c) & directed & jnp.isfinite(anchor)
    set_now = jnp.where(anchor > 0, not_one(anchor), jnp.inf)
    return jnp.where(ready, set_now, jnp.where(_unset(c), 0, c))


def _directed(norms: Norms) -> jax.Array:
    """Whether there is a direction, and it is finite."""
    return norms.moving & (norms.direction > 0) & jnp.isfinite(norms.direction)


def _unset(c: jax.Array) -> jax.Array:
    """Whether c is 0 (from ``init``) or 1 (from a run without calibration)."""
    return (c == 0) | (c == 1)


def not_one(c: jax.Array) -> jax.Array:
    """Replace 1, which stands for no calibration, by the float32 number next to it.

    A c that is computed in float64 may be stored in float32.
    """
    next_to_one = 1 - jnp.finfo(jnp.float32).epsneg
    return jnp.where(c.astype(jnp.float32) == 1, next_to_one, c)
