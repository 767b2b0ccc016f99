"""TPUs: a kernel cannot prefetch the result of the kernel before it."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.distributed.hardware import TPU_V5P, Hardware
from orscale_jax.distributed.lowering import with_layout
from orscale_jax.distributed.platforms.base import Limits, Platform
from orscale_jax.newton_schulz.polar import NewtonSchulz

_BFLOAT16 = np.dtype(jnp.bfloat16)
_LIMITS = Limits(stack_bytes=2**24, chunk_bytes=2**24, interleave=2)
_AUTO_LIMITS = Limits(stack_bytes=2**28, chunk_bytes=5 * 2**23)
_TILE = (8, 128)  # A TPU's memory pads the last two axes to multiples of these.


@final
@dataclasses.dataclass(frozen=True, eq=False)
class TPU(Platform):
    """Matrices normalized where they are computed, and the products of two interleaved.

    Between two products of one chunk a TPU runs one of another. Operands of 16 MiB fit
    into the core's own memory.
    """

    dtype: np.dtype[Any] = _BFLOAT16
    limits: Limits = _LIMITS
    hardware: Hardware = TPU_V5P

    @property
    def iteration(self) -> NewtonSchulz:
        """The iteration with coefficients that the compiler does not see."""
        return dataclasses.replace(super().iteration, hide_coefficients=True)

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """A stack in which every part is computed in its place."""
        return join_in_place(parts)

    def layout(self, shards: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Shards in the layout of parameters."""
        return [parameter_layout(x) for x in shards]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class AutoTPU(Platform):
    """TPUs whose arrays are on Auto axes, with shardings that only XLA knows."""

    dtype: np.dtype[Any] = _BFLOAT16
    limits: Limits = _AUTO_LIMITS
    hardware: Hardware = TPU_V5P
    partitioner_calls_back: ClassVar[bool] = False


def join_in_place(parts: Sequence[jax.Array]) -> jax.Array:
    """``jnp.concatenate``, with each part computed in its place in the result.

    XLA for TPUs computes the parts of a short concatenation first, and then copies them.
    """
    if len(parts) == 1:
        return parts[0]
    lengths = [len(part) for part in parts]
    joined = jax.lax.empty((sum(lengths), *parts[0].shape[1:]), parts[0].dtype)
    for start, part in zip(itertools.accumulate([0, *lengths]), parts, strict=False):
        joined = jax.lax.dynamic_update_slice_in_dim(joined, part, start, axis=0)
    return joined


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
