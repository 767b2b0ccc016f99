"""The matrix products of Newton–Schulz: operands rounded, sums accumulated wide."""

import dataclasses
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp

from orscale_jax import _checks

# The axis of the left operand that has the product's rows, and that of the right one
# that has its columns. Each operand's other axis is summed over.
Axes: TypeAlias = tuple[int, int]


class ColumnShards(Protocol):
    """Sums over the devices that each hold a part of the columns of a matrix.

    :class:`orscale_jax.distributed.collectives.ColumnGroup` implements them. The
    numerics know nothing else about a mesh.
    """

    @property
    def shards(self) -> int:
        """The number of devices that share one matrix."""

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum over these devices."""

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over these devices."""

    def sum_matrices(
        self, x: jax.Array, rounded: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """The sum of matrices of shape (m, n), exchanged in rounded form."""


# More strips take fewer FLOPs, but are slower.
_STRIPS = 3
_SMALLEST_IN_STRIPS = 384


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtypes and the form of matrix products.

    Attributes:
      dtype: The operands' dtype.
      columns: The devices that hold the other columns of the matrices, if any.
      by_strips: Whether large symmetric products are computed in strips, and the part
        below the diagonal copied from the part above it.
    """

    dtype: jnp.dtype
    columns: ColumnShards | None = None
    by_strips: bool = False

    @property
    def plain(self) -> "Arithmetic":
        """The same dtypes, with every product in one piece."""
        return dataclasses.replace(self, by_strips=False)

    @property
    def accumulator(self) -> jnp.dtype:
        """The dtype of sums, and of everything that is not an operand of a product."""
        return accumulator(self.dtype)

    @property
    def unit(self) -> float:
        """The unit roundoff of the operands."""
        return float(jnp.finfo(self.dtype).eps) / 2

    @property
    def scale(self) -> float:
        """The norm of normalized matrices, a power of two.

        In float16, typical entries of large matrices of norm 1, and of their Gram
        matrices, would be subnormal. Its largest number is just below 2¹⁶, so that the
        largest entry of a Gram matrix may be 2¹⁴.
        """
        return 2.0**7 if jnp.finfo(self.dtype).maxexp <= 16 else 1.0

    @property
    def narrow(self) -> bool:
        """Whether operands are narrower than sums."""
        return self.dtype != self.accumulator

    def round(self, x: jax.Array) -> jax.Array:
        """Round to an operand of a product, and keep no wider copy.

        XLA would otherwise keep the wider array and convert it in every product.
        """
        return self.round_all([x])[0]

    def round_all(self, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Round several arrays, all of them before any is used."""
        if all(x.dtype == self.dtype for x in xs):
            return xs
        return jax.lax.optimization_barrier([x.astype(self.dtype) for x in xs])

    def product(self, x: jax.Array, y: jax.Array, axes: Axes = (-2, -1)) -> jax.Array:
        """The product of two operands, in the accumulator's dtype."""
        # By default float32 products run in bfloat16 (TPU) or TF32 (GPU). None would be
        # jax_default_matmul_precision, which may narrow operands and sums.
        precision = jax.lax.Precision
        batch = range(x.ndim - 2)
        in_x, in_y = ((x.ndim - 3 - axis,) for axis in axes)
        # jnp.einsum gives the same program, but takes longer to trace.
        return jax.lax.dot_general(
            x,
            y,
            ((in_x, in_y), (batch, batch)),
            precision=precision.DEFAULT if self.narrow else precision.HIGHEST,
            preferred_element_type=self.accumulator,
        )

    def whole_shape(self, x: jax.Array) -> tuple[int, int]:
        """``(m, n)`` of the matrices, including the columns on other devices."""
        m, n = x.shape[-2:]
        return m, n * self.columns.shards if self.columns else n

    def is_wide(self, x: jax.Array) -> bool:
        """Whether Gram matrices are those of the rows; also true where x is square."""
        m, n = self.whole_shape(x)
        return m <= n

    def gram(self, x: jax.Array) -> jax.Array:
        """The Gram matrix of the shorter side; of the rows where x is square."""
        axis = -2 if self.is_wide(x) else -1
        product = self.symmetric(x, x, (axis, axis))
        return self.columns.sum_matrices(product, self.round) if self.columns else product

    def symmetric(self, x: jax.Array, y: jax.Array, axes: Axes = (-2, -1)) -> jax.Array:
        """A symmetric product, whose rows and columns are the operands' ``axes``.

        By default the operands are symmetric matrices that commute.
        """
        of_x, of_y = axes
        size = x.shape[of_x]
        if not self.by_strips or size < _SMALLEST_IN_STRIPS:
            return self.product(x, y, axes)
        at = [size * i // _STRIPS for i in range(_STRIPS + 1)]
        part = jax.lax.slice_in_dim
        strips = [
            self.product(
                part(x, start, stop, axis=of_x), part(y, start, size, axis=of_y), axes
            )
            for start, stop in itertools.pairwise(at)
        ]
        rows = []
        for i, strip in enumerate(strips):
            above = [strips[j][..., at[i] - at[j] : at[i + 1] - at[j]] for j in range(i)]
            rows.append(jnp.concatenate([*(block.mT for block in above), strip], -1))
        return jnp.concatenate(rows, -2)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of each matrix's entries, of shape ``(..., 1, 1)``."""
        total = jnp.sum(x, axis=(-2, -1), keepdims=True)
        return self.columns.sum(total) if self.columns else total

    def largest(self, x: jax.Array) -> jax.Array:
        """The largest absolute value of each matrix, of shape ``(..., 1, 1)``."""
        largest = largest_magnitude(x, (-2, -1), keepdims=True)
        return self.columns.max(largest) if self.columns else largest


def largest_magnitude(
    x: jax.Array, axis: int | tuple[int, ...], keepdims: bool = False
) -> jax.Array:
    """The largest absolute value along axes, NaN if there is one; 0 without entries."""
    initial = None if x.size else 0

    def largest(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), axis=axis, keepdims=keepdims, initial=initial)

    def among_bits(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(jnp.abs(x), f"int{8 * x.dtype.itemsize}")
        found = jnp.max(bits, axis=axis, keepdims=keepdims, initial=initial)
        return jax.lax.bitcast_convert_type(found, x.dtype)

    # On CPUs, XLA's maximum of floats ignores NaN in most arrays; of integers it is
    # slower on TPUs.
    return jax.lax.platform_dependent(x, cpu=among_bits, default=largest)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums: float64 for float64, float32 for anything narrower."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def check_products(name: str, value: str) -> None:
    """Refuse ``value`` unless it is ``"xla"``, or ``"pallas"``, which is deprecated."""
    _checks.choice(name, value, ("xla", "pallas"))
    if value == "pallas":
        warnings.warn(
            f"{name}='pallas' has no effect: the Pallas kernels have been removed, and "
            f"XLA computes all products, with the same results. Leave out {name}.",
            DeprecationWarning,
            stacklevel=_callers_in_package(),
        )


def _callers_in_package() -> int:
    """The number of frames between the caller and the first one of other code."""
    package = __name__.partition(".")[0]
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame and frame.f_globals.get("__name__", "").startswith(package):
        frame, depth = frame.f_back, depth + 1
    return depth
