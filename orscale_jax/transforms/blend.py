"""A blend of Q with the momentum: Contra-Muon and Soft-Muon."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, broadcast, on_matrices
from orscale_jax.trees.boxes import PyTree

SPECTRAL, FROBENIUS = NORMS = ("spectral", "frobenius")
POWER_STEPS = 5  # As many as in the code of Contra-Muon.


def blend_momentum(
    direction: optax.GradientTransformation,
    share: ArrayLike,
    *,
    norm: str = SPECTRAL,
    keep_norm: bool = True,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Blend Q with the normalized momentum: Contra-Muon and Soft-Muon.

    .. math::

      D = (1 - s) \, Q + s \, \tilde M / \|\tilde M\|, \qquad
      D \leftarrow \|Q\|_F \, D / \|D\|_F.

    Q has equal singular values. With :math:`s < 0` the values that are small in
    :math:`\tilde M` become the larger ones (Contra-Muon), and with :math:`s > 0` they
    stay the smaller ones (Soft-Muon).

    Args:
      direction: A stage from :math:`\tilde M` to Q, such as :func:`orthogonalize`.
      share: s, below 1. Adding k times the normalized momentum to Q, and keeping the norm
        of Q, is :math:`s = k / (1 + k)`.
      norm: ``"spectral"``, the largest singular value, which five power steps estimate;
        on a mesh, each of them exchanges vectors. Or ``"frobenius"``.
      keep_norm: Whether the second equation applies.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation with the state of ``direction``.

    Raises:
      ValueError: If an argument is not valid, or a leaf is not a matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import blend_momentum, orthogonalize
      >>> stage = blend_momentum(orthogonalize(ns_steps=8), -0.25, keep_norm=False)
      >>> momentum = {"kernel": jnp.diag(jnp.array([4.0, 1.0]))}
      >>> updates, _ = stage.update(momentum, stage.init(momentum))
      >>> print(jnp.diag(updates["kernel"]).round(2))  # 1.25 − 0.25 σ / 4
      [1.   1.19]

    References:
      Contra-Muon: https://github.com/KellerJordan/modded-nanogpt, pull request 275.
      Soft-Muon as a blend: https://github.com/microsoft/dion, pull request 92, which has
      ``norm="frobenius", keep_norm=False``.
    """
    validate.transformation("direction", direction)
    validate.number("share", share, below=1)
    validate.choice("norm", norm, NORMS)
    validate.flag("keep_norm", keep_norm)
    direction = optax.with_extra_args_support(direction)

    def blend(axes: MatrixAxes, q: jax.Array, m: jax.Array) -> jax.Array:
        s, m = jnp.asarray(share, q.dtype), typed_sharding.shard_like(m, q)
        m = _over(axes, m, axes.reduce(largest_magnitude, m))  # Its squares are finite.
        size = axes.norms(m) if norm == FROBENIUS else spectral_norms(axes, m)
        d = (1 - s) * q + s * _over(axes, m, size)
        if keep_norm:
            d = broadcast(axes, axes.norms(q), q) * _over(axes, d, axes.norms(d))
        return d

    def stage(matrices: Matrices) -> optax.GradientTransformationExtraArgs:
        def update(
            updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
        ) -> tuple[PyTree, Any]:
            q, state = direction.update(updates, state, params, **extra_args)
            return matrices.map(blend, q, updates), state

        return optax.GradientTransformationExtraArgs(direction.init, update)

    return on_matrices(weight_dimension_numbers, stage)


def spectral_norms(axes: MatrixAxes, x: jax.Array) -> jax.Array:
    """Estimates of the largest singular values, by power steps from a vector of ones."""
    neurons, inputs, entries = axes.neurons, axes.inputs, axes.of_neurons
    after = neurons.reduce(jnp.sum, x)
    for _ in range(POWER_STEPS):
        before = _over(entries, after, entries.norms(after))
        v = inputs.reduce(jnp.sum, broadcast(neurons, before, x) * x)
        after = neurons.reduce(jnp.sum, broadcast(inputs, v, x) * x)
    # ‖Xv‖ / ‖v‖, where v = Xᵀu and ‖v‖² = uᵀXXᵀu.
    square = entries.reduce(jnp.sum, before * after)
    estimate = entries.norms(after) / jnp.sqrt(jnp.where(square > 0, square, 1))
    # The ones may miss the large singular vectors: no less than their mean square.
    rank = axes.batch_by_shape(lambda m, n: max(1, min(m, n)), x)
    return jnp.maximum(estimate, axes.norms(x) / jnp.asarray(rank, x.dtype) ** 0.5)


def _over(axes: MatrixAxes, x: jax.Array, by: jax.Array) -> jax.Array:
    """Every matrix divided by its number, or by 1 instead of 0."""
    return broadcast(axes, 1 / jnp.where(by == 0, 1, by), x) * x
