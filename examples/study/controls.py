r"""What only the study compares with: the paper's deleted design choices, shared ratios.

Each is an optimizer with the arguments of :func:`orscale_jax.orscale` and with the
defaults under which the paper reports it: a chain of OrScale's stages in another order,
or with another ratio. Where the ratio stands decides what it is measured on: after the
decay on :math:`\lambda W + sQ`, as in OrScale; before it on sQ alone, and the decay is
then decoupled; around the direction on the raw momentum.

The paper's other baselines, LAMB and LARS, are :func:`optax.lamb` and :func:`optax.lars`.

References:
  Lou & You, *OrScale*, section 5.5, Table 4 (``tab:req-ablation``) and appendix C. The
  shared and the replayed ratios are this library's own.
"""

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orscale_jax import _checks
from orscale_jax._arguments import MuonArguments, OrScaleArguments, takes
from orscale_jax._optimizers import Chain, Stages, build, muon_chain, orscale_chain
from orscale_jax.diagnostics.summaries import Classes, class_labels, is_label
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, compute_dtype
from orscale_jax.transforms.stages import first_update_stage
from orscale_jax.transforms.trust_ratio import (
    CalibratedTrustRatioState,
    not_one,
    times_ratio,
)
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.names import quoted

Transformation: TypeAlias = optax.GradientTransformation


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Uncalibrated(OrScaleArguments):
    calibrate: bool = False
    r_min: ArrayLike = 0.5
    r_max: ArrayLike = 1.5


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Vision(_Uncalibrated):
    consistent_rms: ArrayLike | None = None


def _of(
    arguments: type[MuonArguments],
) -> Callable[[Chain], Callable[..., Transformation]]:
    """Make an optimizer of a chain."""

    def decorate(chain: Chain) -> Callable[..., Transformation]:
        @functools.wraps(chain)
        def make(h: MuonArguments) -> Transformation:
            return build(chain, h)

        return takes(arguments)(make)

    return decorate


@_of(_Vision)
def polar_factor_denominator(s: Stages) -> Transformation:
    """r = ‖W‖/(‖Q‖ + ε) and W ← (1 − ηλ)W − η r̂ Q (the paper's code: orscale_muon)."""
    return _decoupled(s, s.orthogonalize, s.scale_by_shape, s.scale_by_trust_ratio)


@_of(_Vision)
def momentum_denominator(s: Stages) -> Transformation:
    """r = ‖W‖/(‖M̃‖ + ε) and W ← (1 − ηλ)W − η r̂ Q (the paper's code: mutrust).

    A momentum whose squares underflow float32 (norms below about 1e-19) counts as zero,
    with r = 1; one whose squares overflow it (norms above 1e19) gives NaN.
    """
    return _decoupled(s, _around_direction(s, lambda tree: tree))


@_of(_Uncalibrated)
def momentum_rms_denominator(s: Stages) -> Transformation:
    """r = RMS(W)/(RMS(M̃) + ε) and W ← (1 − ηλ)W − η r̂ sQ (the paper's code: muscale).

    It differs from :func:`momentum_denominator` in ε, a floor per entry here, and in s.
    """

    def over_root_of_size(axes: Any, leaf: jax.Array) -> jax.Array:
        size = jnp.asarray(axes.by_shape(operator.mul, leaf), leaf.dtype)
        return leaf / jnp.sqrt(size)

    rescaled = functools.partial(s.matrices.map, over_root_of_size)
    return _decoupled(s, _around_direction(s, rescaled))


@_of(OrScaleArguments)
def decoupled_weight_decay(s: Stages) -> Transformation:
    """r = ‖W‖/(c‖sQ‖ + ε) and W ← (1 − ηλ)W − η r̂ sQ (the paper's code: FM3)."""
    return _decoupled(s, s.orthogonalize, s.scale_by_shape, s.scale_by_trust_ratio)


@_of(OrScaleArguments)
def bfloat16_calibration(s: Stages) -> Transformation:
    """c anchored on W and D rounded to bfloat16, and rounded itself (tab:calibration).

    r then starts up to 0.4 % away from 1, and stays off by this factor.
    """
    ratio = optax.with_extra_args_support(s.scale_by_trust_ratio)
    # Unlike a pair of casts, which XLA may remove, reduce_precision always rounds.
    rounded = functools.partial(
        jax.tree.map,
        functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7),
    )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        measured = rounded(updates), state, rounded(params)
        _, anchored = ratio.update(*measured, **extra_args)
        anchored = _with_own_norms(s, state, anchored, updates, params)
        c = jax.tree.map(not_one, rounded(anchored.calibration))
        known = anchored._replace(calibration=c)
        return ratio.update(updates, known, params, **extra_args)

    rounding = optax.GradientTransformationExtraArgs(ratio.init, update)
    return orscale_chain(dataclasses.replace(s, scale_by_trust_ratio=rounding))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Pooled(OrScaleArguments):
    """The arguments of :func:`pooled`.

    Args:
      classes: The class of each matrix: a tree of strings like the parameters (None where
        there is no matrix), a prefix of such a tree, or a callable from the parameters to
        one. None: one ratio for all matrices. :func:`optax.inject_hyperparams` takes
        functions for schedules: then pass it ``static_args="classes"``.
    """

    classes: Classes = None


@takes(_Pooled)
def pooled(h: _Pooled) -> Transformation:
    r"""OrScale with one ratio for all matrices, or one for each class.

    .. math::

      \hat r = \mathrm{clip}\Big(\exp \frac{1}{N} \sum_{i=1}^N \log r_i,
      \, r_{\min}, r_{\max}\Big).

    It separates the effect of one ratio per matrix from that of a larger learning rate
    for all. Only ratios that have been measured count: those of matrices with a direction
    (not decay alone), a finite c and a norm that is not zero. If none counts,
    :math:`\hat r` is 1. Matrices that do not count are scaled like the others. A matrix
    whose ratio is not finite keeps it (NaN) and does not affect the others.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from examples.study.controls import pooled
      >>> optimizer = pooled(1e-3, calibrate=False, weight_decay=0.0)
      >>> params = {"up": jnp.eye(4), "down": 2 * jnp.eye(4)}
      >>> _, state = optimizer.update(params, optimizer.init(params), params)
      >>> ratios = optax.tree.get(state, "trust_ratio")
      >>> print(ratios["up"] == ratios["down"])
      True
    """

    def chain(s: Stages) -> Transformation:
        # Functions see all parameters, not the matrices alone.
        labels = class_labels(h.classes, s.params, s.params)
        of_state = optax.with_extra_args_support(s.scale_by_trust_ratio)
        ratio = pooled_ratio_stage(of_state, s.matrices, labels)
        return orscale_chain(dataclasses.replace(s, scale_by_trust_ratio=ratio))

    return build(chain, h)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Replayed(MuonArguments):
    """The arguments of :func:`replayed`.

    Args:
      trust_ratio: The ratio of each step, of shape ``(T,)``, whose last entry applies to
        all later steps; a schedule, from the step to the ratio; or one number. Finite,
        and at least 0.
    """

    trust_ratio: ArrayLike | Sequence[float] | Callable[[jax.Array], jax.Array]


@takes(_Replayed)
def replayed(h: _Replayed) -> Transformation:
    r"""Muon+Moonlight whose learning rate is multiplied by recorded ratios.

    .. math::

      W \leftarrow W - \eta_t \hat r_t (\lambda W + sQ).

    It separates the effect of a ratio that responds to its own run from that of a
    schedule. AdamW's learning rate is unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> from examples.study.controls import replayed
      >>> from orscale_jax import muon
      >>> params = {"kernel": jnp.eye(4)}
      >>> control = replayed(1e-3, trust_ratio=[2.0, 3.0])
      >>> updates, _ = control.update(params, control.init(params), params)
      >>> expected, _ = muon(2e-3).update(params, muon(2e-3).init(params), params)
      >>> print(jnp.allclose(updates["kernel"], expected["kernel"]))
      True
    """
    if callable(h.trust_ratio):
        schedule = _checks.scheduled("trust_ratio", h.trust_ratio)
    else:
        recorded = _recorded(h.trust_ratio)
        last = recorded.size - 1

        def schedule(step: jax.Array) -> jax.Array:
            return jnp.asarray(recorded)[jnp.minimum(step, last)]

    replay = optax.scale_by_schedule(schedule)

    def chain(s: Stages) -> Transformation:
        times = optax.chain(replay, s.scale_by_learning_rate)
        return muon_chain(dataclasses.replace(s, scale_by_learning_rate=times))

    return build(chain, h)


def _decoupled(s: Stages, *stages: Transformation) -> Transformation:
    """A chain whose decay follows the ratio, from a matrix's first direction on."""
    decay = first_update_stage(s.add_decayed_weights, s.matrices)
    return optax.chain(s.momentum, s.told(*stages, decay), s.scale_by_learning_rate)


class _AroundState(NamedTuple):
    """States of the ratio and of the direction inside it."""

    ratio: CalibratedTrustRatioState
    inner: optax.OptState


def _around_direction(s: Stages, rescaled: Callable[[PyTree], PyTree]) -> Transformation:
    """M̃ to r̂sQ, with the ratio of the rescaled W and M̃."""
    inner = optax.chain(s.orthogonalize, s.scale_by_shape)
    ratio = optax.with_extra_args_support(s.scale_by_trust_ratio)

    def init(params: PyTree) -> _AroundState:
        return _AroundState(ratio.init(params), inner.init(params))

    def update(
        updates: PyTree, state: _AroundState, params: PyTree | None = None, **_: Any
    ) -> tuple[PyTree, _AroundState]:
        directions, inner_state = inner.update(updates, state.inner, params)
        _, found = ratio.update(rescaled(updates), state.ratio, rescaled(params))
        found = _with_own_norms(s, state.ratio, found, directions, params)
        scaled = s.matrices.map(times_ratio, directions, found.trust_ratio)
        return scaled, _AroundState(found, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_own_norms(
    s: Stages,
    before: CalibratedTrustRatioState,
    found: CalibratedTrustRatioState,
    directions: PyTree,
    params: PyTree,
) -> CalibratedTrustRatioState:
    """A state whose norms are those of W and D, though others were measured."""

    def norms(axes: Any, leaf: jax.Array, c: jax.Array) -> jax.Array:
        own = axes.norms(leaf.astype(compute_dtype(leaf)))
        return typed_sharding.shard_like(own, c).astype(c.dtype)

    weights = s.matrices.map(norms, params, found.calibration)
    anchors = s.matrices.map(
        lambda _, old, new, own: jnp.where(new == old, old, own),
        *(before.anchor_weight_norm, found.anchor_weight_norm, weights),
    )
    return found._replace(
        weight_norm=weights,
        direction_norm=s.matrices.map(norms, directions, found.calibration),
        anchor_weight_norm=anchors,
    )


def pooled_ratio_stage(
    ratio: optax.GradientTransformationExtraArgs, matrices: Matrices, classes: Classes
) -> optax.GradientTransformationExtraArgs:
    """The ratio's stage, with the mean r of its class for each matrix."""

    def check(path: Any, label: str | None, part: PyTree) -> None:
        if label is None and jax.tree.leaves(part):
            raise ValueError(
                f"parameter {quoted(path)} is a matrix without a label in classes: give "
                "it a string."
            )

    def counts(
        _: Any, c: jax.Array, raw: jax.Array, norm: jax.Array, moving: jax.Array
    ) -> jax.Array:
        directed = typed_sharding.shard_like(moving, c).astype(bool)
        measured = directed & (norm > 0) & (c > 0) & (raw > 0)
        return measured & jnp.isfinite(c) & jnp.isfinite(raw)

    def update(
        updates: Any, state: Any, params: Any = None, *, moving: Any = None, **extra: Any
    ) -> Any:
        _, found = ratio.update(updates, state, params, moving=moving, **extra)
        labels = class_labels(classes, params, updates)
        jax.tree.map_with_path(check, labels, updates, is_leaf=is_label)
        raw, (r_min, r_max) = found.raw_trust_ratio, found.bounds
        moving = found.direction_norm if moving is None else moving
        of_state = found.calibration, raw, found.weight_norm
        means = _means(labels, raw, matrices.map(counts, *of_state, moving))

        def clipped(_: Any, own: jax.Array, mean: jax.Array) -> jax.Array:
            shared = jnp.clip(mean, r_min, r_max).astype(own.dtype)
            return jnp.where(jnp.isfinite(own), shared, own)

        ratios = matrices.map(clipped, raw, means)
        scaled = matrices.map(times_ratio, updates, ratios)
        return scaled, found._replace(trust_ratio=ratios)

    return optax.GradientTransformationExtraArgs(ratio.init, update)


def _means(labels: PyTree, ratios: PyTree, counts: PyTree) -> PyTree:
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


def _recorded(trust_ratio: ArrayLike | Sequence[float]) -> jax.Array | np.ndarray:
    """Ratios of shape (T,), refused unless finite as far as they are known.

    Those that are on the host stay there, as jax.transfer_guard demands.
    """
    remedy = "pass finite ratios of shape (T,), all at least 0, one number, or a schedule"
    given = jax.tree.leaves(trust_ratio)
    of: Any = jnp if any(isinstance(leaf, jax.Array) for leaf in given) else np
    try:
        recorded = of.asarray(trust_ratio)
    except (TypeError, ValueError):
        _checks.refuse("trust_ratio", trust_ratio, remedy)
    if not _checks.is_real(recorded.dtype) or recorded.ndim > 1 or not recorded.size:
        _checks.refuse("trust_ratio", trust_ratio, remedy)
    if not isinstance(recorded, jax.core.Tracer):
        values = np.asarray(jax.device_get(recorded), np.float64)
        if not np.isfinite(values).all() or (values < 0).any():
            _checks.refuse("trust_ratio", trust_ratio, remedy)
    return of.atleast_1d(recorded)
