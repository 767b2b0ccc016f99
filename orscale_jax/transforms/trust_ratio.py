"""The stage that scales every direction by its clipped, calibrated trust ratio."""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.parameters.blocks import LeafAxes
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    require_matrices,
)
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms import anchors
from orscale_jax.transforms.decay import (
    Mask,
    add_decayed_weights,
    is_mask_function,
    refuse_name,
)
from orscale_jax.transforms.float32 import compute_dtype
from orscale_jax.transforms.fusion import in_stacks
from orscale_jax.transforms.per_matrix import (
    full_per_matrix,
    map_matrices,
    matrix_norms,
    require_per_matrix,
    spread,
)
from orscale_jax.trees.boxes import PyTree, on_bare_arrays
from orscale_jax.trees.updates import require_params


class CalibratedTrustRatioState(NamedTuple):
    """State of :func:`scale_by_calibrated_trust_ratio`.

    Every field but ``bounds`` is a tree like the parameters. For each leaf of matrices it
    has an array of the batch shape (``()`` for a plain matrix) and dtype float32 (float64
    for float64 parameters). The next step depends on c alone;
    :func:`orscale_jax.diagnostics.read` turns the others into readouts.
    """

    #: The constant c, 0 while unset, inf for a matrix without initial scale.
    calibration: PyTree
    #: The ratio r before clipping, 1 before the first step.
    raw_trust_ratio: PyTree
    #: The ratio r̂ that was applied, 1 before the first step.
    trust_ratio: PyTree
    #: ‖W‖ before the last step, 0 before the first one.
    weight_norm: PyTree
    #: ‖D‖ of the last step, 0 before the first one.
    direction_norm: PyTree
    #: ‖W‖ where c was anchored; without calibration and for c = inf, at the first
    #: direction at which it is not zero. 0 before.
    anchor_weight_norm: PyTree
    #: The bounds of the last step, shape (2,), dtype as above.
    bounds: jax.Array


class LargestDirectionState(NamedTuple):
    """State of :func:`scale_by_calibrated_trust_ratio` with ``anchor="largest"``.

    The fields of :class:`CalibratedTrustRatioState`, and one more of the same shapes.
    """

    #: The constant c.
    calibration: PyTree
    #: The ratio r before clipping.
    raw_trust_ratio: PyTree
    #: The ratio r̂ that was applied.
    trust_ratio: PyTree
    #: ‖W‖ before the last step.
    weight_norm: PyTree
    #: ‖D‖ of the last step.
    direction_norm: PyTree
    #: ‖W‖ where c was anchored.
    anchor_weight_norm: PyTree
    #: The number of directions that have entered c, dtype int32.
    anchor_count: PyTree
    #: The bounds.
    bounds: jax.Array


def scale_by_calibrated_trust_ratio(
    *,
    calibrate: bool = True,
    anchor: str = anchors.FIRST,
    anchor_steps: ArrayLike = 100,
    r_min: ArrayLike = 0.1,
    r_max: ArrayLike = 5.0,
    eps: ArrayLike = 1e-6,
    consistent_rms: ArrayLike | None = 0.2,
    weight_decay: ArrayLike | optax.Schedule = 0.1,
    weight_decay_mask: Mask | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale every direction D by its clipped, calibrated trust ratio.

    .. math::

      r = \frac{\|W\|_F}{c \, \|D\|_F + \varepsilon}, \qquad
      \hat r = \mathrm{clip}(r, r_{\min}, r_{\max}), \qquad D \mapsto \hat r D,

    where :math:`c = \|W_0\|_F / (d_0 + \varepsilon)` is set once per matrix, at the first
    step at which the matrix has a direction and everything in c is finite. :math:`W_0` is
    the weight at that step, and the anchor decides what :math:`d_0` is:

    ``"first"``
      :math:`d_0 = \|D_0\|_F`, as in the paper: r starts at 1, and is from then on the
      growth of W divided by the growth of D. If the first direction has low rank (few
      tokens, a small batch), later ones are larger, and the matrix keeps small ratios.
    ``"full_rank"``
      :math:`d_0^2 = \lambda^2 \|W_0\|_F^2 + s^2 \min(m, n)`: the norm of
      :math:`D = \lambda W_0 + sQ` for a Q of full rank that is orthogonal to
      :math:`W_0`. r starts above 1 if the first direction has low rank. (With cautious
      decay D is different, and r does not start at 1 where :math:`\lambda \|W_0\|` is
      large.)
    ``"largest"``
      :math:`d_0 = \max_t \|D_t\|_F` over the first ``anchor_steps`` directions of the
      matrix: r starts at 1, and c falls at each direction that is larger than those
      before.

    Before c is set, and wherever D or W is zero, r is 1. A matrix whose norm is zero at
    its first direction has no initial scale: its c becomes infinite, which stands for
    "none", and it keeps r = 1 for good. A D that is not finite never enters c and gives
    r = NaN. If c is set to 0, the matrix is anchored again at its next direction.

    Decay alone is no direction: :math:`D = \lambda W` would anchor
    :math:`c = 1 / \lambda`. D does not show whether Q is zero, so ``update`` takes an
    extra argument, ``moving``: a tree like the updates with booleans of the batch shapes,
    True where :math:`Q \neq 0`. :func:`orscale` passes it, and so does
    :func:`from_first_nonzero_update` to the stages inside it. Without it, every D that is
    not zero is a direction.

    Args:
      calibrate: Whether to anchor c; if False, c = 1. It may change between runs: with
        True, c is anchored at the next direction of a run that had c = 1; with False,
        every c becomes 1.
      anchor: ``"first"``, ``"full_rank"`` or ``"largest"``. Choosing another one later
        does not change a c that has been set.
      anchor_steps: The number of directions for ``"largest"``, at least 1.
      r_min: Lower bound of the ratio applied. ``-inf`` for none.
      r_max: Upper bound of the ratio applied, at least 0. ``inf`` for none.
      eps: The floor :math:`\varepsilon`, at least 0.
      consistent_rms: The s of ``"full_rank"``, as in :func:`scale_by_shape`.
      weight_decay: The :math:`\lambda` of ``"full_rank"``. Of a schedule, its value at
        step 0.
      weight_decay_mask: Where the :math:`\lambda` of ``"full_rank"`` is 0, as in
        :func:`orscale`.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation with :class:`CalibratedTrustRatioState`, or with
      :class:`LargestDirectionState` for that anchor. Norms and ratios are float32
      (float64 for float64); updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, a leaf is not a matrix, or ``params`` is
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
      Lou & You, *OrScale*, Definitions 1 and 2, Algorithm 1, lines 4 to 11. The anchors
      ``"full_rank"`` and ``"largest"`` are this library's own.
    """
    _checks.flag("calibrate", calibrate)
    _checks.choice("anchor", anchor, anchors.ANCHORS)
    _checks.number("anchor_steps", anchor_steps, at_least=1)
    _checks.number("r_min", r_min)
    _checks.number("r_max", r_max, at_least=0, infinite=True)
    _checks.ordered("r_min", r_min, "r_max", r_max)
    _checks.number("eps", eps, at_least=0)
    _checks.number("consistent_rms", consistent_rms, at_least=0, optional=True)
    _checks.number("weight_decay", weight_decay, at_least=0, schedule=True)
    refuse_name("weight_decay_mask", weight_decay_mask)
    rule = anchors.ANCHORS[anchor] if calibrate else anchors.UNCALIBRATED
    ratio = _TrustRatio(rule, consistent_rms, (eps, r_min, r_max, anchor_steps))

    def init(params: PyTree) -> Any:
        def filled(value: float, dtype: Any = compute_dtype) -> PyTree:
            return full_per_matrix(weight_dimension_numbers, params, value, dtype)

        c = filled(0.0 if calibrate else 1.0)
        ratios = filled(1.0), filled(1.0)
        norms = filled(0.0), filled(0.0), filled(0.0)
        bounds = ratio_bounds(params, r_min, r_max)
        if rule.counts:
            count = filled(0, lambda _: jnp.int32)
            return LargestDirectionState(c, *ratios, *norms, count, bounds)
        return CalibratedTrustRatioState(c, *ratios, *norms, bounds)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        moving: PyTree | None = None,
        **_: Any,
    ) -> tuple[PyTree, Any]:
        require_params(params)
        axes_tree = require_matrices(weight_dimension_numbers, updates)
        require_per_matrix(state.calibration, axes_tree, updates)
        given = weight_decay, weight_decay_mask
        decays = _decay_of_leaves(*(given if rule.needs_full_rank else (0, None)), params)
        *per_matrix, _ = state
        norms = _norms(axes_tree, updates, params)
        known = map(in_stacks, per_matrix)
        if moving is None:
            moving = jax.tree.map(lambda c: jnp.ones_like(c, bool), state.calibration)
        trees = updates, params, decays, *norms, moving, *known
        entries = map_matrices(ratio, axes_tree, *trees)
        fields = [_entry(entries, i) for i in range(len(per_matrix))]
        new = type(state)(*fields, ratio_bounds(params, r_min, r_max))
        ratios = in_stacks(new.trust_ratio)
        return map_matrices(_scaled, axes_tree, updates, ratios, params), new

    return on_bare_arrays(optax.GradientTransformationExtraArgs(init, update))


def ratio_bounds(params: PyTree, r_min: ArrayLike, r_max: ArrayLike) -> jax.Array:
    """The bounds as an array for the state."""
    dtype = compute_dtype(params)
    return jnp.stack([jnp.asarray(bound, dtype) for bound in (r_min, r_max)])


def _norms(axes_tree: PyTree, updates: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """‖D‖ and ‖W‖ of every matrix, in the dtype in which its leaf is computed."""

    def widened(_: LeafAxes, leaf: jax.Array, other: jax.Array) -> jax.Array:
        return leaf.astype(compute_dtype((leaf, other)))

    directions = map_matrices(widened, axes_tree, updates, params)
    weights = map_matrices(widened, axes_tree, params, updates)
    return matrix_norms(axes_tree, directions), matrix_norms(axes_tree, weights)


def _scaled(
    axes: LeafAxes, direction: jax.Array, ratio: jax.Array, weight: jax.Array
) -> jax.Array:
    d = direction.astype(compute_dtype((direction, weight)))
    return (spread(axes, ratio.astype(d.dtype), d) * d).astype(direction.dtype)


class _Entries(NamedTuple):
    """The entries of one leaf in the fields of the state."""

    arrays: tuple[jax.Array, ...]


def _entry(entries: PyTree, index: int) -> PyTree:
    """One entry of every leaf."""

    def entry(leaf: Any) -> Any:
        return leaf.arrays[index]

    return jax.tree.map(entry, entries, is_leaf=lambda x: isinstance(x, _Entries))


def _decay_of_leaves(
    weight_decay: ArrayLike | optax.Schedule,
    mask: Mask | None,
    params: PyTree,
) -> PyTree:
    """λ of each leaf: 0 where the mask is False."""
    value = weight_decay(0) if callable(weight_decay) else weight_decay
    if is_mask_function(mask):
        mask = mask(params)  # Called on the arrays, not on the numbers below.
    stage = add_decayed_weights(value, mask)
    zeros, ones = (jax.tree.map(lambda _, x=x: x, params) for x in (0.0, 1.0))
    decays, _ = stage.update(zeros, stage.init(zeros), ones)
    return decays


@dataclasses.dataclass(frozen=True)
class _TrustRatio:
    """The trust ratios of the matrices in one leaf.

    Attributes:
      anchor: The rule that sets c.
      consistent_rms: The factor of s in a D of full rank; None for s = 1.
      limits: The fields of :class:`anchors.Limits`, in their order.
    """

    anchor: anchors.Anchor
    consistent_rms: ArrayLike | None
    limits: tuple[ArrayLike, ...]

    def __call__(
        self,
        axes: LeafAxes,
        direction: jax.Array,
        weight: jax.Array,
        decay: jax.Array,
        direction_norm: jax.Array,
        weight_norm: jax.Array,
        moving: jax.Array,
        *state: jax.Array,
    ) -> _Entries:
        """A leaf's next entries in the state, given λ, the norms and the last entries."""
        dtype = compute_dtype((direction, weight))
        d = direction.astype(dtype)
        w_norm, d_norm, moves = (
            typed_sharding.shard_like(array, state[0])
            for array in (weight_norm, direction_norm, moving)
        )
        full_rank = d_norm
        if self.anchor.needs_full_rank:
            full_rank = self._full_rank_norm(axes, d, decay.astype(dtype) * w_norm)
        norms = anchors.Norms(w_norm, d_norm, full_rank, moves)
        limits = anchors.Limits(*(jnp.asarray(limit, dtype) for limit in self.limits))
        widened = tuple(
            x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in state
        )
        new = _calibrated(self.anchor, widened, norms, limits)
        pairs = zip(new, state, strict=True)
        return _Entries(tuple(x.astype(old.dtype) for x, old in pairs))

    def _full_rank_norm(
        self, axes: LeafAxes, leaf: jax.Array, decayed_norm: jax.Array
    ) -> jax.Array:
        """The norm of λW + sQ for a Q of full rank that is orthogonal to W."""
        rms = self.consistent_rms
        scale = 1.0 if rms is None else jnp.square(jnp.asarray(rms, leaf.dtype))
        shapes = axes.batch_by_shape(min if rms is None else operator.mul, leaf)
        return jnp.sqrt(
            jnp.square(decayed_norm) + scale * jnp.asarray(shapes, leaf.dtype)
        )


# Jitted, so that leaves of one batch shape are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _calibrated(
    anchor: anchors.Anchor,
    state: tuple[jax.Array, ...],
    norms: anchors.Norms,
    limits: anchors.Limits,
) -> tuple[jax.Array, ...]:
    """The entries of a leaf in the state, from those of the last step."""
    c, _, _, _, _, *anchored = state
    before = anchors.Anchored(c, *anchored)
    weight_norm = anchors.anchor_weight_norm(before, norms, calibrates=anchor.calibrates)
    known = anchor.set_c(before, norms, limits)._replace(weight_norm=weight_norm)
    c, *anchored = (entry for entry in known if entry is not None)
    raw = _trust_ratio(c, norms, limits.eps)
    clipped = jnp.clip(raw, limits.r_min, limits.r_max)
    return c, raw, clipped, norms.weight, norms.direction, *anchored


def _trust_ratio(c: jax.Array, norms: anchors.Norms, eps: jax.Array) -> jax.Array:
    """The ratio of Definition 1; 1 where c is unset or infinite or D or W is zero."""
    # As in LAMB's public codes: with r = 0 a W of zeros would stay zero.
    neutral = (c == 0) | jnp.isinf(c) | (norms.direction == 0) | (norms.weight == 0)
    c, d = (jnp.where(neutral, 1, x) for x in (c, norms.direction))
    ratio = jnp.where(neutral, 1, norms.weight / (c * d + eps))
    return jnp.where(jnp.isfinite(norms.direction), ratio, jnp.nan)
