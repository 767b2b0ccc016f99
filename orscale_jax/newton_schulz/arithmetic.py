r"""The arithmetic of Newton–Schulz: rounded operands, wide sums, normalized matrices.

The iteration needs singular values of at most 1. Dividing by the Frobenius norm ensures
that; those of an m×n matrix (m ≤ n) are then :math:`1/\sqrt m` or less on average. AOL
(*almost orthogonal layer*) gives each of the m vectors on the shorter side a factor,

.. math:: s_i = \Bigl(\sum_j |A_{ij}|\Bigr)^{-1/2}, \qquad A = XX^\top, \qquad
   X \gets \operatorname{diag}(s) X.

:math:`\operatorname{diag}(s) |A| \operatorname{diag}(s)` is similar to
:math:`\operatorname{diag}(s)^2 |A|`, a matrix without negative entries whose rows sum to
1. Its spectral radius is 1, and bounds that of
:math:`\operatorname{diag}(s) A \operatorname{diag}(s)` by the triangle inequality. The
latter is the new Gram matrix, which saves the first product of the first step.

References:
  Boissin, Massena, Mamalet, Serrurier, *Turbo-Muon: Accelerating Orthogonality-Based
  Optimization with Pre-Conditioning*, 2025, arXiv:2512.04632; Prach & Lampert,
  *Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks*, 2022,
  arXiv:2208.03160, theorem 1.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.lax import Precision

# The axis of the left operand that has the product's rows, and that of the right one
# that has its columns. Each operand's other axis is summed over.
Axes: TypeAlias = tuple[int, int]

PRECONDITIONINGS = ("frobenius", "aol")
# More strips take fewer FLOPs, but are slower.
_STRIPS = 3
_SMALLEST_IN_STRIPS = 384


class Columns(Protocol):
    """The devices that share matrices by columns: all that numerics know of a mesh."""

    @property
    def shards(self) -> int:
        """The number of devices that share a matrix."""

    def reduce(self, collective: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        """``jax.lax.psum``, or another, over the devices that share a matrix."""

    def sum_matrices(
        self, x: jax.Array, rounded: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """The sum of matrices of shape (m, n): added as they are, gathered rounded."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtypes and the form of matrix products."""

    dtype: jnp.dtype  # Of the operands.
    columns: Columns | None = None  # None for whole matrices.
    # Whether large symmetric products are computed in strips, and the part below the
    # diagonal copied from the part above it.
    by_strips: bool = False

    @property
    def accumulator(self) -> jnp.dtype:
        """The dtype of sums, and of everything that is not an operand of a product."""
        return jnp.dtype(jnp.float64 if self.dtype == jnp.float64 else jnp.float32)

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
        return self.dtype.itemsize < 4

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

    def product(
        self,
        x: jax.Array,
        y: jax.Array,
        axes: Axes = (-2, -1),
        *,
        symmetric: bool = False,
    ) -> jax.Array:
        """The product of two operands, in the accumulator's dtype.

        Its rows and columns are the operands' ``axes``. A ``symmetric`` one, as that of
        symmetric matrices that commute, may be computed in strips.
        """
        if symmetric and self.by_strips and x.shape[axes[0]] >= _SMALLEST_IN_STRIPS:
            return self._in_strips(x, y, axes)
        batch, (row, column) = range(x.ndim - 2), axes
        # jnp.einsum gives the same program, but takes longer to trace.
        return jax.lax.dot_general(
            x,
            y,
            (((x.ndim - 3 - row,), (x.ndim - 3 - column,)), (batch, batch)),
            # By default float32 products run in bfloat16 (TPU) or TF32 (GPU). None would
            # be jax_default_matmul_precision, which may narrow operands and sums.
            precision=Precision.DEFAULT if self.narrow else Precision.HIGHEST,
            preferred_element_type=self.accumulator,
        )

    def add_product(
        self, c: jax.Array, beta: float, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        """C + βXY in float16, by one kernel of a GPU, whose sums and β are float32.

        XLA fuses an addition with a product if the product is rounded to the dtype of the
        other array, and that array is none that it would compute in the same kernel.
        """
        # The constant is not rounded to float16: the steps would have other coefficients.
        product = jnp.asarray(beta, self.accumulator) * self.product(x, y)
        return jax.lax.optimization_barrier(c + product.astype(self.dtype))

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
        product = self.product(x, x, (axis, axis), symmetric=True)
        return self.columns.sum_matrices(product, self.round) if self.columns else product

    def _in_strips(self, x: jax.Array, y: jax.Array, axes: Axes) -> jax.Array:
        """A symmetric product: the blocks on and above the diagonal, mirrored."""
        of_x, of_y = axes
        size = x.shape[of_x]
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
        return self.columns.reduce(jax.lax.psum, total) if self.columns else total

    def largest(self, x: jax.Array) -> jax.Array:
        """The largest absolute value of each matrix, of shape ``(..., 1, 1)``."""
        largest = largest_magnitude(x, (-2, -1), keepdims=True)
        if not self.columns:
            return largest
        # It is only a scale, and pmax has no derivative.
        return self.columns.reduce(jax.lax.pmax, jax.lax.stop_gradient(largest))


def largest_magnitude(
    x: jax.Array, axis: int | tuple[int, ...], keepdims: bool = False
) -> jax.Array:
    """The largest absolute value along axes, NaN if there is one; 0 without entries."""

    def largest(x: jax.Array) -> jax.Array:
        return jnp.max(x, axis=axis, keepdims=keepdims, initial=None if x.size else 0)

    def among_bits(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(largest(bits), x.dtype)

    # On CPUs, XLA's maximum of floats ignores NaN in most arrays; of integers it is
    # slower on TPUs.
    return jax.lax.platform_dependent(jnp.abs(x), cpu=among_bits, default=largest)


class Start(NamedTuple):
    """A preconditioned array of matrices (..., m, n), in the dtype of operands.

    ``gram`` is the Gram matrix of the shorter side, in the accumulator's dtype, if
    preconditioning computed it.
    """

    x: jax.Array
    gram: jax.Array | None = None


# Jitted, so that leaves of one shape are traced once.
@functools.partial(jax.jit, static_argnames="arithmetic")
def normalize(x: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    """Divide each matrix by its Frobenius norm, whatever the scale of its entries.

    The result has norm 0 or ``arithmetic.scale``, and the wider of the dtypes of sums
    that ``x`` and the arithmetic call for.
    """
    x = _widen(x, arithmetic)
    largest = arithmetic.largest(x)
    scaled = x / jnp.where(largest == 0, 1, largest)
    unit = scaled / _root(arithmetic.sum(jnp.square(scaled)))
    return unit if arithmetic.scale == 1 else arithmetic.scale * unit


def normalize_all(
    xs: Sequence[jax.Array],
    arithmetic: Arithmetic,
    sums: Callable[[Sequence[jax.Array]], Iterable[jax.Array]],
) -> list[jax.Array]:
    """:func:`normalize` of several arrays, in one pass over the entries instead of two.

    ``sums`` gives, for several arrays, the sums of the entries of each matrix, of shape
    ``(..., 1, 1)``.
    """
    of_all = [_at_three_scales(x, arithmetic) for x in xs]
    totals = iter(sums([square for _, *squares in of_all for square in squares]))
    return [
        _divide(wide, *(next(totals) for _ in squares), scale=arithmetic.scale)
        for wide, *squares in of_all
    ]


def precondition(x: jax.Array, preconditioning: str, arithmetic: Arithmetic) -> Start:
    """Normalized matrices with singular values of at most ``arithmetic.scale``.

    Up to one rounding, where AOL has taken the place of the Frobenius norm.
    """
    operand = arithmetic.round(x.astype(arithmetic.accumulator))
    if preconditioning == "frobenius":
        return Start(operand)
    # From the rounded operand: an entry that float16 flushes to zero stays zero.
    gram = arithmetic.gram(operand)
    sums = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    # Zero vectors stay zero; subnormal sums have too few digits to bound anything.
    tiny = jnp.finfo(sums.dtype).tiny
    # Twice, since the derivative of a root at zero is infinite.
    small = sums < tiny
    scale = jnp.where(small, tiny**-0.5, jax.lax.rsqrt(jnp.where(small, 1, sums)))
    scale = scale if arithmetic.scale == 1 else arithmetic.scale * scale
    scaled = (scale if arithmetic.is_wide(x) else scale.mT) * operand.astype(gram.dtype)
    # In this order, since the product of two factors may overflow.
    return Start(arithmetic.round(scaled), scale * gram * scale.mT)


def _widen(x: jax.Array, arithmetic: Arithmetic) -> jax.Array:
    # A float64 input may lie beyond float32's range.
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else arithmetic.accumulator)


def _root(square: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.where(square == 0, 1, square))


def _shift_and_tiny(dtype: Any) -> tuple[float, float]:
    """The factor of small entries, and a sum of squares that underflow may have hit."""
    exponent = jnp.finfo(dtype).maxexp // 8
    return 2.0 ** (5 * exponent), 2.0 ** (-3 * exponent)


# Jitted, so that leaves of one shape are traced once; so is the next one.
@functools.partial(jax.jit, static_argnames="arithmetic")
def _at_three_scales(x: jax.Array, arithmetic: Arithmetic) -> tuple[jax.Array, ...]:
    """The matrices, widened, and their squares as they are, scaled down, and up."""
    x = _widen(x, arithmetic)
    shift, tiny = _shift_and_tiny(x.dtype)
    # Clipped: an overflow here would spoil the derivative even where it is not chosen.
    clipped = jnp.clip(x, -math.sqrt(tiny), math.sqrt(tiny))
    return x, jnp.square(x), jnp.square(x / shift), jnp.square(clipped * shift)


@functools.partial(jax.jit, static_argnames="scale")
def _divide(
    x: jax.Array, middle: jax.Array, large: jax.Array, small: jax.Array, *, scale: float
) -> jax.Array:
    """Give each matrix the norm ``scale``, from a sum of squares with all digits."""
    shift, tiny = _shift_and_tiny(x.dtype)
    overflows = jnp.isinf(middle)

    def chosen(if_small: Any, if_large: Any, else_: Any) -> jax.Array:
        return jnp.where(middle < tiny, if_small, jnp.where(overflows, if_large, else_))

    factor = chosen(scale * shift, scale / shift, scale)
    return x * factor / _root(chosen(small, large, middle))
