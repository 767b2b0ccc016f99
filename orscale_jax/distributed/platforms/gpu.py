"""GPUs: launching a kernel takes time, and every array between two kernels memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.distributed.hardware import H100, Hardware
from orscale_jax.distributed.lowering import with_layout
from orscale_jax.distributed.platforms.base import Limits, Platform

_BFLOAT16, _FLOAT16 = np.dtype(jnp.bfloat16), np.dtype(jnp.float16)
_LIMITS = Limits(stack_bytes=2**28, chunk_bytes=5 * 2**23)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class GPU(Platform):
    """Matrices rounded where they are computed, and normalized in large stacks.

    A GPU computes norms in kernels of their own. The matrices, which wait for the norms,
    are rounded before: to bfloat16, which has the range of float32. Normalized, they are
    rounded to the operands' dtype.
    """

    dtype: np.dtype[Any] = _FLOAT16
    limits: Limits = _LIMITS
    hardware: Hardware = H100

    def pack(self, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Rounded matrices in row-major order.

        Tall matrices are transposed as they are stacked. Without row-major order, XLA
        propagates the transposed layout to gradient, momentum and weight.
        """
        return [_row_major(x) for x in self._rounded_first(xs)]

    def pack_to_send(self, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Matrices that are rounded, normalized, and rounded again."""
        return self.normalized(self._rounded_first(xs))

    def polar_of_stacks(self, stacks: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Polar factors of stacks, which are normalized together."""
        return super().polar_of_stacks(self.normalized(stacks))

    def unpack(self, qs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Factors of which the tall ones are in row-major order."""
        return [_row_major(q) if q.shape[-2] > q.shape[-1] else q for q in qs]

    def _rounded_first(self, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Rounded matrices, of which XLA keeps no wider copy."""
        return jax.lax.optimization_barrier([x.astype(self._first_dtype(x)) for x in xs])

    def _first_dtype(self, x: jax.Array) -> np.dtype[Any]:
        """The dtype of a matrix that waits for its norm: one of two bytes, or its own."""
        packed = self.packed_dtype(x.dtype)
        return packed if packed.itemsize != 2 or packed == x.dtype else _BFLOAT16


def _row_major(x: jax.Array) -> jax.Array:
    return with_layout(x, range(x.ndim))
