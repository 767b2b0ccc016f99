"""Smoothness from successive gradients."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from examples.study.theory import jackknife
from examples.study.theory.per_matrix import matrices_like
from orscale_jax import _checks
from orscale_jax.diagnostics.measure import whole_parts
from orscale_jax.diagnostics.step_gain import Estimate
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.trees.boxes import PyTree


def secant_smoothness(
    previous_gradients: Sequence[PyTree],
    gradients: Sequence[PyTree],
    step: PyTree,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> Estimate:
    r"""Compute the smoothness along a step from the gradients before and after it.

    .. math::

      L_\ell = \frac{\langle G'_\ell - G_\ell, \, \Delta_\ell \rangle}
        {\|\Delta_\ell\|_F^2}, \qquad \Delta = W' - W,

    the mean over the step of the smoothness that :func:`estimate` finds at its start. It
    takes no second derivatives, and costs no more than the gradients. Both gradients must
    be of the same micro-batches: those of different ones also differ by their noise,
    which a small step cannot outweigh.

    Args:
      previous_gradients: The gradients at W: a list with a tree for each micro-batch;
        ``[tree]`` for one.
      gradients: The gradients of the same micro-batches at W', in the same order.
      step: :math:`W' - W`, a tree like the parameters.
      weight_dimension_numbers: The dimension numbers of the optimizer.

    Returns:
      An :class:`Estimate` of trees, like ``smoothness`` of :func:`estimate`. The standard
      error is NaN for one micro-batch, and L is NaN for a matrix that did not move.

    Raises:
      ValueError: If the lists do not have the same length, or a tree does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from examples.study.theory import secant_smoothness
      >>> gradient = jax.grad(lambda w: 1.5 * jnp.sum(w["kernel"] ** 2))
      >>> before, after = {"kernel": jnp.eye(3)}, {"kernel": 0.9 * jnp.eye(3)}
      >>> step = jax.tree.map(jnp.subtract, after, before)
      >>> found = secant_smoothness([gradient(before)], [gradient(after)], step)
      >>> print(found.value["kernel"].round(3))
      3.0

    References:
      Lou & You, *OrScale*, section 4, (A1).
    """
    both = {"previous_gradients": previous_gradients, "gradients": gradients}
    for name, trees in both.items():
        if not isinstance(trees, list | tuple) or not trees:
            _checks.refuse(name, type(trees), "pass a list of trees, one per micro-batch")
    if len(previous_gradients) != len(gradients):
        raise ValueError(
            f"previous_gradients has {len(previous_gradients)} micro-batches and "
            f"gradients {len(gradients)}: pass gradients of the same ones in both."
        )
    matrices = Matrices.of(weight_dimension_numbers, step)

    def parts(name: str, tree: PyTree) -> list[jax.Array]:
        return whole_parts(matrices, matrices_like(name, tree, matrices, step))

    moved = parts("step", step)
    old, new = ([parts(name, tree) for tree in trees] for name, trees in both.items())
    samples = [
        list(map(_secant, *of_batch, moved)) for of_batch in zip(old, new, strict=True)
    ]
    found = [jackknife.mean(jnp.stack(of_part)) for of_part in zip(*samples, strict=True)]
    return Estimate(
        *(matrices.entries_of_parts([part[i] for part in found]) for i in (0, 1))
    )


def _secant(old: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
    change, square = (jnp.sum(x * step, axis=(-2, -1)) for x in (new - old, step))
    return change / square
