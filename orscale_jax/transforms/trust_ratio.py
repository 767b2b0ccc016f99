"""The stage that scales every direction by its clipped, calibrated trust ratio."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.newton_schulz.fusion import read_together
from orscale_jax.parameters.axes import MatrixAxes, square_root
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, broadcast, on_matrices
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.checks import require_params

#: The rules that set c, given ``anchor_steps``: how many directions set it, each anew and
#: with its own W as W₀, and how many, with these, may lower it.
ANCHORS: dict[str, Callable[[ArrayLike], tuple[ArrayLike, ArrayLike]]] = {
    "first": lambda steps: (1, 1),
    "largest": lambda steps: (1, steps),
}
ANCHOR, ANCHOR_STEPS = "first", 100
#: Defaults of the paper's language-model configuration.
R_MIN, R_MAX, EPS = 0.1, 5.0, 1e-6
#: What the state has of each matrix. The next step reads the first three.
NUMBERS = (
    "calibration",
    "anchor_count",
    "anchor_weight_norm",
    "raw_trust_ratio",
    "trust_ratio",
    "weight_norm",
    "direction_norm",
)


class CalibratedTrustRatioState(NamedTuple):
    """State of :func:`scale_by_calibrated_trust_ratio`.

    Each property is a tree like the parameters, in which a leaf of matrices has an array
    of the batch shape (``()`` for a plain matrix).
    :func:`orscale_jax.diagnostics.read` turns them into readouts.
    """

    #: Tree like the parameters. A leaf of matrices has one array of shape
    #: ``(7, *batch)``, with the numbers of the properties in the order of ``NUMBERS``,
    #: and dtype float32 (float64 for float64 parameters). Zeros anchor c again.
    numbers: PyTree

    @property
    def calibration(self) -> PyTree:
        """The constant c, which is 0 while unset, and 1 if it is not calibrated."""
        return self._of("calibration")

    @property
    def anchor_count(self) -> PyTree:
        """The number of directions that have entered c; 0 while c is not set."""
        return self._of("anchor_count")

    @property
    def anchor_weight_norm(self) -> PyTree:
        """‖W₀‖, at the first direction, or at the first at which W is not zero."""
        return self._of("anchor_weight_norm")

    @property
    def raw_trust_ratio(self) -> PyTree:
        """The ratio r before clipping, 1 before the first step."""
        return self._of("raw_trust_ratio")

    @property
    def trust_ratio(self) -> PyTree:
        """The ratio r̂ that was applied, 1 before the first step."""
        return self._of("trust_ratio")

    @property
    def weight_norm(self) -> PyTree:
        """‖W‖ before the last step, 0 before the first one."""
        return self._of("weight_norm")

    @property
    def direction_norm(self) -> PyTree:
        """‖D‖ of the last step, 0 before the first one."""
        return self._of("direction_norm")

    def _of(self, name: str) -> PyTree:
        at = functools.partial(jax.lax.index_in_dim, index=NUMBERS.index(name))
        return jax.tree.map(lambda x: at(x, keepdims=False), unbox(self.numbers))


def scale_by_calibrated_trust_ratio(
    *,
    calibrate: bool = True,
    anchor: str = ANCHOR,
    anchor_steps: ArrayLike = ANCHOR_STEPS,
    r_min: ArrayLike = R_MIN,
    r_max: ArrayLike = R_MAX,
    eps: ArrayLike = EPS,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale every direction D by its clipped, calibrated trust ratio.

    .. math::

      r = \frac{\|W\|_F}{c \, \|D\|_F + \varepsilon}, \qquad
      \hat r = \mathrm{clip}(r, r_{\min}, r_{\max}), \qquad D \mapsto \hat r D,

    where :math:`c = \|W_0\|_F / (d_0 + \varepsilon)` is set once per matrix, at the first
    step at which :math:`D \neq 0` and everything in c is finite. :math:`W_0` is the
    weight at that step, and the anchor decides what :math:`d_0` is:

    ``"first"``
      :math:`d_0 = \|D_0\|_F`, as in the paper. r starts at 1, and is from then on the
      growth of W divided by the growth of D. If the first direction has low rank (few
      tokens, a small batch), later directions are larger, and the matrix keeps small
      ratios.
    ``"largest"``
      :math:`d_0 = \max_t \|D_t\|_F` over the first ``anchor_steps`` directions of the
      matrix. r starts at 1, and c falls at each direction that is larger than all
      directions before it.

    r is 1 before c is set, and wherever D or W is zero. A matrix whose norm is zero at
    its first direction has no initial scale, and always keeps r = 1. A D that is not
    finite never enters c, and gives r = NaN.

    Decay alone should not set c, because :math:`D = \lambda W` would give :math:`c = 1 /
    \lambda`. In a chain of your own, compute D inside :func:`where_nonzero`, as
    :func:`orscale` does.

    Args:
      calibrate: Whether to set c. If False, c = 1. The argument may change between runs:
        with True, a run that had c = 1 sets c at its next direction; with False, every c
        becomes 1.
      anchor: ``"first"`` or ``"largest"``.
      anchor_steps: The number of directions for ``"largest"``, at least 1.
      r_min: Lower bound of the ratio applied. ``-inf`` for none.
      r_max: Upper bound of the ratio applied, at least 0. ``inf`` for none.
      eps: The floor :math:`\varepsilon`, at least 0.
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
      Lou & You, *OrScale*, Definitions 1 and 2, Algorithm 1, lines 4 to 11. The anchor
      ``"largest"`` is this library's own.
    """
    ratio = TrustRatio(calibrate, anchor, anchor_steps, r_min, r_max, eps)
    stage = functools.partial(trust_ratio_stage, ratio)
    return on_matrices(weight_dimension_numbers, stage)


@dataclasses.dataclass(frozen=True)
class TrustRatio:
    """Arguments of :func:`scale_by_calibrated_trust_ratio`."""

    calibrate: bool
    anchor: str
    anchor_steps: ArrayLike
    r_min: ArrayLike
    r_max: ArrayLike
    eps: ArrayLike

    def __post_init__(self) -> None:
        validate.flag("calibrate", self.calibrate)
        validate.choice("anchor", self.anchor, ANCHORS)
        validate.number("anchor_steps", self.anchor_steps, at_least=1)
        # optax.inject_hyperparams makes a float of it.
        steps = self.anchor_steps
        if not isinstance(steps, jax.core.Tracer) and jax.device_get(steps) % 1:
            validate.refuse("anchor_steps", steps, "pass a whole number")
        validate.number("r_min", self.r_min)
        validate.number("r_max", self.r_max, at_least=0, infinite=True)
        validate.ordered("r_min", self.r_min, "r_max", self.r_max)
        validate.number("eps", self.eps, at_least=0)


def trust_ratio_stage(
    ratio: TrustRatio, matrices: Matrices
) -> optax.GradientTransformation:
    """:func:`scale_by_calibrated_trust_ratio` for given matrices."""
    # The last direction of a matrix that sets c, and the last that may lower it.
    last = ANCHORS[ratio.anchor](ratio.anchor_steps) if ratio.calibrate else (0, 0)

    def init(params: PyTree) -> CalibratedTrustRatioState:
        known = {"raw_trust_ratio": 1.0, "trust_ratio": 1.0}
        known |= {} if ratio.calibrate else {"calibration": 1.0}
        initial = [known.get(name, 0.0) for name in NUMBERS]
        return CalibratedTrustRatioState(matrices.constants(params, initial))

    def update(
        updates: PyTree, state: CalibratedTrustRatioState, params: PyTree | None = None
    ) -> tuple[PyTree, CalibratedTrustRatioState]:
        require_params(params)

        def next_numbers(
            _: MatrixAxes, before: jax.Array, *squares: jax.Array
        ) -> jax.Array:
            like = before[0]
            norms = [typed_sharding.shard_like(square_root(x), like) for x in squares]
            given = *last, ratio.eps, ratio.r_min, ratio.r_max
            arguments = [jnp.asarray(number, before.dtype) for number in given]
            return _calibrated(ratio.calibrate, before, *norms, *arguments)

        # D is not the sum that W and Q give by their norms and their product: where they
        # cancel, all digits of that would be lost.
        squares = matrices.sums(jnp.square, params, updates)
        old = read_together(matrices.leaves(state.numbers), matrices.leaves(updates))
        numbers = matrices.map(next_numbers, matrices.tree_of(old), *squares)
        new = CalibratedTrustRatioState(numbers)
        scaled = matrices.map(
            lambda axes, d, ratio: broadcast(axes, ratio, d) * d, updates, new.trust_ratio
        )
        return scaled, new

    return optax.GradientTransformation(init, update)


# Jitted, so that leaves of one batch shape are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _calibrated(
    calibrate: bool,
    before: jax.Array,
    weight_norm: jax.Array,
    direction_norm: jax.Array,
    last_to_set: jax.Array,
    last_to_lower: jax.Array,
    eps: jax.Array,
    r_min: jax.Array,
    r_max: jax.Array,
) -> jax.Array:
    """Definitions 1 and 2: the numbers after a step with ‖W‖ and ‖D‖."""
    c, count, anchor_norm, *_ = jnp.unstack(before)
    finite = jnp.isfinite(direction_norm) & jnp.isfinite(weight_norm)
    is_direction = finite & (direction_norm > 0)
    sets = is_direction & (count < last_to_set)
    enters = is_direction & (count < last_to_lower)
    # ‖W₀‖ may still be zero in a matrix without initial scale.
    begins = sets | (is_direction & (anchor_norm == 0))
    anchor_norm = jnp.where(begins, weight_norm, anchor_norm)
    if calibrate:
        # No division by zero: jax_debug_nans also sees what a where discards.
        candidate = anchor_norm / (jnp.where(is_direction, direction_norm, 1) + eps)
        enters &= jnp.isfinite(candidate)
        known = jnp.where(count == 0, 0, c)  # Without calibration before, c was 1.
        smallest = jnp.where(sets, candidate, jnp.minimum(known, candidate))
        c = jnp.where(enters, smallest, known)
        count += enters.astype(count.dtype)
    else:
        c, count = jnp.ones_like(c), jnp.zeros_like(count)
    # As in LAMB's public codes: with r = 0 a W of zeros would stay zero.
    neutral = (c == 0) | (direction_norm == 0) | (weight_norm == 0)
    scaled = jnp.where(neutral, 1, c * direction_norm)
    raw = jnp.where(neutral, 1, weight_norm / (scaled + eps))
    raw = jnp.where(jnp.isfinite(direction_norm), raw, jnp.nan)
    clipped = jnp.clip(raw, r_min, r_max)
    return jnp.stack([c, count, anchor_norm, raw, clipped, weight_norm, direction_norm])
