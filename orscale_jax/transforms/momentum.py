"""The momentum of the matrices, of floats or of 8 bits; Adam's moments in float16."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.transforms import int8_blocks
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree, box_like, unbox

#: The fields of :class:`Int8TraceState`; the first one is also that of Optax's state.
TRACE, TRACE_SCALE = "trace", "trace_scale"


class Int8TraceState(NamedTuple):
    r"""State of the matrices' momentum under ``mu_dtype="int8"``: 1.0625 bytes an entry.

    32 neighbours along one axis of a leaf are a block. The block's scale s is the largest
    absolute value of its entries, rounded to bfloat16, and the code of an entry x the
    integer q nearest to :math:`127 x / s`. The state stands for :math:`s q / 127`, which
    differs from x by at most half a step, :math:`s / 254`, and a rounding error of
    float32. :func:`orscale_jax.convert_state` converts it to floats and back.

    The blocks lie along the longest axis of the leaf's matrices, the leaf's last axis
    only if the others are shorter than a block, and never along an axis that
    :class:`BlockDimensionNumbers` divide. They depend on the leaf's shape alone, not on
    the mesh. Devices that hold whole blocks (a multiple of 32 entries along that axis)
    exchange nothing. Where shards cut blocks, devices send the largest value of each
    piece, in bfloat16, and the scales are sharded along another axis. On Auto axes XLA
    does so if the shards have whole blocks or divide them; otherwise it gathers the
    momentum along that axis.

    A block whose largest value is below :math:`2^{-119} \approx 1.5 \cdot 10^{-36}` is
    zero. A block with an entry that is not finite or beyond the largest bfloat16
    (:math:`3.39 \cdot 10^{38}`) has the scale NaN: its momentum is NaN from then on.

    References:
      Dettmers et al. 2021, *8-bit Optimizers via Block-wise Quantization*,
      arXiv:2110.02861; Gupta et al. 2025, *Effective Quantization of Muon Optimizer
      States*, arXiv:2509.23106.
    """

    #: Tree like the parameters, the codes in the parameters' shapes and dtype int8.
    trace: PyTree
    #: Tree like the parameters, the scales in dtype bfloat16 and the parameters' shapes
    #: but for the blocks' axis, which is 32 times shorter, rounded up.
    trace_scale: PyTree


def is_int8(mu_dtype: DTypeLike | None) -> bool:
    """Whether the dtype of the momentum is int8; anything may be given."""
    if mu_dtype is None or isinstance(mu_dtype, jax.Array | np.ndarray | np.generic):
        return False
    try:
        return jnp.dtype(mu_dtype) == jnp.int8
    except TypeError:
        return False


def check_mu_dtype(mu_dtype: DTypeLike | None) -> None:
    """Refuse a dtype of the momentum that is neither None, int8 nor a wide float."""
    if not is_int8(mu_dtype):
        _checks.dtype("mu_dtype", mu_dtype, also='"int8" ')


def float_dtype(mu_dtype: DTypeLike | None) -> DTypeLike | None:
    """The dtype of other moments: that of the momentum, or None where that is int8."""
    return None if is_int8(mu_dtype) else mu_dtype


def with_float32_squares(
    adam: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Adam whose ν of float16 parameters is float32: squares below 6e-8 underflow."""

    def widened(nu: jax.Array) -> jax.Array:
        return nu.astype(jnp.float32) if nu.dtype == jnp.float16 else nu

    def init(params: PyTree) -> optax.OptState:
        state = adam.init(params)
        return state._replace(nu=jax.tree.map(widened, state.nu))

    return optax.GradientTransformation(init, adam.update)


def momentum_stage(
    momentum: ArrayLike, nesterov: bool, mu_dtype: DTypeLike | None, matrices: Matrices
) -> optax.GradientTransformation:
    """M ← μM + G, and M̃ = μM + G, or M without Nesterov."""
    if not is_int8(mu_dtype):
        return optax.trace(momentum, nesterov=nesterov, accumulator_dtype=mu_dtype)
    return _int8_trace(momentum, nesterov, matrices)


def _int8_trace(
    momentum: ArrayLike, nesterov: bool, matrices: Matrices
) -> optax.GradientTransformation:
    """:func:`optax.trace` whose M is rounded on its way into the state, not before."""

    def init(params: PyTree) -> Int8TraceState:
        codes = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.int8), params)
        return Int8TraceState(codes, _initial_scales(matrices, codes))

    def step(
        axes: MatrixAxes, update: jax.Array, codes: jax.Array, scales: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # In the shape of blocks, so that XLA for TPUs fuses all of it.
        axis = int8_blocks.block_axis(axes, update.shape)
        grad = int8_blocks.split(update, axis)
        m = grad + momentum * int8_blocks.decode_pieces(codes, scales, axis, grad.dtype)
        out = grad + momentum * m if nesterov else m
        new_codes, new_scales = int8_blocks.encode_pieces(m, update, axis)
        whole = (int8_blocks.merge(x, axis, update) for x in (out, new_codes))
        # One leaf after another: XLA would round them last, and keep M of all until then.
        return jax.lax.optimization_barrier((*whole, new_scales))

    def update(
        updates: PyTree, state: Int8TraceState, params: PyTree | None = None
    ) -> tuple[PyTree, Int8TraceState]:
        rows = matrices.rows(updates, state.trace, state.trace_scale)
        stepped = [step(*row) for row in rows]
        out, codes, scales = (
            matrices.tree_of([leaf[i] for leaf in stepped]) for i in range(3)
        )
        return out, Int8TraceState(codes, scales)

    return optax.GradientTransformation(init, update)


def _initial_scales(matrices: Matrices, codes: PyTree) -> PyTree:
    """Scales of zeros, in boxes that name the axes of the codes' boxes."""
    # For optax.tree.map_params, as in Matrices.entries.
    if type(codes).__name__ == "_ParamsPlaceholder":
        return jnp.ones(())

    def scales(axes: MatrixAxes, node: PyTree) -> PyTree:
        array = unbox(node)
        axis = int8_blocks.block_axis(axes, array.shape)
        return box_like(int8_blocks.scales_of_zeros(array, axis), node, tuple)

    return matrices.tree_of([scales(*row) for row in matrices.rows(codes)])
