"""The one table of platform policy."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from orscale_jax.distributed.buckets import CostModel
from orscale_jax.distributed.lowering import with_layout
from orscale_jax.newton_schulz.polar import NewtonSchulz


class Platform(NamedTuple):
    """The policy of one platform.

    Attributes:
      dtype: The dtype of Newton–Schulz's operands.
      stack_bytes: The largest stack.
      chunk_bytes: The largest part of a stack that goes through Newton–Schulz at once.
      stack_length: The most arrays in a stack; None for any number.
      interleave: The number of chunks whose products are interleaved: while one product
        runs, the operands of the next are fetched.
      one_by_one: Whether the matrices of a batch are normalized and orthogonalized one
        after another, with Gram matrices in strips. Otherwise matrices are normalized
        before they are stacked or sent, in the pass that computes them, unless
        ``round_first`` holds.
      round_first: Whether matrices are rounded in the pass that computes them, and
        normalized later (on one device, after they are stacked): a GPU computes norms in
        separate kernels.
      hide_coefficients: See :class:`orscale_jax.newton_schulz.polar.NewtonSchulz`.
      constrain_layout: Whether to keep shards in the layout of parameters until they are
        sent, and their factors as soon as they return.
      join_in_place: Whether matrices that stay on their device are computed directly in
        their places in the stack.
      row_major: Whether to keep tall matrices of one device in row-major order before
        and after their stacks.
      custom_partitioning: Whether the compiler's partitioner asks for the program of one
        device. (libtpu's does not.)
      flops_per_byte: See :class:`orscale_jax.distributed.buckets.CostModel`.
    """

    dtype: np.dtype[Any]
    stack_bytes: int
    chunk_bytes: int
    stack_length: int | None = None
    interleave: int = 1
    one_by_one: bool = False
    round_first: bool = False
    hide_coefficients: bool = False
    constrain_layout: bool = False
    join_in_place: bool = False
    row_major: bool = False
    custom_partitioning: bool = True
    flops_per_byte: int = 2000

    def cost_model(self, settings: NewtonSchulz) -> CostModel:
        """The cost model of an iteration; of five plain steps where it is traced."""
        restarts = settings.restarts
        if restarts is None:
            return CostModel(self.flops_per_byte)
        return CostModel(self.flops_per_byte, int(settings.steps), len(restarts) + 1)

    def limited(self, dtype: DTypeLike | None, stack_bytes: int | None) -> "Platform":
        """The policy with the user's dtype and stack limit; None keeps the platform's."""
        platform = self
        if dtype is not None:
            platform = platform._replace(dtype=jnp.dtype(dtype))
        if stack_bytes is not None:
            platform = platform._replace(
                stack_bytes=stack_bytes,
                stack_length=None,
                chunk_bytes=min(stack_bytes, platform.chunk_bytes),
            )
        return platform

    def sent_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which matrices of this dtype are stacked and sent.

        The operands' dtype, if it is narrower and has the range of this one (as bfloat16
        has that of float32); otherwise this dtype itself.
        """
        as_wide = jnp.finfo(self.dtype).maxexp >= jnp.finfo(dtype).maxexp
        narrower = self.dtype.itemsize < dtype.itemsize
        return self.dtype if as_wide and narrower else dtype


CPU = Platform(
    np.dtype(jnp.float32),
    stack_bytes=2**28,
    chunk_bytes=2**20,
    stack_length=32,
    one_by_one=True,
)
# Tall matrices are transposed as they are stacked. XLA would otherwise transpose all that
# they are made from and all that is made from them: gradients, momentum and weights, in
# float32.
GPU = Platform(
    np.dtype(jnp.bfloat16),
    stack_bytes=2**28,
    chunk_bytes=5 * 2**23,
    round_first=True,
    row_major=True,
)
# A TPU cannot prefetch the previous kernel's result: between two products of one chunk
# it runs one of another. Operands of 16 MiB fit into the core's own memory.
TPU = Platform(
    np.dtype(jnp.bfloat16),
    stack_bytes=2**24,
    chunk_bytes=2**24,
    interleave=2,
    hide_coefficients=True,
    constrain_layout=True,
    join_in_place=True,
)
# On Auto axes with unknown shardings.
TPU_AUTO = GPU._replace(round_first=False, custom_partitioning=False)

PLATFORMS: Mapping[str, Platform] = {
    "cpu": CPU,
    "gpu": GPU,
    "tpu": TPU,
    "tpu_auto": TPU_AUTO,
}

GPUS = ("cuda", "rocm")

_TILE = (8, 128)  # A TPU's memory pads the last two axes to multiples of these.


def row_major(x: jax.Array) -> jax.Array:
    """Keep an array in row-major order."""
    return with_layout(x, range(x.ndim))


def parameter_layout(x: jax.Array) -> jax.Array:
    """Keep an array in the layout that a parameter of its shape has on TPUs.

    It orders the last two axes so that they take less padding. The compiler may otherwise
    choose the order that suits a result, and transpose the gradient and the
    momentum, in float32.
    """
    if x.ndim < 2:
        return x
    *batch, m, n = range(x.ndim)
    rows, columns = x.shape[-2:]
    swapped = _padded(columns, rows) < _padded(rows, columns)
    order = (*batch, n, m) if swapped else (*batch, m, n)
    return with_layout(x, order)


def _padded(*shape: int) -> int:
    pairs = zip(shape, _TILE, strict=True)
    return math.prod(math.ceil(size / tile) * tile for size, tile in pairs)
