"""The wrapper of Hyperball: every matrix keeps the norm that it had at the start."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orscale_jax import _checks
from orscale_jax.newton_schulz.arithmetic import largest_magnitude
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.transforms.boundary import on_matrices
from orscale_jax.transforms.dtypes import compute_dtype
from orscale_jax.transforms.matrices import Matrices, broadcast
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.checks import require_params
from orscale_jax.trees.names import quoted


class InitialNormState(NamedTuple):
    """State of :func:`keep_initial_norm`."""

    #: Tree like the parameters. A leaf of matrices has their norms R, in an array of
    #: the batch shape (``()`` for a plain matrix), dtype float32 (float64 for float64
    #: parameters).
    initial_norm: PyTree
    #: The state of the inner transformation.
    inner_state: optax.OptState


def keep_initial_norm(
    inner: optax.GradientTransformation,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Move every matrix on the sphere of its initial norm, as Hyperball does.

    With :math:`\mathrm{normalize}(X) = X / \|X\|_F` and R the norm of the matrix at the
    start, an update u becomes the difference that takes W to

    .. math::

      W \leftarrow R \, \mathrm{normalize}(W - \eta R \, \mathrm{normalize}(u)).

    The scale of u has no effect, and :math:`\eta` is the relative size of a step: for u
    orthogonal to W, the tangent of the angle by which W turns. Do not combine it with
    weight decay of these matrices. The next step undoes whatever else changes their norms
    (:func:`qk_clip`, averages of weights).

    Args:
      inner: The last stage, :func:`optax.scale_by_learning_rate`, which multiplies its
        input by :math:`-\eta`.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation with :class:`InitialNormState`. Updates keep their shapes and
      dtypes; norms are float32 (float64 for float64). A matrix with a zero update, or
      with one that would make it zero, does not change.

    Raises:
      ValueError: If a leaf is not a matrix, ``init`` is given a matrix that is zero (if
        ``init`` is compiled, the updates of the matrix are NaN instead), or ``params`` is
        missing from ``update``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import keep_initial_norm
      >>> stage = keep_initial_norm(optax.scale_by_learning_rate(1.0))
      >>> params = {"kernel": jnp.array([[3.0, 0.0]])}
      >>> updates = {"kernel": jnp.array([[0.0, -7.0]])}
      >>> updates, _ = stage.update(updates, stage.init(params), params)
      >>> print(optax.apply_updates(params, updates)["kernel"].round(4))  # 3 / √2
      [[2.1213 2.1213]]

    References:
      Wen et al. 2026, *Fantastic Pretraining Optimizers and Where to Find Them II:
      Hyperball Optimization*, arXiv:2606.16899. Marin's public code uses the norm of the
      current step for R; Dion's code fixes R, as here and in the paper.
    """
    _checks.transformation("inner", inner)
    stage = functools.partial(initial_norm_stage, inner)
    return on_matrices(weight_dimension_numbers, stage)


def initial_norm_stage(
    inner: optax.GradientTransformation, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """:func:`keep_initial_norm` for given matrices."""
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> InitialNormState:
        _refuse_abstract(unbox(params))
        norms = matrices.entries(params, _norms)
        _refuse_zeros(unbox(norms), unbox(params))
        return InitialNormState(norms, inner.init(params))

    def update(
        updates: PyTree,
        state: InitialNormState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, InitialNormState]:
        require_params(params)
        on_sphere = matrices.map(_to_norm, updates, state.initial_norm)
        steps, inner_state = inner.update(
            on_sphere, state.inner_state, params, **extra_args
        )
        changes = matrices.map(_change, steps, params, state.initial_norm)
        return changes, InitialNormState(state.initial_norm, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _norms(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
    return axes.norms(leaf.astype(compute_dtype(leaf)))


def _to_norm(axes: MatrixAxes, leaf: jax.Array, norm: jax.Array) -> jax.Array:
    """The matrices of a leaf scaled to given norms; zeros stay zeros."""
    wide = leaf.astype(compute_dtype((leaf, norm)))
    found = axes.norms(wide)
    # A zero norm was not refused where ``init`` was compiled: here it shows as NaN.
    factor = jnp.where(norm == 0, jnp.nan, norm) / jnp.where(found == 0, 1, found)
    return (broadcast(axes, factor, wide) * wide).astype(leaf.dtype)


def _change(
    axes: MatrixAxes, step: jax.Array, weight: jax.Array, norm: jax.Array
) -> jax.Array:
    """The change of W to the norm R in the direction of W + step."""
    dtype = compute_dtype((step, weight))
    w, by = weight.astype(dtype), step.astype(dtype)
    still = axes.reduce(largest_magnitude, by) == 0
    found = axes.norms(w + by)
    # A step to zero leaves no direction: the matrix stays where it is.
    moved = jnp.where(still | (found == 0), norm, found)
    # Not R (W + step) / ‖W + step‖ − W, which would round off the digits of the step.
    factor = jnp.where(found == 0, 0, norm / moved)
    shrinkage = (norm - moved) / moved
    change = broadcast(axes, factor, by) * by + broadcast(axes, shrinkage, w) * w
    return change.astype(step.dtype)


def _refuse_abstract(params: PyTree) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"parameter {quoted(path)} is abstract, and has no norm to keep: call "
                "jax.eval_shape(optimizer.init, params)."
            )


def _refuse_zeros(norms: PyTree, params: PyTree) -> None:
    entries = [jnp.size(leaf) for leaf in jax.tree.leaves(params)]
    norms = jax.tree.leaves_with_path(norms)
    # Not strict: optax.tree.map_params passes a placeholder without leaves.
    for (path, norm), count in zip(norms, entries, strict=False):
        known = not isinstance(norm, jax.core.Tracer)
        if count and known and bool((norm == 0).any()):
            raise ValueError(
                f"parameter {quoted(path)} has a matrix that is zero, which cannot keep "
                "its norm and move: initialize it with other values, or put None in its "
                "place in weight_dimension_numbers for AdamW."
            )
