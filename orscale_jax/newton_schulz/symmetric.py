r"""Symmetric products by Pallas kernels: the tiles of one triangle, each written twice.

Most products of Newton–Schulz are symmetric: :math:`XX^\top`, :math:`X^\top X`, and those
of two symmetric matrices that commute. Of T×T tiles a kernel computes
:math:`T(T+1)/2`, and writes each of those off the diagonal a second time, transposed. A
tile on the diagonal is computed in full.

Pair p of a row and a column of tiles is :math:`(p \bmod T, (p + \lfloor p/T \rfloor)
\bmod T)`: the diagonal first, then those one tile away from it, in a circle. Each pair
of different tiles comes once, so that a kernel needs no table of them.

Pallas itself is imported when the first kernel is traced.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

# The axis of the left operand that has the product's rows, and that of the right one
# that has its columns. Each operand's other axis is summed over.
Axes: TypeAlias = tuple[int, int]
PRODUCTS = ("xla", "pallas")

SUBSCRIPTS: dict[Axes, str] = {
    (-2, -2): "...ik,...jk->...ij",
    (-1, -1): "...ki,...kj->...ij",
    (-2, -1): "...ik,...kj->...ij",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel for symmetric products, and the sizes of its tiles.

    Attributes:
      module: The module of this package whose function ``product`` runs it.
      dtypes: The names of the operands' dtypes.
      tile: The side of a tile of the product.
      depth: How long a part of the axis that is summed over is multiplied at a time.
      large_tile: The side of a tile in products of at least four times this size.
      smallest: The size of the smallest product that it takes.
      interpret: Whether to run it step by step, on any platform; for tests.
    """

    module: str
    dtypes: tuple[str, ...]
    tile: int
    depth: int
    large_tile: int
    smallest: int
    interpret: bool = False

    def takes(self, dtype: jnp.dtype, size: int) -> bool:
        """Whether it multiplies operands of this dtype to products of this size."""
        return dtype.name in self.dtypes and size >= self.smallest

    def tile_of(self, size: int) -> int:
        """The side of the tiles of a product of this size."""
        return self.large_tile if size >= 4 * self.large_tile else self.tile


# No float32, which matrix units would round.
# With four tiles in a row, 62 % of the tiles are computed; with two, 75 %.
TRITON = Kernel(
    "triton_kernel", ("bfloat16", "float16"), 128, depth=64, large_tile=128, smallest=512
)
# A tile of 512 has 256 FLOPs for each byte that it reads: about as many as a TPU computes
# in the time it takes to read one.
TPU = Kernel("tpu_kernel", ("bfloat16",), 256, depth=1024, large_tile=512, smallest=768)


def tiles_along(size: int, tile: int) -> int:
    """How many tiles, the last one perhaps not full."""
    return math.ceil(size / tile)


def pairs(count: int) -> int:
    """How many tiles of a triangle of this many along a side."""
    return count * (count + 1) // 2


def pair(p: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The row and the column of tile p of the triangle, the row not below the column."""
    # Not %, which adds branches for signs. In the dtype of p, even if it has 64 bits.
    along = p.dtype.type(count)
    first = jax.lax.rem(p, along)
    second = jax.lax.rem(first + jax.lax.div(p, along), along)
    return jnp.minimum(first, second), jnp.maximum(first, second)


def contracted(of: int) -> int:
    """The axis of a matrix that a product sums over, given the one that it keeps."""
    return -1 - of


def multiply(left: jax.Array, right: jax.Array, axes: Axes) -> jax.Array:
    """The product of two tiles, in float32."""
    of_left, of_right = axes
    summed = ((contracted(of_left),), (contracted(of_right),))
    return jax.lax.dot_general(
        left, right, (summed, ((), ())), preferred_element_type=jnp.float32
    )


def symmetric_product(
    x: jax.Array, y: jax.Array, axes: Axes, kernel: Kernel
) -> jax.Array:
    """A product that is symmetric: the part above its diagonal, mirrored.

    Args:
      x: Shape (..., m, k), or (..., k, m), of one of the kernel's dtypes.
      y: Shape (..., k, m), or (..., m, k), of the same dtype.
      axes: The axis of x that has the product's rows and that of y that has its columns:
        (-2, -2) for XXᵀ, (-1, -1) for XᵀX, (-2, -1) for XY.
      kernel: The kernel, which must take such a product (:meth:`Kernel.takes`).

    Returns:
      Shape (..., m, m), float32: sums of exact products.

    Example:
      >>> import dataclasses
      >>> import jax.numpy as jnp
      >>> from orscale_jax.newton_schulz import symmetric
      >>> kernel = dataclasses.replace(symmetric.TRITON, tile=16, interpret=True)
      >>> x = jnp.array([[1, 2, 0], [0, 3, 1]], jnp.bfloat16)
      >>> print(symmetric.symmetric_product(x, x, (-2, -2), kernel))
      [[ 5.  6.]
       [ 6. 10.]]
    """
    *batch, _, _ = x.shape
    single = [operand.reshape(-1, *operand.shape[-2:]) for operand in (x, y)]
    product = _batched(*single, axes, kernel)
    return product.reshape(*batch, *product.shape[-2:])


# The kernels have no derivatives of their own.
@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _batched(x: jax.Array, y: jax.Array, axes: Axes, kernel: Kernel) -> jax.Array:
    multiply: Callable[..., jax.Array] = importlib.import_module(
        f"orscale_jax.newton_schulz.{kernel.module}"
    ).product
    return multiply(x, y, axes, kernel)


@_batched.defjvp
def _derivative(
    axes: Axes,
    kernel: Kernel,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The derivative of the full product: not symmetric if only one operand changes."""
    einsum = functools.partial(
        jnp.einsum, SUBSCRIPTS[axes], preferred_element_type=jnp.float32
    )
    _, tangent = jax.jvp(einsum, primals, tangents)
    return _batched(*primals, axes, kernel), tangent
