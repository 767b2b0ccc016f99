"""CPUs: one large product already keeps caches and cores busy."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from orscale_jax.distributed.collectives import ColumnGroup
from orscale_jax.distributed.hardware import VIRTUAL, Hardware
from orscale_jax.distributed.platforms.base import Limits, Platform
from orscale_jax.newton_schulz.polar import NewtonSchulz, one_by_one

_FLOAT32 = np.dtype(np.float32)
_LIMITS = Limits(stack_bytes=2**28, chunk_bytes=2**20, stack_length=32)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class CPU(Platform):
    """Matrices normalized and iterated one after another, Gram matrices in strips."""

    dtype: np.dtype[Any] = _FLOAT32
    limits: Limits = _LIMITS
    hardware: Hardware = VIRTUAL

    @property
    def iteration(self) -> NewtonSchulz:
        """The iteration with large Gram matrices in strips."""
        return dataclasses.replace(super().iteration, by_strips=True)

    def packed_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The narrower dtype, if it has the range for matrices of any norm.

        bfloat16 has that of float32; float16 does not.
        """
        packed = super().packed_dtype(dtype)
        has_range = jnp.finfo(packed).maxexp >= jnp.finfo(dtype).maxexp
        return packed if has_range else dtype

    def pack(self, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Rounded matrices; the loop over them normalizes each."""
        return self.rounded(xs)

    def pack_to_spread(self, packed: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Normalized matrices: a loop over matrices would gather each of them."""
        return self.normalized(packed)

    def polar_of_chunks(
        self, xs: Sequence[jax.Array], columns: Sequence[ColumnGroup | None]
    ) -> list[jax.Array]:
        """Polar factors, in a loop over the matrices of each chunk."""
        pairs = zip(xs, columns, strict=True)
        return [one_by_one(x, self.iteration, of_x) for x, of_x in pairs]
