"""The stage of NorMuon: divides every neuron by its running root mean square."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.boundary import Stage, on_matrices
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices, broadcast
from orscale_jax.trees.boxes import PyTree

FULL_RANK, KEPT = NORMS = ("full_rank", "kept")


class NeuronRMSState(NamedTuple):
    """State of :func:`scale_by_neuron_rms`."""

    #: Tree like the parameters. A leaf of matrices has an entry per output neuron of each
    #: matrix: the parameter's shape without its reduction axes (with an entry per block,
    #: if blocks divide one of them), dtype float32 (float64 for float64 parameters).
    neuron_mean_square: PyTree


def scale_by_neuron_rms(
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    *,
    norm: str = FULL_RANK,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Divide every output neuron of Q by its running root mean square.

    A neuron :math:`Q_{:,j}` of an ``(m, n)`` matrix holds the entries along the reduction
    axes for one index of the output axes (a column of Flax's ``(in, out)`` kernels):

    .. math::

      v_j &\leftarrow \beta_2 v_j + (1 - \beta_2) \tfrac{1}{m} \|Q_{:,j}\|^2, \qquad
      \hat Q_{:,j} = Q_{:,j} / (\sqrt{v_j} + \varepsilon), \\
      Q &\mapsto \hat Q \, \rho / \|\hat Q\|_F.

    Put it between :func:`orthogonalize` and :func:`scale_by_shape`, whose s then gives
    the step of the paper, of norm :math:`0.2 \sqrt{mn}`.

    Args:
      b2: The decay rate :math:`\beta_2`, in [0, 1). 0: all neurons get the same norm.
      eps: The floor :math:`\varepsilon`, at least 0.
      norm: :math:`\rho`. ``"full_rank"``: :math:`\sqrt{\min(m, n)}`, the norm of a Q of
        full rank, as in the paper. ``"kept"``: :math:`\|Q\|_F`, as in the authors' and
        most other public code. They differ for a Q of low rank.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation with :class:`NeuronRMSState`. Updates keep their shapes and dtypes.
      A matrix that is zero stays zero.

    Raises:
      ValueError: If an argument is not valid, or a leaf is not a matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import scale_by_neuron_rms
      >>> stage = scale_by_neuron_rms(b2=0.0)
      >>> q = {"kernel": jnp.array([[0.6, 0.0, 0.8], [0.0, 1.0, 0.0]])}
      >>> updates, state = stage.update(q, stage.init(q))
      >>> print(jnp.linalg.norm(updates["kernel"], axis=0).round(3))  # √(2/3) each
      [0.816 0.816 0.816]

    References:
      Li et al. 2025, *NorMuon*, arXiv:2510.05491, Algorithm 1. Its momentum is an average
      without Nesterov's term (here ``nesterov=False``; a sum has the same Q).
    """
    return on_matrices(weight_dimension_numbers, neuron_rms_stage(b2, eps, norm))


def neuron_rms_stage(b2: ArrayLike, eps: ArrayLike, norm: str) -> Stage:
    """:func:`scale_by_neuron_rms` for given matrices."""
    _checks.number("b2", b2, at_least=0, below=1)
    _checks.number("eps", eps, at_least=0)
    _checks.choice("norm", norm, NORMS)

    def average(axes: MatrixAxes, before: jax.Array, now: jax.Array) -> jax.Array:
        decay = jnp.asarray(b2, before.dtype)
        return decay * before + (1 - decay) * now.astype(before.dtype)

    def scale(axes: MatrixAxes, q: jax.Array, now: jax.Array, v: jax.Array) -> jax.Array:
        wide, entries = q.astype(v.dtype), axes.of_neurons
        # No division by zero where both a neuron and eps are zero.
        root = jnp.sqrt(jnp.where(v == 0, 1, v))
        inverse = 1 / (root + jnp.asarray(eps, v.dtype))
        # ‖Q̂‖² / m and ρ² / m, without reading the matrix again for its norm.
        found = entries.reduce(jnp.sum, now * inverse * inverse)
        if norm == KEPT:
            wanted = entries.reduce(jnp.sum, now)
        else:
            wanted = jnp.asarray(axes.batch_by_shape(_full_rank, q), v.dtype)
        factor = jnp.sqrt(wanted / jnp.where(found == 0, 1, found))
        per_neuron = broadcast(entries, factor, inverse) * inverse
        return (broadcast(axes.neurons, per_neuron, wide) * wide).astype(q.dtype)

    def stage(matrices: Matrices) -> optax.GradientTransformation:
        def init(params: PyTree) -> NeuronRMSState:
            return NeuronRMSState(matrices.neurons.full(params, 0.0, compute_dtype))

        def update(
            updates: PyTree, state: NeuronRMSState, params: PyTree | None = None
        ) -> tuple[PyTree, NeuronRMSState]:
            now = matrices.map(_mean_squares, updates)
            v = matrices.map(average, state.neuron_mean_square, now)
            return matrices.map(scale, updates, now, v), NeuronRMSState(v)

        return optax.GradientTransformation(init, update)

    return stage


def _mean_squares(axes: MatrixAxes, q: jax.Array) -> jax.Array:
    """The mean square of every neuron."""
    return axes.neurons.reduce(_mean, jnp.square(q.astype(compute_dtype(q))))


def _mean(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """The mean; 0 without entries."""
    return jnp.sum(x, axis=axis) / max(1, math.prod(x.shape[i] for i in axis))


def _full_rank(m: int, n: int) -> float:
    """‖Q‖² / m of a Q of full rank."""
    return min(m, n) / max(m, 1)
