"""The stage that scales every direction by its clipped, calibrated trust ratio."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import (
    Matrices,
    broadcast,
    compute_dtype,
    on_matrices,
)
from orscale_jax.transforms.stages import (
    CONSISTENT_RMS,
    DECAY,
    SPECTRAL,
    WEIGHT_DECAY,
    Mask,
    Scale,
    resolve_mask,
)
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.checks import require_params

#: The rules that set c.
ANCHORS = FIRST, FULL_RANK, LARGEST = ("first", "full_rank", "largest")
#: Defaults of the paper's language-model configuration.
R_MIN, R_MAX, EPS = 0.1, 5.0, 1e-6
ANCHOR_STEPS = 100


class CalibratedTrustRatioState(NamedTuple):
    """State of :func:`scale_by_calibrated_trust_ratio`.

    Every field but ``bounds`` is a tree like the parameters. For each leaf of matrices it
    has an array of the batch shape (``()`` for a plain matrix) and dtype float32 (float64
    for float64 parameters). The next step depends on c, and with ``anchor="largest"`` on
    the count and the anchor's ‖W‖; :func:`orscale_jax.diagnostics.read` turns the others
    into readouts.
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
    #: The number of directions that have entered c, dtype int32. None but for
    #: ``anchor="largest"``.
    anchor_count: PyTree | None
    #: The bounds of the last step, shape (2,), dtype as above.
    bounds: jax.Array


def scale_by_calibrated_trust_ratio(
    *,
    calibrate: bool = True,
    anchor: str = FIRST,
    anchor_steps: ArrayLike = ANCHOR_STEPS,
    r_min: ArrayLike = R_MIN,
    r_max: ArrayLike = R_MAX,
    eps: ArrayLike = EPS,
    consistent_rms: ArrayLike | None = CONSISTENT_RMS,
    scale_mode: str = SPECTRAL,
    weight_decay: ArrayLike | optax.Schedule = WEIGHT_DECAY,
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
    :math:`c = 1 / \lambda`. So ``update`` takes an extra argument, ``moving``: a tree
    like the updates with booleans of the batch shapes, True where :math:`Q \neq 0`.
    :func:`orscale` and :func:`from_first_nonzero_update` pass it to the stages inside.
    Without it, every D that is not zero is a direction.

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
      scale_mode: Likewise.
      weight_decay: The :math:`\lambda` of ``"full_rank"``. Of a schedule, its value at
        step 0; a whole optimizer takes that of the step.
      weight_decay_mask: Where the :math:`\lambda` of ``"full_rank"`` is 0, as in
        :func:`orscale`.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation with :class:`CalibratedTrustRatioState`. Norms and ratios are
      float32 (float64 for float64); updates keep their shapes and dtypes.

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
    if isinstance(weight_decay_mask, str):
        remedy = "only a whole optimizer takes a string; pass a tree of booleans"
        _checks.refuse("weight_decay_mask", weight_decay_mask, remedy)
    scale = Scale.of(consistent_rms, scale_mode)
    ratio = TrustRatio(
        calibrate, anchor, anchor_steps, r_min, r_max, eps, scale, weight_decay
    )
    stage = functools.partial(trust_ratio_stage, ratio, weight_decay_mask)
    return on_matrices(weight_dimension_numbers, stage)


@dataclasses.dataclass(frozen=True)
class TrustRatio:
    """Arguments of :func:`scale_by_calibrated_trust_ratio`; ``scale`` is two of them."""

    calibrate: bool
    anchor: str
    anchor_steps: ArrayLike
    r_min: ArrayLike
    r_max: ArrayLike
    eps: ArrayLike
    scale: Scale
    weight_decay: ArrayLike | optax.Schedule

    def __post_init__(self) -> None:
        """Refuse bad values."""
        _checks.flag("calibrate", self.calibrate)
        _checks.choice("anchor", self.anchor, ANCHORS)
        _checks.number("anchor_steps", self.anchor_steps, at_least=1)
        # optax.inject_hyperparams makes a float of it.
        steps = self.anchor_steps
        if not isinstance(steps, jax.core.Tracer) and jax.device_get(steps) % 1:
            _checks.refuse("anchor_steps", steps, "pass a whole number")
        _checks.number("r_min", self.r_min)
        _checks.number("r_max", self.r_max, at_least=0, infinite=True)
        _checks.ordered("r_min", self.r_min, "r_max", self.r_max)
        _checks.number("eps", self.eps, at_least=0)
        _checks.number("weight_decay", self.weight_decay, at_least=0, schedule=True)

    @property
    def rule(self) -> str | None:
        """The rule that sets c; None for c = 1."""
        return self.anchor if self.calibrate else None

    def bounds(self, params: PyTree) -> jax.Array:
        """The bounds as an array for the state."""
        dtype = compute_dtype(params)
        return jnp.stack([jnp.asarray(x, dtype) for x in (self.r_min, self.r_max)])


def trust_ratio_stage(
    ratio: TrustRatio, mask: Mask | None, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """:func:`scale_by_calibrated_trust_ratio` for given matrices."""
    counts = ratio.rule == LARGEST

    def init(params: PyTree) -> CalibratedTrustRatioState:
        full = functools.partial(matrices.full, params, dtype=compute_dtype)
        count = matrices.full(params, 0, lambda _: jnp.int32) if counts else None
        return CalibratedTrustRatioState(
            calibration=full(value=0.0 if ratio.calibrate else 1.0),
            raw_trust_ratio=full(value=1.0),
            trust_ratio=full(value=1.0),
            weight_norm=full(value=0.0),
            direction_norm=full(value=0.0),
            anchor_weight_norm=full(value=0.0),
            anchor_count=count,
            bounds=ratio.bounds(params),
        )

    def update(
        updates: PyTree,
        state: CalibratedTrustRatioState,
        params: PyTree | None = None,
        *,
        moving: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, CalibratedTrustRatioState]:
        require_params(params)

        def placed(_: MatrixAxes, entries: jax.Array, c: jax.Array) -> jax.Array:
            return typed_sharding.shard_like(entries, c)

        directions, weights = (
            matrices.map(placed, matrices.norms(tree), state.calibration)
            for tree in (updates, params)
        )
        if moving is None:
            moving = matrices.map(lambda _, c: jnp.ones_like(c, bool), state.calibration)
        moving = matrices.map(placed, moving, state.calibration)
        anchored = directions
        if ratio.rule == FULL_RANK:
            decay = extra_args.get(DECAY, ratio.weight_decay)
            anchored = _full_rank_norms(
                ratio.scale, decay, mask, matrices, weights, params
            )
        known = [state.calibration, state.anchor_weight_norm]
        known += [state.anchor_count] if counts else []
        given = ratio.eps, ratio.r_min, ratio.r_max, ratio.anchor_steps
        measured = weights, directions, anchored, moving
        rows = []
        for _, *leaf in matrices.rows(*measured, *map(matrices.together, known)):
            numbers = [jnp.asarray(number, leaf[0].dtype) for number in given]
            rows.append(_calibrated(ratio.rule, leaf, numbers))
        columns = map(matrices.tree_of, zip(*rows, strict=True))
        fields = dict(zip(state._fields, columns, strict=False))
        new = state._replace(**fields, bounds=ratio.bounds(params))
        ratios = matrices.together(new.trust_ratio)
        return matrices.map(times_ratio, updates, ratios), new

    return optax.GradientTransformationExtraArgs(init, update)


def times_ratio(axes: MatrixAxes, direction: jax.Array, ratio: jax.Array) -> jax.Array:
    """The directions of a leaf times the ratios of its matrices."""
    return broadcast(axes, ratio, direction) * direction


def not_one(c: jax.Array) -> jax.Array:
    """Replace 1, which stands for no calibration, by the number next to it."""
    next_to_one = 1 - jnp.finfo(jnp.float32).epsneg  # As c may be stored, in float32.
    return jnp.where(c.astype(jnp.float32) == 1, next_to_one, c)


def _full_rank_norms(
    scale: Scale,
    weight_decay: ArrayLike | optax.Schedule,
    mask: Mask | None,
    matrices: Matrices,
    weights: PyTree,
    params: PyTree,
) -> PyTree:
    """The norms of λW + sQ for Q of full rank that are orthogonal to W."""
    value = weight_decay
    if callable(value):
        value = value(jnp.zeros((), jnp.int32))  # As Optax's first count.
    mask = resolve_mask(mask, params)
    decays = jax.tree.broadcast(True if mask is None else mask, params)

    def norm(axes: MatrixAxes, weight: jax.Array, on: Any, leaf: jax.Array) -> jax.Array:
        dtype = weight.dtype
        square = 1.0 if scale.rms is None else jnp.square(jnp.asarray(scale.rms, dtype))
        shapes = axes.batch_by_shape(scale.square_of_norm, leaf)
        decayed = jnp.square(jnp.asarray(value if on else 0.0, dtype) * weight)
        return jnp.sqrt(decayed + square * jnp.asarray(shapes, dtype))

    return matrices.map(norm, weights, decays, params)


# Jitted, so that leaves of one batch shape are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _calibrated(
    rule: str | None, leaf: Sequence[jax.Array], numbers: Sequence[jax.Array]
) -> list[jax.Array]:
    """Definitions 1 and 2: c, r and r̂ of ‖W‖, ‖D‖, d₀ and what was known before."""
    weight, direction, anchored, moving, c, anchor_weight_norm, *counts = leaf
    eps, r_min, r_max, anchor_steps = numbers
    directed = moving & (direction > 0) & jnp.isfinite(direction)
    unset = (c == 0) | (c == 1)  # By init, or by a run without calibration.
    # Without a c that the rule sets, ‖W‖ counts at the first direction at which it is not
    # zero. It stays 0 where c was set before states kept this norm.
    is_first = (unset | jnp.isinf(c)) & (anchor_weight_norm == 0)
    is_new = (is_first if rule is None else is_first | unset) & directed
    new_norm = jnp.where(is_new & jnp.isfinite(weight), weight, anchor_weight_norm)
    if rule is None:
        c = jnp.ones_like(weight)
    else:
        # No division by zero: jax_debug_nans also sees what a where discards.
        first = weight / (jnp.where(directed, anchored, 1) + eps)
        ready = unset & directed & jnp.isfinite(first)
        known = jnp.where(unset, 0, c)  # Until then r is 1, also where c was 1.
        c = jnp.where(ready, jnp.where(first > 0, not_one(first), jnp.inf), known)
    if rule == LARGEST:
        is_first = ready & jnp.isfinite(c)
        count = jnp.where(ready, 0, counts.pop())
        norm = jnp.where(is_first, weight, anchor_weight_norm)
        # A c that another rule has set has no count: it stays.
        counting = (is_first | (count > 0)) & (norm > 0)
        early = count.astype(direction.dtype) < anchor_steps
        entering = counting & directed & early
        largest = norm / (jnp.where(entering, direction, 1) + eps)
        c = jnp.where(entering, jnp.minimum(c, not_one(largest)), c)
        counts = [count + entering.astype(count.dtype)]
    # As in LAMB's public codes: with r = 0 a W of zeros would stay zero.
    neutral = (c == 0) | jnp.isinf(c) | (direction == 0) | (weight == 0)
    of_c, d = (jnp.where(neutral, 1, x) for x in (c, direction))
    raw = jnp.where(neutral, 1, weight / (of_c * d + eps))
    raw = jnp.where(jnp.isfinite(direction), raw, jnp.nan)
    clipped = jnp.clip(raw, r_min, r_max)
    return [c, raw, clipped, weight, direction, new_norm, *counts]
