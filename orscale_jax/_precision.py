"""Arithmetic in float32 or wider, whatever the dtypes that come in."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from orscale_jax import _sharding
from orscale_jax._columns import Columns


def in_float32(
    inner: optax.GradientTransformation, mu_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` in float32 (float64 where there is float64), and keep all dtypes.

    Updates come back in the dtype to which gradient, parameter and momentum promote, as
    Optax's do: nothing is rounded on the way to the weights. Every state leaf keeps the
    dtype that ``inner.init`` gave it. So do the shardings that are part of types, but
    those of updates are the parameters'.

    Args:
      inner: The transformation to run.
      mu_dtype: Of the momentum; None: the parameter's.

    Returns:
      A transformation with the state of ``inner``.
    """
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        dtype = compute_dtype((updates, params))
        new_updates, new_state = inner.update(
            _widen(updates, dtype),
            _widen(state, dtype),
            _widen(params, dtype),
            **extra_args,
        )
        place = updates if params is None else params
        promoted = jax.tree.map(
            lambda update, param: _promoted(update, param, mu_dtype), updates, place
        )
        return _cast(new_updates, promoted, place), _cast(new_state, state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


_STRIPS = 3  # Of symmetric products; more are less work, and slower.
_SMALLEST_IN_BLOCKS = 384


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How matrix products are taken: operands rounded, sums accumulated wide.

    Attributes:
      dtype: Of the operands.
      columns: The devices that have the other columns of the matrices, if any.
      by_blocks: Whether large symmetric products are made in strips, and what is below
        their diagonals of what is above.
    """

    dtype: jnp.dtype
    columns: Columns | None = None
    by_blocks: bool = False

    @property
    def accumulator(self) -> jnp.dtype:
        """The dtype of sums, and of all that is not multiplied."""
        return accumulator(self.dtype)

    @property
    def unit(self) -> float:
        """The unit roundoff of the operands."""
        return float(jnp.finfo(self.dtype).eps) / 2

    @property
    def narrow(self) -> bool:
        """Whether operands are narrower than sums."""
        return self.dtype != self.accumulator

    def round(self, x: jax.Array) -> jax.Array:
        """To an operand, which exists in its own dtype alone.

        XLA would otherwise convert in every product that it is an operand of, and keep
        the wider array for it.
        """
        return self.round_all([x])[0]

    def round_all(self, xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Operands that are all there before any of them is used."""
        if all(x.dtype == self.dtype for x in xs):
            return xs
        return jax.lax.optimization_barrier([x.astype(self.dtype) for x in xs])

    def einsum(self, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """The product of two operands, in the accumulator's dtype."""
        # Without it float32 products run in bfloat16 (TPU) or TF32 (GPU).
        highest = jax.lax.Precision.HIGHEST if self.dtype == self.accumulator else None
        return jnp.einsum(
            subscripts, x, y, precision=highest, preferred_element_type=self.accumulator
        )

    def whole_shape(self, x: jax.Array) -> tuple[int, int]:
        """``(m, n)`` of the matrices, with the columns that other devices have."""
        m, n = x.shape[-2:]
        return m, n * self.columns.sharers if self.columns else n

    def is_wide(self, x: jax.Array) -> bool:
        """Whether rows are what Gram matrices are made of: where x is square, too."""
        m, n = self.whole_shape(x)
        return m <= n

    def gram(self, x: jax.Array) -> jax.Array:
        """The Gram matrix of the shorter side: of the rows where x is square."""
        product = self._gram(x, axis=-2 if self.is_wide(x) else -1)
        return self.columns.sum_matrices(product, self.round) if self.columns else product

    def symmetric(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The product of two symmetric matrices that commute."""
        return self._symmetric("...ik,...kj->...ij", x, y, (-2, -1))

    def _gram(self, x: jax.Array, axis: int) -> jax.Array:
        subscripts = "...ik,...jk->...ij" if axis == -2 else "...ki,...kj->...ij"
        return self._symmetric(subscripts, x, x, (axis, axis))

    def _symmetric(
        self, subscripts: str, x: jax.Array, y: jax.Array, axes: tuple[int, int]
    ) -> jax.Array:
        """A product whose rows and columns are the operands' ``axes``."""
        of_x, of_y = axes
        size = x.shape[of_x]
        if not self.by_blocks or size < _SMALLEST_IN_BLOCKS:
            return self.einsum(subscripts, x, y)
        at = [size * i // _STRIPS for i in range(_STRIPS + 1)]
        part = jax.lax.slice_in_dim
        strips = [
            self.einsum(
                subscripts,
                part(x, start, stop, axis=of_x),
                part(y, start, size, axis=of_y),
            )
            for start, stop in itertools.pairwise(at)
        ]
        rows = []
        for i, strip in enumerate(strips):
            above = [strips[j][..., at[i] - at[j] : at[i + 1] - at[j]] for j in range(i)]
            rows.append(jnp.concatenate([*(block.mT for block in above), strip], -1))
        return jnp.concatenate(rows, -2)

    def sum(self, x: jax.Array) -> jax.Array:
        """Of each matrix's entries, of shape ``(..., 1, 1)``."""
        total = jnp.sum(x, axis=(-2, -1), keepdims=True)
        return self.columns.sum(total) if self.columns else total

    def max(self, x: jax.Array) -> jax.Array:
        """Of each matrix's entries, at least 0, of shape ``(..., 1, 1)``."""
        largest = jnp.max(x, axis=(-2, -1), keepdims=True, initial=0.0)
        return self.columns.max(largest) if self.columns else largest


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64, float32 for anything narrower."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def compute_dtype(tree: Any) -> jnp.dtype:
    """float64 if any leaf of ``tree`` is float64, else float32."""
    double = any(jnp.result_type(leaf) == jnp.float64 for leaf in jax.tree.leaves(tree))
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def _widen(tree: Any, dtype: jnp.dtype) -> Any:
    def widen(leaf: Any) -> Any:
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.asarray(leaf, dtype) if floating else leaf

    return jax.tree.map(widen, tree)


def _promoted(update: Any, param: Any, mu_dtype: DTypeLike | None) -> np.ndarray:
    """An array without entries, of the dtype that an update has."""
    found = jnp.promote_types(jnp.result_type(update), jnp.result_type(param))
    if mu_dtype is not None:
        found = jnp.promote_types(found, mu_dtype)
    return np.empty(0, found)


def _cast(tree: Any, like: Any, place: Any) -> Any:
    """To the dtypes of one tree and the shardings of another."""

    def cast(leaf: jax.Array, old: Any, placed: jax.Array) -> jax.Array:
        cast = leaf.astype(jnp.result_type(old))
        return _sharding.shard_like(cast, jnp.asarray(placed))

    return jax.tree.map(cast, tree, like, place)
