"""What all platforms have in common."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from orscale_jax.distributed.chunks import map_chunks
from orscale_jax.distributed.collectives import ColumnGroup
from orscale_jax.distributed.costs import CostModel
from orscale_jax.distributed.hardware import Hardware
from orscale_jax.distributed.horizontal_fusion import reduce_all, slices_of_stacks
from orscale_jax.newton_schulz.arithmetic import normalize_all
from orscale_jax.newton_schulz.polar import NewtonSchulz, newton_schulz


class Limits(NamedTuple):
    """How much goes through Newton–Schulz at once.

    Attributes:
      stack_bytes: The largest stack.
      chunk_bytes: The largest part of a stack that goes through Newton–Schulz at once.
      stack_length: The most arrays in a stack; None for any number.
      interleave: The number of chunks whose products are interleaved: while one product
        runs, the operands of the next are fetched.
    """

    stack_bytes: int
    chunk_bytes: int
    stack_length: int | None = None
    interleave: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Platform:
    """The way from matrices to their polar factors on one platform.

    Matrices are packed; then they are stacked (on one device) or sent (on a mesh); then
    they go through Newton–Schulz.

    Attributes:
      settings: The Newton–Schulz iteration that the user has chosen.
      dtype: The dtype of Newton–Schulz's operands.
      limits: How much goes through Newton–Schulz at once.
      hardware: The rates by which plans for a mesh are compared.
      partitioner_calls_back: Whether the compiler's partitioner asks for the program of
        one device. (libtpu's does not.)
    """

    settings: NewtonSchulz
    dtype: np.dtype[Any]
    limits: Limits
    hardware: Hardware
    partitioner_calls_back: ClassVar[bool] = True

    def with_overrides(self, dtype: DTypeLike | None, stack_bytes: int | None) -> Self:
        """The platform with the user's dtype and stack limit; None keeps its own."""
        limits = self.limits
        if stack_bytes is not None:
            limits = limits._replace(
                stack_bytes=stack_bytes,
                stack_length=None,
                chunk_bytes=min(stack_bytes, limits.chunk_bytes),
            )
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        return dataclasses.replace(self, dtype=dtype, limits=limits)

    def with_traced(self, traced: Mapping[str, jax.Array]) -> Self:
        """The platform with other values of the settings that are traced."""
        given: Mapping[str, Any] = traced
        return dataclasses.replace(
            self, settings=dataclasses.replace(self.settings, **given)
        )

    @property
    def iteration(self) -> NewtonSchulz:
        """The settings as this platform runs them."""
        return dataclasses.replace(self.settings, dtype=self.dtype)

    @property
    def cost_model(self) -> CostModel:
        """The cost model of the iteration; of five plain steps where it is traced."""
        restarts = self.iteration.restarts
        if restarts is None:
            return CostModel(self.hardware)
        steps = int(self.settings.steps)
        return CostModel(self.hardware, steps, len(restarts) + 1)

    def packed_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which matrices of this dtype are stacked and sent: the narrower.

        They are normalized, so that the range of the operands' dtype is enough.
        """
        return self.dtype if self.dtype.itemsize < dtype.itemsize else dtype

    def pack(self, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Matrices in the form in which one device stacks them: normalized."""
        return self.normalized(xs)

    def pack_to_send(self, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Matrices in the form in which they are sent over a mesh."""
        return self.pack(xs)

    def pack_to_spread(self, packed: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The same, in the form in which XLA's partitioner spreads them: normalized."""
        return packed

    def polar_of_stacks(self, stacks: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Polar factors of stacks of packed matrices, on one device."""
        return self.polar(stacks, [None] * len(stacks))

    def polar(
        self, xs: Sequence[jax.Array], columns: Sequence[ColumnGroup | None]
    ) -> list[jax.Array]:
        """Polar factors of matrices that were sent, a few chunks at a time.

        Args:
          xs: Arrays of shape ``(*batch, m, n)``.
          columns: For each array, the devices that hold the other columns of its
            matrices; None for whole matrices.
        """
        _, chunk_bytes, _, interleave = self.limits
        return map_chunks(self.polar_of_chunks, xs, columns, chunk_bytes, interleave)

    def polar_of_chunks(
        self, xs: Sequence[jax.Array], columns: Sequence[ColumnGroup | None]
    ) -> list[jax.Array]:
        """Polar factors of a few chunks."""
        return newton_schulz(xs, self.iteration, columns)

    def unpack(self, qs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Factors as one device keeps them."""
        return qs

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """A stack of matrices that do not leave their device."""
        return jnp.concatenate(parts)

    def layout(self, shards: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Shards before they are sent, and their factors as soon as they return."""
        return shards

    def rounded(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Matrices in the dtype in which they are stacked and sent."""
        return [x.astype(self.packed_dtype(x.dtype)) for x in xs]

    def normalized(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        """Normalized matrices, in the dtype in which they are stacked and sent."""
        arithmetic = self.iteration.arithmetic()
        return self.rounded(normalize_all(xs, arithmetic, _sums))


def _sums(xs: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums of the entries of each matrix, of shape (..., 1, 1)."""
    sums = reduce_all(jnp.sum, xs, [(x.ndim - 2, x.ndim - 1) for x in xs])
    return [jnp.expand_dims(total, (-2, -1)) for total in slices_of_stacks(sums)]
