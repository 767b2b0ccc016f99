"""A trust ratio from below: no neuron's update is small beside its weights."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices, broadcast, on_matrices
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.checks import require_params


def neuron_floor(
    ratio: ArrayLike = 0.3825, *, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    r"""Raise each neuron's update to a fraction of the norm of its weights.

    .. math::

      u_j \leftarrow \max\Big(1, \tau \frac{\|w_j\|}{\|u_j\|}\Big) \, u_j.

    This is a trust ratio from below, for each output neuron, which takes the place of
    weight decay: weights that have grown take larger steps. An update of 0 stays 0.

    Args:
      ratio: :math:`\tau`, at least 0.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A stateless transformation. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, a leaf is not a matrix, or ``params`` is
        missing from ``update``.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import neuron_floor
      >>> stage, params = neuron_floor(0.5), {"kernel": jnp.eye(2)}
      >>> updates = {"kernel": jnp.diag(jnp.array([0.1, 0.8]))}
      >>> print(jnp.diag(stage.update(updates, stage.init(params), params)[0]["kernel"]))
      [0.5 0.8]

    References:
      https://github.com/KellerJordan/modded-nanogpt, pull request 328.
    """
    validate.number("ratio", ratio, at_least=0)

    def raised(axes: MatrixAxes, update: jax.Array, weight: jax.Array) -> jax.Array:
        neurons = axes.neurons
        wanted = jnp.asarray(ratio, update.dtype) * neurons.norms(weight)
        norms = neurons.norms(update)
        factors = jnp.maximum(1, wanted / jnp.where(norms == 0, 1, norms))
        return broadcast(neurons, factors, update) * update

    def stage(matrices: Matrices) -> optax.GradientTransformation:
        def update(updates: PyTree, params: PyTree | None) -> PyTree:
            require_params(params)
            return matrices.map(raised, updates, params)

        return optax.stateless(update)

    return on_matrices(weight_dimension_numbers, stage)
