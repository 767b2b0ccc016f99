"""The stage of Muon+: divides neurons and inputs by their norms."""

from collections.abc import Sequence

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

NEURONS, INPUTS = VECTORS = ("neurons", "inputs")


def normalize_vectors(
    order: Sequence[str] = (INPUTS, NEURONS),
    eps: ArrayLike = 1e-8,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Divide the neurons or the inputs of every matrix by their norms.

    .. math::

      q \mapsto q / \sqrt{\|q\|^2 + \varepsilon}

    for every vector q of one kind, then of the next. A neuron holds the entries along the
    reduction axes for one index of the output axes (a column of Flax's ``(in, out)``
    kernels, a row of PyTorch's). An input holds the entries along the output axes for one
    index of the reduction axes.

    Put it between :func:`orthogonalize` and :func:`scale_by_shape`. The result has norm
    :math:`\sqrt{n}` after ``"neurons"`` and :math:`\sqrt{m}` after ``"inputs"``,
    whatever the rank, instead of Q's :math:`\sqrt{\operatorname{rank} Q}`: steps may be
    larger than Muon's at the same learning rate.

    Args:
      order: What is normalized, in this order: ``"neurons"`` or ``"inputs"`` or both,
        each any number of times. The paper's "row" is ``("neurons",)``, its "col"
        ``("inputs",)``, and its "row_col" ``("neurons", "inputs")``. The default is its
        "col_row".
      eps: The floor :math:`\varepsilon` under the root, at least 0.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A stateless transformation. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, or a leaf is not a matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import normalize_vectors
      >>> stage = normalize_vectors(["neurons"])
      >>> q = {"kernel": jnp.array([[3.0, 0.0], [4.0, 2.0]])}
      >>> print(stage.update(q, stage.init(q))[0]["kernel"].round(3))
      [[0.6 0. ]
       [0.8 1. ]]

    References:
      Zhang et al. 2026, *Muon+*, arXiv:2602.21545.
    """
    return on_matrices(weight_dimension_numbers, normalize_stage(order, eps))


def normalize_stage(order: Sequence[str], eps: ArrayLike) -> Stage:
    """:func:`normalize_vectors` for given matrices."""
    order = (order,) if isinstance(order, str) else order
    if not isinstance(order, tuple | list) or not order:
        _checks.refuse("order", order, "pass 'neurons' or 'inputs' or a list of them")
    for vectors in order:
        _checks.choice("order", vectors, VECTORS)
    _checks.number("eps", eps, at_least=0)

    def normalize(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
        dtype = compute_dtype(leaf)
        x = leaf.astype(dtype)
        for vectors in order:
            each = axes.neurons if vectors == NEURONS else axes.inputs
            square = each.reduce(jnp.sum, jnp.square(x)) + jnp.asarray(eps, dtype)
            inverse = jax.lax.rsqrt(jnp.where(square == 0, 1, square))
            x = broadcast(each, inverse, x) * x
        return x.astype(leaf.dtype)

    def stage(matrices: Matrices) -> optax.GradientTransformation:
        return optax.stateless(lambda updates, _: matrices.map(normalize, updates))

    return stage
