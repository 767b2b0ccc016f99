"""The wrapper that gives all matrices one trust ratio, or each class one."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.boundary import on_matrices
from orscale_jax.transforms.matrices import Matrices
from orscale_jax.transforms.trust_ratio import ratio_bounds, times_ratio
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.checks import require_params
from orscale_jax.trees.names import quoted
from orscale_jax.trees.nodes import is_function, mask_like

Classes: TypeAlias = PyTree | Callable[[PyTree], PyTree] | None


def pool_trust_ratios(
    ratio: optax.GradientTransformation,
    *,
    r_min: ArrayLike = 0.1,
    r_max: ArrayLike = 5.0,
    classes: Classes = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Give all matrices one trust ratio: the geometric mean of theirs, clipped.

    .. math::

      \hat r = \mathrm{clip}\Big(\exp \frac{1}{N} \sum_{i=1}^N \log r_i,
      \, r_{\min}, r_{\max}\Big), \qquad D_i \mapsto \hat r D_i.

    It is the control experiment that separates the effect of one ratio per matrix from
    that of a larger learning rate for all: the overall scale is that of the unpooled
    ratio, without its differences between matrices. The mean gives all matrices the same
    weight, whatever their size. Only ratios that have been measured count: those of
    matrices with a direction (not decay alone: see ``moving`` of
    :func:`scale_by_calibrated_trust_ratio`), a finite c and a norm that is not zero. If
    none counts, :math:`\hat r` is 1. Matrices that do not count are scaled like the
    others. A matrix whose ratio is not finite keeps it (NaN) and does not affect the
    others.

    Args:
      ratio: :func:`scale_by_calibrated_trust_ratio`; its own bounds have no effect.
      r_min: Lower bound of the ratio applied. ``-inf`` for none.
      r_max: Upper bound of the ratio applied, at least 0. ``inf`` for none.
      classes: The class of each matrix: a tree of strings like the parameters (None where
        there is no matrix), a prefix of such a tree, or a callable from the parameters to
        one. Each class has one ratio. None: one ratio for all matrices.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation with the state of ``ratio``. ``raw_trust_ratio`` holds each
      matrix's own r, ``trust_ratio`` the one that was applied. On a mesh, sums of two
      more numbers per leaf are exchanged.

    Raises:
      ValueError: If an argument is not valid, a leaf is not a matrix, or ``params`` is
        missing from ``update``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import pool_trust_ratios, scale_by_calibrated_trust_ratio
      >>> stage = pool_trust_ratios(scale_by_calibrated_trust_ratio(calibrate=False))
      >>> params = {"up": jnp.eye(2), "down": 4 * jnp.eye(2)}  # Ratios 1 and 4.
      >>> updates = {"up": jnp.eye(2), "down": jnp.eye(2)}
      >>> _, state = stage.update(updates, stage.init(params), params)
      >>> print(state.trust_ratio["up"].round(3), state.trust_ratio["down"].round(3))
      2.0 2.0

    References:
      This library's own. Its relative, the alignment of update-to-weight ratios
      (https://github.com/xh7-ATW/uw-ratio-alignment), gives all matrices one *relative
      step* instead, with the harmonic mean.
    """
    _checks.transformation("ratio", ratio)
    _checks.number("r_min", r_min)
    _checks.number("r_max", r_max, at_least=0, infinite=True)
    _checks.ordered("r_min", r_min, "r_max", r_max)
    stage = functools.partial(pooled_ratio_stage, ratio, r_min, r_max, classes)
    return on_matrices(weight_dimension_numbers, stage)


def pooled_ratio_stage(
    ratio: optax.GradientTransformation,
    r_min: ArrayLike,
    r_max: ArrayLike,
    classes: Classes,
    matrices: Matrices,
) -> optax.GradientTransformationExtraArgs:
    """:func:`pool_trust_ratios` for given matrices and checked bounds."""
    ratio = optax.with_extra_args_support(ratio)

    def clip(_: MatrixAxes, raw: jax.Array, mean: jax.Array) -> jax.Array:
        clipped = jnp.clip(mean, r_min, r_max).astype(raw.dtype)
        return jnp.where(jnp.isfinite(raw), clipped, raw)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        moving: PyTree | None = None,
        **_: Any,
    ) -> tuple[PyTree, Any]:
        require_params(params)
        _, measured = ratio.update(updates, state, params, moving=moving)
        if not hasattr(measured, "raw_trust_ratio"):
            _checks.refuse("ratio", ratio, "pass scale_by_calibrated_trust_ratio()")
        raw = measured.raw_trust_ratio
        norms = measured.direction_norm if moving is None else moving
        counts = matrices.map(
            _counts, measured.calibration, raw, measured.weight_norm, norms
        )
        labels = class_labels(classes, params, updates)
        _require_labels(labels, updates)
        ratios = matrices.map(clip, raw, _pooled(labels, raw, counts))
        scaled = matrices.map(times_ratio, updates, ratios, params)
        bounds = ratio_bounds(params, r_min, r_max)
        return scaled, measured._replace(trust_ratio=ratios, bounds=bounds)

    return optax.GradientTransformationExtraArgs(ratio.init, update)


def _counts(
    _: MatrixAxes, c: jax.Array, raw: jax.Array, norm: jax.Array, moving: jax.Array
) -> jax.Array:
    """Whether the ratio of a matrix was measured, of the batch shape."""
    directed = typed_sharding.shard_like(moving, c).astype(bool)
    measured = directed & (norm > 0) & (c > 0) & (raw > 0)
    return measured & jnp.isfinite(c) & jnp.isfinite(raw)


def class_labels(classes: Classes, params: PyTree, tree: PyTree) -> PyTree:
    """One label for each leaf of a tree: of the parameters, or of a part of them."""
    if classes is None or not jax.tree.leaves(tree):
        # optax.tree.map_params passes a placeholder without leaves.
        return jax.tree.map(lambda _: "", tree)
    if is_function(classes, is_label):
        classes = classes(params)
    labels = mask_like(unbox(classes, is_label), tree, is_label)
    for label in jax.tree.leaves(labels, is_leaf=is_label):
        if not is_label(label):
            _checks.refuse("classes", label, "pass a tree of strings")

    try:
        return jax.tree.broadcast(labels, tree, is_leaf=is_label)
    except ValueError as error:
        raise ValueError(
            "classes must be a tree of the parameters' structure, or a prefix of it: "
            f"{error}"
        ) from error


def _require_labels(labels: PyTree, updates: PyTree) -> None:
    def check(path: Any, label: str | None, part: PyTree) -> None:
        if label is None and jax.tree.leaves(part):
            raise ValueError(
                f"parameter {quoted(path)} is a matrix without a label in classes: give "
                "it a string."
            )

    jax.tree.map_with_path(check, labels, updates, is_leaf=is_label)


def is_label(node: Any) -> bool:
    """Whether a node of a tree of labels is one, or None for none."""
    return node is None or isinstance(node, str)


def _pooled(labels: PyTree, ratios: PyTree, counts: PyTree) -> PyTree:
    """For each leaf, the geometric mean over its class; 1 if no matrix of it counts."""
    sums: dict[str, list[Any]] = defaultdict(lambda: [0.0, 0])
    leaves = [jax.tree.leaves(tree) for tree in (labels, ratios, counts)]
    for label, ratio, count in zip(*leaves, strict=True):
        total = sums[label]
        total[0] += jnp.sum(jnp.where(count, jnp.log(jnp.where(count, ratio, 1)), 0))
        total[1] += jnp.sum(count)
    means = {
        label: jnp.exp(total / jnp.maximum(number, 1).astype(total.dtype))
        for label, (total, number) in sums.items()
    }
    return jax.tree.map(means.__getitem__, labels)
