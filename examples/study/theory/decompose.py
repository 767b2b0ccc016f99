"""How much of the trust ratios is uniform, and what each of them is made of."""

from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.study.theory.per_matrix import vectors
from orscale_jax import _checks
from orscale_jax.diagnostics.reading import Reading
from orscale_jax.diagnostics.summaries import classes_of
from orscale_jax.trees.boxes import PyTree, unbox
from orscale_jax.trees.nodes import mask_like


class Decomposition(NamedTuple):
    """The result of :func:`decompose`. Its trees are like those of the reading."""

    #: The geometric mean of r̂ over the matrices, a scalar. A learning rate in disguise;
    #: 1 if no matrix counts.
    uniform: jax.Array
    #: r̂ over ``uniform`` for each matrix; NaN for one that does not count.
    remainder: PyTree
    #: The geometric mean of the remainders of each class; NaN if none of it counts.
    class_remainder: dict[str, jax.Array]
    #: The standard deviation of log r̂ over the matrices, 0 if everything is uniform.
    spread: jax.Array
    #: ‖W‖/‖W₀‖, the part of r that is growth; None if the reading lacks growth.
    growth_factor: PyTree | None
    #: ‖D₀‖/‖D‖, the part of r that comes from the direction; None likewise.
    direction_factor: PyTree | None
    #: The number of matrices that count.
    matrices: jax.Array


def decompose(reading: Reading, classes: PyTree | None = None) -> Decomposition:
    r"""Split trust ratios into what all matrices share and the rest.

    .. math::

      \log \bar r = \sum_\ell w_\ell \log \hat r_\ell, \qquad
      \hat r_\ell = \bar r \cdot (\hat r_\ell / \bar r),

    where :math:`w_\ell` is the matrix's share of the sum of all relative steps,
    :math:`\eta \hat r \|D\| / \|W\|`. The weights are equal if the reading has no
    relative steps, or all are zero. A ratio :math:`\bar r` that all matrices share does
    what a learning rate of :math:`\bar r \eta` does: only the rest is a property of
    layers. ``class_remainder`` and ``spread`` use the same weights.

    Each raw ratio is split, too:

    .. math::

      r = \frac{\|W\|}{c \|D\| + \varepsilon} \approx
        \frac{\|W\|}{\|W_0\|} \cdot \frac{\|D_0\|}{\|D\|},

    with equality up to the floors :math:`\varepsilon`; the product of the two factors is
    exactly r. W and D are those of the last update. Here W is the weight before the
    update; ``reading.growth`` uses the weight after it. The second factor is computed as
    :math:`\|W_0\| / (c \|D\|)`. With the anchors ``"full_rank"`` and ``"largest"`` it
    contains their :math:`d_0` instead of :math:`\|D_0\|`. If it is far below 1 while the
    first factor is near 1, c was anchored on a first direction that is smaller than later
    ones, such as one of low rank.

    Args:
      reading: From :func:`read`, of an optimizer with trust ratios.
      classes: A tree of strings like the parameters, or a prefix of one, such as
        :func:`layer_classes` makes; leaves without a string are of class "other". It is
        static: if this function is jitted, close over it, or make it inside.

    Returns:
      A :class:`Decomposition`. A matrix counts if it has had an update, its c is set and
      finite (c = 1 without calibration counts) and its ratio is positive and finite.
      Matrices without an anchor are NaN in both factors.

    Raises:
      ValueError: If the reading has no trust ratios, or ``classes`` does not fit it.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import orscale
      >>> from orscale_jax.diagnostics import read
      >>> from examples.study.theory import decompose
      >>> optimizer = orscale(0.1, calibrate=False)  # r̂ starts away from 1.
      >>> params = {"up": 1.0 * jnp.eye(4), "down": 4.0 * jnp.eye(4)}
      >>> grads = {"up": jnp.eye(4), "down": jnp.eye(4)}
      >>> _, state = optimizer.update(grads, optimizer.init(params), params)
      >>> found = decompose(read(state, params), {"up": "mlp up", "down": "mlp down"})
      >>> print(found.uniform.round(1), found.class_remainder["mlp up"].round(1))
      3.0 0.6

    References:
      This library's own.
    """
    if reading.trust_ratio is None:
        _checks.refuse(
            "reading.trust_ratio", None, "read an optimizer that has trust ratios"
        )
    ratio = unbox(reading.trust_ratio)
    counts = measured(reading)
    weight = _weights(unbox(reading.relative_step), counts)
    log_ratio = jax.tree.map(_log, ratio, counts)
    weights, logs, marks = vectors(weight=weight, log=log_ratio, counts=counts)
    mean = _weighted(weights, logs)
    uniform = jnp.exp(jnp.where(jnp.isnan(mean), 0, mean))
    growth, direction = _factors(reading)
    return Decomposition(
        uniform=uniform,
        remainder=jax.tree.map(
            lambda r, on: jnp.where(on > 0, r / uniform, jnp.nan), ratio, counts
        ),
        class_remainder=_by_class(classes, log_ratio, weight, jnp.log(uniform)),
        spread=jnp.sqrt(_weighted(weights, jnp.square(logs - mean))),
        growth_factor=growth,
        direction_factor=direction,
        matrices=jnp.sum(marks),
    )


def measured(reading: Reading) -> PyTree:
    """1 for each matrix whose ratio has been measured, 0 for the others.

    These have had an update, their c is set and finite, and r̂ is positive and finite.
    """

    def measured(r: jax.Array, c: jax.Array, started: jax.Array) -> jax.Array:
        on = (started != 0) & (c > 0) & jnp.isfinite(c) & (r > 0) & jnp.isfinite(r)
        return jnp.where(on, 1.0, 0.0)

    ratio = unbox(reading.trust_ratio)
    fields = reading.calibration, reading.started
    others = [mask_like(unbox(field), ratio) for field in fields]
    return jax.tree.map(measured, ratio, *others)


def _weights(relative_step: PyTree | None, counts: PyTree) -> PyTree:
    """The relative steps of the matrices that count; equal weights without any."""
    if relative_step is None:
        return counts

    def known(step: jax.Array, on: jax.Array) -> jax.Array:
        return jnp.where((on > 0) & jnp.isfinite(step) & (step > 0), step, 0)

    steps = jax.tree.map(known, relative_step, counts)
    [flat] = vectors(relative_step=steps)
    total = jnp.sum(flat)
    return jax.tree.map(
        lambda step, on: jnp.where(total > 0, step / jnp.where(total > 0, total, 1), on),
        steps,
        counts,
    )


def _log(ratio: jax.Array, on: jax.Array) -> jax.Array:
    return jnp.where(on > 0, jnp.log(jnp.where(on > 0, ratio, 1)), 0)


def _weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    """The weighted mean; NaN without weights."""
    return jnp.sum(weights * values) / jnp.sum(weights)


def _by_class(
    classes: PyTree | None, log_ratio: PyTree, weight: PyTree, log_uniform: jax.Array
) -> dict[str, jax.Array]:
    members: dict[str, list[Any]] = defaultdict(list)
    leaves = [jax.tree.leaves(tree) for tree in (log_ratio, weight)]
    for label, *entries in zip(classes_of(classes, log_ratio), *leaves, strict=True):
        members[label].append(entries)

    def mean(pairs: list[Any]) -> jax.Array:
        logs, weights = vectors(
            log=[log for log, _ in pairs], weight=[w for _, w in pairs]
        )
        return jnp.exp(_weighted(weights, logs) - log_uniform)

    return {label: mean(pairs) for label, pairs in sorted(members.items())}


def _factors(reading: Reading) -> tuple[PyTree | None, PyTree | None]:
    """‖W‖/‖W₀‖ and ‖D₀‖/‖D‖ of the matrices that are anchored."""
    fields = (
        reading.raw_trust_ratio,
        reading.calibration,
        reading.weight_norm,
        reading.direction_norm,
        reading.growth,
        reading.anchored,
    )
    if any(field is None for field in fields):
        return None, None

    def direction(raw: Any, c: Any, w: Any, d: Any, growth: Any, anchored: Any) -> Any:
        on = (anchored != 0) & (d > 0) & (growth > 0)
        divisor = jnp.where(on, growth * c * d, 1)
        return jnp.where(on, w / divisor, jnp.nan)

    ratio = unbox(reading.trust_ratio)
    bare = [mask_like(unbox(field), ratio) for field in fields]
    directions = jax.tree.map(direction, *bare)
    return jax.tree.map(jnp.divide, bare[0], directions), directions
