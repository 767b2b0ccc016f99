"""The stage that scales every direction by its clipped, calibrated trust ratio."""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms import anchors
from orscale_jax.transforms.boundary import on_matrices
from orscale_jax.transforms.decay import (
    DECAY,
    Mask,
    is_mask_function,
    refuse_name,
    require_booleans,
)
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices, broadcast
from orscale_jax.transforms.shape import SPECTRAL, Scale
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.checks import require_params
from orscale_jax.trees.nodes import mask_like


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


State: TypeAlias = CalibratedTrustRatioState | LargestDirectionState
STATES = (CalibratedTrustRatioState, LargestDirectionState)


def scale_by_calibrated_trust_ratio(
    *,
    calibrate: bool = True,
    anchor: str = anchors.FIRST,
    anchor_steps: ArrayLike = 100,
    r_min: ArrayLike = 0.1,
    r_max: ArrayLike = 5.0,
    eps: ArrayLike = 1e-6,
    consistent_rms: ArrayLike | None = 0.2,
    scale_mode: str = SPECTRAL,
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
      scale_mode: Likewise.
      weight_decay: The :math:`\lambda` of ``"full_rank"``. Of a schedule, its value at
        step 0; a whole optimizer takes that of the step.
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
    refuse_name("weight_decay_mask", weight_decay_mask)
    ratio = TrustRatio(
        calibrate=calibrate,
        anchor=anchor,
        anchor_steps=anchor_steps,
        r_min=r_min,
        r_max=r_max,
        eps=eps,
        scale=Scale.of(consistent_rms, scale_mode),
        weight_decay=weight_decay,
    )
    stage = functools.partial(trust_ratio_stage, ratio, weight_decay_mask)
    return on_matrices(weight_dimension_numbers, stage)


@dataclasses.dataclass(frozen=True)
class TrustRatio:
    """Arguments of :func:`scale_by_calibrated_trust_ratio`, under their names.

    ``scale`` stands for two of them.
    """

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
        _checks.choice("anchor", self.anchor, anchors.ANCHORS)
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
    def rule(self) -> anchors.Anchor:
        """The rule that sets c."""
        return anchors.ANCHORS[self.anchor] if self.calibrate else anchors.UNCALIBRATED

    def constants(self, dtype: jnp.dtype) -> anchors.Constants:
        """The numbers in the formula of the ratio."""
        given = self.eps, self.r_min, self.r_max, self.anchor_steps
        return anchors.Constants(*(jnp.asarray(constant, dtype) for constant in given))


# Users' extra arguments reach the stage, too: none of them is called this.
MEASURED = "orscale_jax.measured"


def trust_ratio_stage(
    ratio: TrustRatio, mask: Mask | None, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """:func:`scale_by_calibrated_trust_ratio` for given matrices.

    Its ``update`` also takes ``MEASURED``, for the ablations: two trees like the weights
    and the directions, of which r and c take the norms instead. The norms in the state
    are those of W and D all the same, so that it does not go with ``"largest"``.
    """

    def init(params: PyTree) -> State:
        return _initial_state(ratio, matrices, params)

    def update(
        updates: PyTree,
        state: State,
        params: PyTree | None = None,
        *,
        moving: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, State]:
        require_params(params)
        measured = extra_args.get(MEASURED)
        assert measured is None or not ratio.rule.counts
        decay = extra_args.get(DECAY, ratio.weight_decay)
        norms_of = functools.partial(_norms, ratio, decay, mask, matrices, state, moving)
        own = norms_of(params, updates)
        norms = own if measured is None else norms_of(*measured)
        entries = matrices.map(
            functools.partial(_entries, ratio), own, norms, _before(matrices, state)
        )
        fields = {
            name: matrices.map(lambda _, leaf, name=name: leaf[name], entries)
            for name in state._fields
            if name != "bounds"
        }
        bounds = ratio_bounds(params, ratio.r_min, ratio.r_max)
        new = state._replace(**fields, bounds=bounds)
        ratios = matrices.together(new.trust_ratio)
        return matrices.map(times_ratio, updates, ratios, params), new

    return optax.GradientTransformationExtraArgs(init, update)


def _initial_state(ratio: TrustRatio, matrices: Matrices, params: PyTree) -> State:
    full = functools.partial(matrices.full, params, dtype=compute_dtype)
    entries = {
        "calibration": full(value=0.0 if ratio.calibrate else 1.0),
        "raw_trust_ratio": full(value=1.0),
        "trust_ratio": full(value=1.0),
        "weight_norm": full(value=0.0),
        "direction_norm": full(value=0.0),
        "anchor_weight_norm": full(value=0.0),
        "bounds": ratio_bounds(params, ratio.r_min, ratio.r_max),
    }
    if not ratio.rule.counts:
        return CalibratedTrustRatioState(**entries)
    count = matrices.full(params, 0, lambda _: jnp.int32)
    return LargestDirectionState(**entries, anchor_count=count)


def ratio_bounds(params: PyTree, r_min: ArrayLike, r_max: ArrayLike) -> jax.Array:
    """The bounds as an array for the state."""
    dtype = compute_dtype(params)
    return jnp.stack([jnp.asarray(bound, dtype) for bound in (r_min, r_max)])


def _before(matrices: Matrices, state: State) -> PyTree:
    """What the anchor knows of each leaf."""
    trees = [state.calibration, state.anchor_weight_norm]
    if isinstance(state, LargestDirectionState):
        trees.append(state.anchor_count)
    return matrices.map(
        lambda _, *entries: anchors.Anchored(*entries), *map(matrices.together, trees)
    )


def _norms(
    ratio: TrustRatio,
    weight_decay: ArrayLike | optax.Schedule,
    mask: Mask | None,
    matrices: Matrices,
    state: State,
    moving: PyTree | None,
    params: PyTree,
    updates: PyTree,
) -> PyTree:
    """The norms of each leaf, in the dtype in which it is computed."""

    def widened(_: MatrixAxes, leaf: jax.Array, other: jax.Array) -> jax.Array:
        return leaf.astype(compute_dtype((leaf, other)))

    def placed(_: MatrixAxes, entries: jax.Array, like: jax.Array) -> jax.Array:
        return typed_sharding.shard_like(entries, like)

    c = state.calibration
    directions = matrices.norms(matrices.map(widened, updates, params))
    weights = matrices.norms(matrices.map(widened, params, updates))
    if moving is None:
        moving = matrices.map(lambda _, c: jnp.ones_like(c, bool), c)
    weights, directions, moving = (
        matrices.map(placed, entries, c) for entries in (weights, directions, moving)
    )
    anchor = directions
    if ratio.rule.needs_full_rank:
        decays = _decay_of_leaves(weight_decay, mask, params)
        norm = functools.partial(_full_rank_norm, ratio.scale)
        anchor = matrices.map(norm, weights, decays, updates)
    return matrices.map(
        lambda _, *norms: anchors.Norms(*norms), weights, directions, anchor, moving
    )


def _full_rank_norm(
    scale: Scale,
    axes: MatrixAxes,
    weight_norm: jax.Array,
    decay: jax.Array,
    leaf: jax.Array,
) -> jax.Array:
    """The norm of λW + sQ for a Q of full rank that is orthogonal to W."""
    dtype = weight_norm.dtype
    square = 1.0 if scale.rms is None else jnp.square(jnp.asarray(scale.rms, dtype))
    shapes = axes.batch_by_shape(scale.square_of_norm, leaf)
    decayed = jnp.square(decay.astype(dtype) * weight_norm)
    return jnp.sqrt(decayed + square * jnp.asarray(shapes, dtype))


def _decay_of_leaves(
    weight_decay: ArrayLike | optax.Schedule, mask: Mask | None, params: PyTree
) -> PyTree:
    """λ of each leaf: 0 where the mask is False."""
    value = weight_decay
    if callable(value):
        value = value(jnp.zeros((), jnp.int32))  # As Optax's first count.
    if is_mask_function(mask):
        mask = mask(params)
    require_booleans("weight_decay_mask", mask)
    mask = jax.tree.broadcast(True if mask is None else mask_like(mask, params), params)
    return jax.tree.map(lambda on: jnp.asarray(value if on else 0.0), mask)


def times_ratio(
    axes: MatrixAxes, direction: jax.Array, ratio: jax.Array, weight: jax.Array
) -> jax.Array:
    """The directions of a leaf times the ratios of its matrices."""
    d = direction.astype(compute_dtype((direction, weight)))
    return (broadcast(axes, ratio.astype(d.dtype), d) * d).astype(direction.dtype)


def _entries(
    ratio: TrustRatio,
    _: MatrixAxes,
    own: anchors.Norms,
    norms: anchors.Norms,
    before: anchors.Anchored,
) -> dict[str, Any]:
    """A leaf's new entries in the state by field, in the dtypes of the last step's."""
    dtype, stored = norms.weight.dtype, before.calibration.dtype
    known = before._replace(
        calibration=before.calibration.astype(dtype),
        weight_norm=before.weight_norm.astype(dtype),
    )
    new = _calibrated(ratio.rule, known, own, norms, ratio.constants(dtype))
    return {k: x if k == "anchor_count" else x.astype(stored) for k, x in new.items()}


# Jitted, so that leaves of one batch shape are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _calibrated(
    anchor: anchors.Anchor,
    before: anchors.Anchored,
    own: anchors.Norms,
    norms: anchors.Norms,
    constants: anchors.Constants,
) -> dict[str, Any]:
    """A leaf's entries by field, from what its anchor knows, its own norms and r's."""
    weight_norm = anchors.anchor_weight_norm(
        before, norms, own.weight, calibrates=anchor.calibrates
    )
    known = anchor.set_c(before, norms, constants)
    raw = _trust_ratio(known.calibration, norms, constants.eps)
    return {
        "calibration": known.calibration,
        "raw_trust_ratio": raw,
        "trust_ratio": jnp.clip(raw, constants.r_min, constants.r_max),
        "weight_norm": own.weight,
        "direction_norm": own.direction,
        "anchor_weight_norm": weight_norm,
        "anchor_count": known.directions,
    }


def _trust_ratio(c: jax.Array, norms: anchors.Norms, eps: jax.Array) -> jax.Array:
    """The ratio of Definition 1; 1 where c is unset or infinite or D or W is zero."""
    # As in LAMB's public codes: with r = 0 a W of zeros would stay zero.
    neutral = (c == 0) | jnp.isinf(c) | (norms.direction == 0) | (norms.weight == 0)
    c, d = (jnp.where(neutral, 1, x) for x in (c, norms.direction))
    ratio = jnp.where(neutral, 1, norms.weight / (c * d + eps))
    return jnp.where(jnp.isfinite(norms.direction), ratio, jnp.nan)
