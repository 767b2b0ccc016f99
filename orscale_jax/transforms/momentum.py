"""The momentum of the matrices: of floats, or of 8-bit integers and scales for them.

:class:`Int8TraceState` describes them, :class:`Int8AdamState` those of AdamW. An axis is
split into *pieces*: its blocks, the last of which may be shorter, or what shards make of
them where they cut blocks.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree, box_like, is_box, unbox
from orscale_jax.trees.nodes import is_masked

#: The fields of :class:`Int8TraceState`; the first one is also that of Optax's state.
TRACE, TRACE_SCALE = "trace", "trace_scale"

#: Entries that share a scale, along one axis.
BLOCK = 32
#: The largest code. −128 is left out, so that x and −x have opposite codes.
LARGEST_CODE = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.uint8): 255}
#: The smallest scale. Its quotient by 127 and the inverse of that are normal floats,
#: which no platform flushes to zero.
SMALLEST_SCALE = 2.0**-119


class Int8TraceState(NamedTuple):
    r"""State of the matrices' momentum under ``mu_dtype="int8"``: 1.0625 bytes an entry.

    32 neighbours along one axis of a leaf are a block. The scale s of a block is the
    largest absolute value of its entries, rounded to bfloat16. The code of an entry x is
    the integer q nearest to :math:`127 x / s`. The state stands for :math:`s q / 127`,
    which differs from x by at most half a step, :math:`s / 254`, and a rounding error of
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


class Int8AdamState(NamedTuple):
    r"""State of AdamW under ``adam_moments_dtype="int8"``: 2.125 bytes an entry.

    32 neighbours are a block, with a scale s for each of the two moments. They lie along
    the shorter one of the last two axes, the longer one if that has less than 32 entries,
    so that two tokens of an embedding or a head share no block. The first moment is
    rounded as :class:`Int8TraceState` says. Of the second moment ν the root is rounded,
    by less than s / 254, to a code q that is not 0: :math:`\nu = (s q / 255)^2`. A step
    uses the moments before they are rounded. From :math:`\beta_2 = 0.996` on, rounding
    would keep each root from falling. FlashOptim (arXiv:2602.23349) keeps roots, too.
    Leaves of fewer than two axes and complex ones keep floats, with masks for scales.
    """

    count: jax.Array  # type: ignore[assignment]
    #: The codes in the parameters' shapes, of dtype int8 for mu and uint8 for nu.
    mu: PyTree
    nu: PyTree
    #: The scales in dtype bfloat16, with one axis that is 32 times shorter, rounded up.
    mu_scale: PyTree
    nu_scale: PyTree


def is_int8(mu_dtype: DTypeLike | None) -> bool:
    """Whether the dtype of the momentum is int8; anything may be given."""
    if mu_dtype is None or isinstance(mu_dtype, jax.Array | np.ndarray | np.generic):
        return False
    try:
        return jnp.dtype(mu_dtype) == jnp.int8
    except TypeError:
        return False


def float_dtype(mu_dtype: DTypeLike | None) -> DTypeLike | None:
    """The dtype of other moments: that of the momentum, or None where that is int8."""
    return None if is_int8(mu_dtype) else mu_dtype


def adam_stage(
    adam: optax.GradientTransformation, mu_dtype: DTypeLike | None
) -> optax.GradientTransformation:
    """Optax's Adam; the real ones of its first moments have the dtype, if one is given.

    ν of float16 parameters is float32, since squares below 6e-8 underflow.
    """

    def narrowed(mu: jax.Array) -> jax.Array:
        real = jnp.issubdtype(mu.dtype, jnp.floating)
        return jnp.zeros_like(mu, mu_dtype) if real and mu_dtype is not None else mu

    def widened(nu: jax.Array) -> jax.Array:
        return nu.astype(jnp.float32) if nu.dtype == jnp.float16 else nu

    def init(params: PyTree) -> optax.OptState:
        state = adam.init(params)
        mu, nu = jax.tree.map(narrowed, state.mu), jax.tree.map(widened, state.nu)
        return state._replace(mu=mu, nu=nu)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        grads = jax.tree.map(typed_sharding.shard_like, updates, state.mu)
        steps, state = adam.update(grads, state, params)
        if params is not None:  # The next stage adds λW.
            steps = jax.tree.map(typed_sharding.shard_like, steps, params)
        return steps, state

    return optax.GradientTransformation(init, update)


def int8_adam_stage(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """An :func:`adam_stage` whose moments are floats only while it computes."""

    def init(params: PyTree) -> Int8AdamState:
        def codes(leaf: Any) -> Any:
            small = np.ndim(leaf) < 2 or jnp.iscomplexobj(leaf)
            return leaf if small else jnp.zeros_like(leaf, jnp.int8)

        def scales(node: Any) -> Any:
            if (mu := unbox(node)).dtype != jnp.int8:
                return optax.MaskedNode()
            return _zero_scales(node, adam_axis(mu.shape))

        count, mu, nu = adam.init(jax.tree.map(codes, params))
        # For optax.tree.map_params, as in Matrices.scalars.
        if type(params).__name__ == "_ParamsPlaceholder":
            return Int8AdamState(count, mu, nu, jnp.ones(()), jnp.ones(()))
        nu = jax.tree.map(lambda x: x.astype(jnp.uint8) if x.dtype == jnp.int8 else x, nu)
        both = [jax.tree.map(scales, mu, is_leaf=is_box)] * 2
        return Int8AdamState(count, mu, nu, *both)

    def floats(grad: jax.Array, codes: jax.Array, scales: Any) -> jax.Array:
        return codes if is_masked(scales) else decode(codes, scales, grad.dtype)

    def rounded(step: jax.Array, mu: jax.Array, nu: jax.Array, scales: Any) -> Any:
        if is_masked(scales):
            return step, mu, nu, scales, scales
        axis = adam_axis(step.shape)
        (mu, mu_scale), (nu, nu_scale) = encode(mu, axis), encode(nu, axis, jnp.uint8)
        # One leaf after another, as the momentum.
        return jax.lax.optimization_barrier((step, mu, nu, mu_scale, nu_scale))

    def update(
        updates: PyTree, state: Int8AdamState, params: PyTree | None = None
    ) -> tuple[PyTree, Int8AdamState]:
        mu = jax.tree.map(floats, updates, state.mu, state.mu_scale)
        nu = jax.tree.map(floats, updates, state.nu, state.nu_scale)
        wide = optax.ScaleByAdamState(state.count, mu, nu)
        steps, after = adam.update(updates, wide, params)
        tree: Any = jax.tree.structure(updates)
        columns = map(tree.flatten_up_to, (steps, after.mu, after.nu, state.mu_scale))
        rows = [rounded(*row) for row in zip(*columns, strict=True)]
        steps, *moments = (tree.unflatten(row[i] for row in rows) for i in range(5))
        return steps, Int8AdamState(after.count, *moments)

    return optax.GradientTransformation(init, update)


def momentum_stage(
    momentum: ArrayLike, nesterov: bool, mu_dtype: DTypeLike | None, matrices: Matrices
) -> optax.GradientTransformation:
    """M ← μM + G, and M̃ = μM + G, or M without Nesterov, sharded like the state.

    In 8 bits M is rounded on its way into the state, not before.
    """
    if not is_int8(mu_dtype):
        trace = optax.trace(momentum, nesterov=nesterov, accumulator_dtype=mu_dtype)

        def update_floats(
            updates: PyTree, state: Any, params: PyTree | None = None
        ) -> tuple[PyTree, optax.OptState]:
            grads = jax.tree.map(typed_sharding.shard_like, updates, state.trace)
            return trace.update(grads, state, params)

        return optax.GradientTransformation(trace.init, update_floats)

    def init(params: PyTree) -> Int8TraceState:
        codes = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.int8), params)
        # For optax.tree.map_params, as in Matrices.scalars.
        if type(codes).__name__ == "_ParamsPlaceholder":
            return Int8TraceState(codes, jnp.ones(()))
        scales = [
            _zero_scales(node, block_axis(axes, unbox(node).shape))
            for axes, node in matrices.each(codes)
        ]
        return Int8TraceState(codes, matrices.tree_of(scales))

    def step(
        axes: MatrixAxes, update: jax.Array, codes: jax.Array, scales: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # In the shape of blocks, so that XLA for TPUs fuses all of it.
        axis = block_axis(axes, update.shape)
        # Pieces depend on the sharding: all arrays have that of the codes.
        update = typed_sharding.shard_like(update, codes)
        scales = _shard_scales(scales, codes, axis)
        grad = _split(update, axis)
        m = grad + momentum * _decode_pieces(codes, scales, axis, grad.dtype)
        out = grad + momentum * m if nesterov else m
        new_codes, new_scales = _encode_pieces(m, update, axis, jnp.int8)
        whole = (_merge(x, axis, update) for x in (out, new_codes))
        # One leaf after another: XLA would round them last, and keep M of all until then.
        return jax.lax.optimization_barrier((*whole, new_scales))

    def update(
        updates: PyTree, state: Int8TraceState, params: PyTree | None = None
    ) -> tuple[PyTree, Int8TraceState]:
        rows = matrices.each(updates, state.trace, state.trace_scale)
        stepped = [step(*row) for row in rows]
        out, *both = (matrices.tree_of([row[i] for row in stepped]) for i in range(3))
        return out, Int8TraceState(*both)

    return optax.GradientTransformation(init, update)


def block_axis(axes: MatrixAxes, shape: tuple[int, ...]) -> int:
    """The axis of a leaf of matrices along which its blocks lie."""
    # No block has entries of two matrices, which lie side by side along an axis.
    inside = [i for i in axes.matrix if not axes.sizes or i != axes.block_axis]
    last = len(shape) - 1  # Whose entries are neighbours in memory.
    return max(inside, key=lambda i: (i != last and shape[i] >= BLOCK, shape[i]))


def adam_axis(shape: tuple[int, ...]) -> int:
    """The axis of AdamW's blocks: the features of one token, as far as lengths tell."""
    last_two = len(shape) - 1, len(shape) - 2
    return min(last_two, key=lambda i: (shape[i] < BLOCK, shape[i]))


def axis_of(shape: tuple[int, ...], of_scales: tuple[int, ...]) -> int:
    """The axis along which the blocks lie, from the shapes of codes and scales."""
    lengths = list(zip(shape, of_scales, strict=True))
    differing = [axis for axis, (length, count) in enumerate(lengths) if length != count]
    return differing[0] if differing else shape.index(1)


def encode(
    x: jax.Array, axis: int, dtype: DTypeLike = jnp.int8
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of an array of floats, or of its root if the codes are uint8."""
    if dtype == jnp.uint8:  # The derivative of the root of zero is infinite.
        x = jnp.sqrt(jax.lax.stop_gradient(x))
    codes, scales = _encode_pieces(_split(x, axis), x, axis, dtype)
    return _merge(codes, axis, x), scales


def decode(codes: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The array that codes and scales stand for, in float32 or float64."""
    axis = axis_of(codes.shape, scales.shape)
    x = _merge(_decode_pieces(codes, scales, axis, dtype), axis, codes)
    return x * x if codes.dtype == jnp.uint8 else x


def _encode_pieces(
    pieces: jax.Array, like: jax.Array, axis: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Codes of an array that is split in pieces, and the scales of its blocks."""
    largest = largest_magnitude(pieces, axis + 1).astype(jnp.float32)
    # Not casts to bfloat16 and back, which XLA may leave out. Rounding is monotone: the
    # largest of the pieces' rounded values is the block's, rounded.
    rounded = jax.lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=7)
    rounded = jnp.where(rounded < SMALLEST_SCALE, 0, rounded).astype(jnp.bfloat16)
    scales = _shard_scales(rounded, like, axis)
    count = _count(like, axis)
    if scales.shape[axis] != count:  # The pieces' scales to those of the blocks.
        missing = count * (BLOCK // _piece(like, axis)) - scales.shape[axis]
        widths = [(0, missing if i == axis else 0) for i in range(like.ndim)]
        blocks = typed_sharding.split(jnp.pad(scales, widths), axis, count)
        scales = largest_magnitude(blocks, axis + 1)
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
    known = scales > 0
    inverse = jnp.where(known, scales, 1).astype(pieces.dtype)
    inverse = jnp.where(known, LARGEST_CODE[jnp.dtype(dtype)] / inverse, 0)
    inverse = jnp.expand_dims(_of_pieces(inverse, like, axis), axis + 1)
    codes = jnp.round(pieces * inverse)
    if dtype == jnp.uint8:  # Decoded, the largest entry of a block has the same scale.
        largest = jax.lax.reduce_precision(pieces, 8, 7) * inverse > 254.5
        codes = jnp.where(largest, 255, jnp.maximum(codes, jnp.sign(inverse)))
    return jnp.where(jnp.isnan(codes), 0, codes).astype(dtype), scales


def _decode_pieces(
    codes: jax.Array, scales: jax.Array, axis: int, dtype: DTypeLike
) -> jax.Array:
    """The array that codes and scales stand for, split in pieces."""
    # The barrier keeps XLA for TPUs from moving the reshape, past which it does not fuse:
    # it would store the step of every entry.
    pieces = jax.lax.optimization_barrier(_split(codes, axis)).astype(dtype)
    # XLA replaces a division by this multiplication, but not in all programs.
    steps = scales.astype(dtype) * jnp.asarray(1 / LARGEST_CODE[codes.dtype], dtype)
    return pieces * jnp.expand_dims(_of_pieces(steps, codes, axis), axis + 1)


def _zero_scales(node: Any, axis: int) -> Any:
    """Scales of zeros for codes, boxed as they are."""
    codes = unbox(node)
    shape = [*codes.shape]
    shape[axis] = _count(codes, axis)
    scales = typed_sharding.full(shape, 0, jnp.bfloat16, codes)
    return box_like(_shard_scales(scales, codes, axis), node, tuple)


def _count(x: jax.Array, axis: int) -> int:
    """The number of blocks along an axis, at least one."""
    return max(1, -(-x.shape[axis] // BLOCK))


def _piece(x: jax.Array, axis: int) -> int:
    """The length of the pieces that an axis is split into, at least one."""
    length, shards = x.shape[axis], typed_sharding.shards(x, axis)
    piece = min(length, BLOCK) if shards == 1 else math.gcd(length // shards, BLOCK)
    return max(1, piece)


def _split(x: jax.Array, axis: int) -> jax.Array:
    """The array with an axis split in two, the pieces and their entries."""
    piece = _piece(x, axis)
    widths = [(0, -x.shape[i] % piece if i == axis else 0) for i in range(x.ndim)]
    padded = jnp.pad(x, widths) if any(after for _, after in widths) else x
    return typed_sharding.split(padded, axis, max(1, padded.shape[axis] // piece))


def _merge(pieces: jax.Array, axis: int, like: jax.Array) -> jax.Array:
    """The inverse of :func:`_split`, shaped and sharded like an array."""
    merged = typed_sharding.merge(pieces, axis)
    if merged.shape != like.shape:
        merged = jax.lax.slice_in_dim(merged, 0, like.shape[axis], axis=axis)
    return typed_sharding.shard_like(merged, like)


def _shard_scales(scales: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Scales, sharded as their array is: on another axis, where shards cut blocks."""
    spec = typed_sharding.spec(x)
    shards = typed_sharding.shards(x, axis)
    if shards > 1 and x.shape[axis] // shards % BLOCK:
        moved, spec[axis] = typed_sharding.names(spec[axis]), None
        for other in sorted(range(x.ndim), key=lambda i: -x.shape[i]):
            both = typed_sharding.shards(x, other) * shards
            if other != axis and x.shape[other] % both == 0:
                spec[other] = (*typed_sharding.names(spec[other]), *moved)
                break
    return typed_sharding.shard_as(scales, x, spec)


def _of_pieces(scales: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """The scale of each piece of an array, from those of blocks; sharded like it."""
    piece = _piece(x, axis)
    count = max(1, -(-x.shape[axis] // piece))
    if scales.shape[axis] != count:
        repeated = jnp.repeat(scales, BLOCK // piece, axis=axis)
        scales = jax.lax.slice_in_dim(repeated, 0, count, axis=axis)
    return typed_sharding.shard_like(scales, x)
