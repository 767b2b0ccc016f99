"""The stage that scales every direction by its clipped, calibrated trust ratio."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.distributed import typed_sharding
from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    require_matrices,
)
from orscale_jax.transforms.float32 import compute_dtype
from orscale_jax.transforms.per_matrix import full_per_matrix, map_matrices, spread
from orscale_jax.trees.boxes import PyTree, on_bare_arrays
from orscale_jax.trees.updates import require_params


class CalibratedTrustRatioState(NamedTuple):
    """State of :func:`scale_by_calibrated_trust_ratio`.

    Trees as the matrices. Leaves have the batch shape of their leaf (``()`` for a plain
    matrix) and dtype float32 (float64 for float64 parameters).
    """

    #: The constant c, 0 while unset, inf for a matrix without initial scale.
    calibration: PyTree
    #: The ratio r before clipping, 1 before the first step.
    raw_trust_ratio: PyTree
    #: The ratio r̂ that was applied, 1 before the first step.
    trust_ratio: PyTree


def scale_by_calibrated_trust_ratio(
    *,
    calibrate: bool = True,
    r_min: ArrayLike = 0.1,
    r_max: ArrayLike = 5.0,
    eps: ArrayLike = 1e-6,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale every direction D by its clipped, calibrated trust ratio.

    .. math::

      r = \frac{\|W\|_F}{c \, \|D\|_F + \varepsilon}, \qquad
      \hat r = \mathrm{clip}(r, r_{\min}, r_{\max}), \qquad D \mapsto \hat r D,

    where :math:`c = \|W\|_F / (\|D\|_F + \varepsilon)` is set once per matrix, at the
    first step at which D is not zero and everything in c is finite, so that r starts at
    1 and measures growth since then. Until then, and wherever D is zero, r is 1.

    A matrix whose norm is zero at that step has no initial scale: its c becomes infinite,
    which stands for "none", and it keeps r = 1 for good. A D that is not finite never
    enters c and gives r = NaN.

    Args:
      calibrate: Whether to anchor c; if False, c = 1. It may change between runs: a
        state without calibration is anchored at its next direction, and one with it
        goes on with c = 1.
      r_min: Lower bound of the ratio applied. ``-inf`` for none.
      r_max: Upper bound of the ratio applied, at least 0. ``inf`` for none.
      eps: The floor :math:`\varepsilon`, at least 0.
      weight_dimension_numbers: As in :func:`orscale`.

    Returns:
      A transformation with :class:`CalibratedTrustRatioState`. Norms and ratios are
      float32 (float64 for float64); updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, a leaf is no matrix, or ``params`` is
        missing from ``update``.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import scale_by_calibrated_trust_ratio
      >>> stage = scale_by_calibrated_trust_ratio()
      >>> params, direction = {"kernel": jnp.ones((2, 2))}, {"kernel": jnp.eye(2)}
      >>> _, state = stage.update(direction, stage.init(params), params)
      >>> params = {"kernel": 3 * jnp.ones((2, 2))}
      >>> _, state = stage.update(direction, state, params)
      >>> print(state.trust_ratio["kernel"].round(3))
      3.0

    References:
      Lou & You, *OrScale*, Definitions 1 and 2, Algorithm 1, lines 4 to 11.
    """
    _checks.flag("calibrate", calibrate)
    _checks.number("r_min", r_min)
    _checks.number("r_max", r_max, at_least=0, infinite=True)
    _checks.ordered("r_min", r_min, "r_max", r_max)
    _checks.number("eps", eps, at_least=0)

    def init(params: PyTree) -> CalibratedTrustRatioState:
        def filled(value: float) -> PyTree:
            return full_per_matrix(weight_dimension_numbers, params, value, compute_dtype)

        return CalibratedTrustRatioState(
            calibration=filled(0.0 if calibrate else 1.0),
            raw_trust_ratio=filled(1.0),
            trust_ratio=filled(1.0),
        )

    def scale(
        axes: LeafAxes, direction: jax.Array, weight: jax.Array, c: jax.Array
    ) -> _ScaledLeaf:
        dtype = compute_dtype((direction, weight))
        d, w = direction.astype(dtype), weight.astype(dtype)
        w_norm, d_norm = (typed_sharding.shard_like(axes.norms(x), c) for x in (w, d))
        limits = (jnp.asarray(limit, dtype) for limit in (eps, r_min, r_max))
        ratios = _ratios(c.astype(dtype) if calibrate else None, w_norm, d_norm, *limits)
        scaled = spread(axes, ratios.trust_ratio, d) * d
        return _ScaledLeaf(
            scaled.astype(direction.dtype), *(ratio.astype(c.dtype) for ratio in ratios)
        )

    def update(
        updates: PyTree, state: CalibratedTrustRatioState, params: PyTree | None = None
    ) -> tuple[PyTree, CalibratedTrustRatioState]:
        require_params(params)
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        scaled = map_matrices(scale, axes_tree, updates, params, state.calibration)
        return _field(scaled, "updates"), CalibratedTrustRatioState(
            *(_field(scaled, name) for name in CalibratedTrustRatioState._fields)
        )

    return on_bare_arrays(optax.GradientTransformation(init, update))


class _ScaledLeaf(NamedTuple):
    """The update of one leaf, and its entries in the state."""

    updates: jax.Array
    calibration: jax.Array
    raw_trust_ratio: jax.Array
    trust_ratio: jax.Array


def _field(scaled: PyTree, name: str) -> PyTree:
    """One field of every scaled leaf."""

    def field(leaf: Any) -> Any:
        return getattr(leaf, name)

    return jax.tree.map(field, scaled, is_leaf=lambda x: isinstance(x, _ScaledLeaf))


# Jitted, so that leaves of one batch shape are traced once.
@jax.jit
def _ratios(
    c: jax.Array | None,
    w_norm: jax.Array,
    d_norm: jax.Array,
    eps: jax.Array,
    r_min: jax.Array,
    r_max: jax.Array,
) -> CalibratedTrustRatioState:
    """c, r and r̂ of given norms; c is None without calibration."""
    c = jnp.ones_like(w_norm) if c is None else _anchor(c, w_norm, d_norm, eps)
    raw = _trust_ratio(c, w_norm, d_norm, eps)
    return CalibratedTrustRatioState(c, raw, jnp.clip(raw, r_min, r_max))


def _anchor(
    c: jax.Array, w_norm: jax.Array, d_norm: jax.Array, eps: jax.Array
) -> jax.Array:
    """Set c at the first direction of each matrix (Definition 2)."""
    directed = (d_norm > 0) & jnp.isfinite(d_norm)
    # No division by zero: jax_debug_nans also sees what a where discards.
    anchor = w_norm / (jnp.where(directed, d_norm, 1) + eps)
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


def _trust_ratio(
    c: jax.Array, w_norm: jax.Array, d_norm: jax.Array, eps: jax.Array
) -> jax.Array:
    """The ratio of Definition 1; 1 where c is unset or infinite or D is zero."""
    neutral = (c == 0) | jnp.isinf(c) | (d_norm == 0)
    c, d = (jnp.where(neutral, 1, x) for x in (c, d_norm))
    ratio = jnp.where(neutral, 1, w_norm / (c * d + eps))
    return jnp.where(jnp.isfinite(d_norm), ratio, jnp.nan)
