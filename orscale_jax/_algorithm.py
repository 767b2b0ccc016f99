"""Algorithm 1 from stages that can be rearranged, and AdamW for other parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax.distributed.slow_links import SlowAxes
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.parameters import rate_multipliers
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.parameters.rate_multipliers import RateMultipliers
from orscale_jax.sharding.param_shardings import ParamShardings, ParamSpecs
from orscale_jax.transforms.boundary import Stage, on_parameters
from orscale_jax.transforms.decay import (
    Mask,
    add_decayed_weights,
    check_mask,
    resolve_mask,
    with_scheduled_decay,
)
from orscale_jax.transforms.first_update import first_update_stage, with_moving
from orscale_jax.transforms.matrices import ADAMW, MATRIX, Matrices
from orscale_jax.transforms.momentum import (
    check_mu_dtype,
    float_dtype,
    momentum_stage,
    with_float32_squares,
)
from orscale_jax.transforms.multiplied_rate import (
    multiplied,
    multiplied_for_matrices,
    multipliers_of,
)
from orscale_jax.transforms.orthogonalize import orthogonalize_stage, polar_options
from orscale_jax.transforms.shape import Scale, shape_stage
from orscale_jax.transforms.trust_ratio import TrustRatio, trust_ratio_stage
from orscale_jax.trees.boxes import PyTree

ScalarOrSchedule: TypeAlias = ArrayLike | optax.Schedule
Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The arguments of :func:`orscale_jax.orscale`, under their names."""

    learning_rate: ScalarOrSchedule
    momentum: ArrayLike
    nesterov: bool
    mu_dtype: DTypeLike | None
    weight_decay: ScalarOrSchedule
    weight_decay_mask: Mask | None
    consistent_rms: ArrayLike | None
    scale_mode: str
    calibrate: bool
    anchor: str
    anchor_steps: ArrayLike
    r_min: ArrayLike
    r_max: ArrayLike
    eps: ArrayLike
    ns_steps: int | jax.Array
    ns_coeffs: Coefficients
    ns_dtype: DTypeLike | None
    ns_preconditioning: str
    weight_dimension_numbers: WeightDimensionNumbers
    adam_learning_rate: ScalarOrSchedule | None
    adam_b1: ArrayLike
    adam_b2: ArrayLike
    adam_eps: ArrayLike
    adam_eps_root: ArrayLike
    adam_nesterov: bool
    adam_weight_decay: ScalarOrSchedule | None
    learning_rate_multipliers: RateMultipliers
    mesh: Mesh | AbstractMesh | None
    slow_axes: SlowAxes | None
    param_shardings: ParamShardings


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages after the momentum, for given matrices.

    Attributes:
      hyperparameters: The hyperparameters of the optimizer.
      params: The parameters or, without them, the updates.
      matrices: Which of them are matrices.
      polar: M̃ to Q, for any of the matrices.
      orthogonalize: M̃ to Q.
      scale: Q to sQ.
      decay: Adds λW.
      ratio: Multiplies its input by r̂, which is measured on that input.
      learning_rate: Multiplies by −η, and by the multipliers of η.
    """

    hyperparameters: Hyperparameters
    params: PyTree
    matrices: Matrices
    polar: Stage
    orthogonalize: optax.GradientTransformation
    scale: optax.GradientTransformation
    decay: optax.GradientTransformation
    ratio: optax.GradientTransformation
    learning_rate: optax.GradientTransformation

    @property
    def direction(self) -> optax.GradientTransformation:
        """M̃ to sQ."""
        return optax.chain(self.orthogonalize, self.scale)

    @property
    def coupled(self) -> optax.GradientTransformation:
        """M̃ to D = λW + sQ, once a matrix has received momentum."""
        return first_update_stage(optax.chain(self.direction, self.decay), self.matrices)

    @property
    def decoupled_decay(self) -> optax.GradientTransformation:
        """Adds λW, once a matrix has received a direction."""
        return first_update_stage(self.decay, self.matrices)

    def after_q(self, stage: Stage) -> "Stages":
        """These stages with another one between Q and s."""
        orthogonalize = optax.chain(self.orthogonalize, stage(self.matrices))
        return dataclasses.replace(self, orthogonalize=orthogonalize)


# Transformations after the momentum, normally (direction, learning rate). Their nesting
# is the state's tree: changing it breaks checkpoints.
ChainTail: TypeAlias = tuple[optax.GradientTransformation, ...]
Arrangement: TypeAlias = Callable[[Stages], ChainTail]
StagesOf: TypeAlias = Callable[[PyTree, Matrices, Mask | None, PyTree | None], Stages]


def build(arrangement: Arrangement, hyperparameters: Hyperparameters) -> Optimizer:
    """Build Algorithm 1 from its arranged stages, with AdamW for other parameters."""
    h = _normalize(hyperparameters)
    _check(h)
    optimizer_of = functools.partial(_optimizer, arrangement, h, _stages(h))
    optimizer_of(())  # Checks the arguments of the arrangement.
    return on_parameters(optimizer_of, float_dtype(h.mu_dtype))


def _optimizer(
    arrangement: Arrangement, h: Hyperparameters, stages_of: StagesOf, params: PyTree
) -> Optimizer:
    """The optimizer of given parameters, without boxes.

    Dimension numbers, masks and multipliers that are functions thus see the whole tree,
    not just one group of it. Labels and masks replace whole boxes, so that no box is
    without an array.
    """
    matrices = Matrices.of(h.weight_dimension_numbers, params)
    mask = resolve_mask(h.weight_decay_mask, params, matrices.mask)
    multipliers = multipliers_of(h.learning_rate_multipliers, params, matrices)
    labels = jax.tree.map(lambda is_matrix: MATRIX if is_matrix else ADAMW, matrices.mask)
    tail = arrangement(stages_of(params, matrices, mask, multipliers))
    groups = {
        MATRIX: _algorithm_1(tail, h, matrices),
        ADAMW: _adamw(h, mask, multipliers),
    }
    # A function, since optax.partition would call a tree of labels that is callable.
    return optax.partition(groups, lambda _: labels)


def _algorithm_1(
    tail: ChainTail, h: Hyperparameters, matrices: Matrices
) -> optax.GradientTransformation:
    direction, *rest = tail
    return optax.chain(
        # M ← μM + G, M̃ = μM + G
        momentum_stage(h.momentum, h.nesterov, h.mu_dtype, matrices),
        # By M̃, since decay alone makes D ≠ 0.
        with_moving(with_scheduled_decay(direction, h.weight_decay), matrices),
        *rest,
    )


def _adamw(
    h: Hyperparameters, mask: Mask | None, multipliers: PyTree | None
) -> optax.GradientTransformation:
    """:func:`optax.adamw`, link by link."""
    moments = with_float32_squares(
        optax.scale_by_adam(
            b1=h.adam_b1,
            b2=h.adam_b2,
            eps=h.adam_eps,
            eps_root=h.adam_eps_root,
            mu_dtype=float_dtype(h.mu_dtype),
            nesterov=h.adam_nesterov,
        )
    )
    learning_rate = optax.scale_by_learning_rate(h.adam_learning_rate)
    if multipliers is not None:
        learning_rate = multiplied(learning_rate, multipliers)
    decay = add_decayed_weights(h.adam_weight_decay, mask)
    return optax.chain(moments, decay, learning_rate)


def _stages(h: Hyperparameters) -> StagesOf:
    """Check the stages' arguments once, for all parameters."""
    orthogonalize = _orthogonalize(h)
    scale = Scale.of(h.consistent_rms, h.scale_mode)
    shape, ratio = shape_stage(scale), _trust_ratio(h, scale)

    def stages_of(
        params: PyTree,
        matrices: Matrices,
        mask: Mask | None,
        multipliers: PyTree | None,
    ) -> Stages:
        learning_rate = optax.scale_by_learning_rate(h.learning_rate)
        if multipliers is not None:
            learning_rate = multiplied_for_matrices(learning_rate, multipliers, matrices)
        return Stages(
            hyperparameters=h,
            params=params,
            matrices=matrices,
            polar=orthogonalize,
            orthogonalize=orthogonalize(matrices),
            scale=shape(matrices),
            decay=add_decayed_weights(h.weight_decay, mask),
            ratio=trust_ratio_stage(ratio, mask, matrices),
            learning_rate=learning_rate,
        )

    return stages_of


def _orthogonalize(h: Hyperparameters) -> Stage:
    polar = polar_options(
        ns_steps=h.ns_steps,
        ns_coeffs=h.ns_coeffs,
        ns_dtype=h.ns_dtype,
        ns_preconditioning=h.ns_preconditioning,
        mesh=h.mesh,
        slow_axes=h.slow_axes,
    )
    return functools.partial(orthogonalize_stage, polar, ParamSpecs(h.param_shardings))


def _trust_ratio(h: Hyperparameters, scale: Scale) -> TrustRatio:
    return TrustRatio(
        calibrate=h.calibrate,
        anchor=h.anchor,
        anchor_steps=h.anchor_steps,
        r_min=h.r_min,
        r_max=h.r_max,
        eps=h.eps,
        scale=scale,
        weight_decay=h.weight_decay,
    )


def _normalize(h: Hyperparameters) -> Hyperparameters:
    """Convert NumPy's scalars, and give AdamW the matrices' rate and decay.

    Where float64 is enabled, NumPy's scalars would promote JAX's arrays to it.
    """
    values = {
        field.name: as_python_scalar(field.name, getattr(h, field.name))
        for field in dataclasses.fields(h)
    }
    for name in ("learning_rate", "weight_decay"):
        for argument in (name, f"adam_{name}"):
            values[argument] = _checks.scheduled(argument, values[argument])
        if values[f"adam_{name}"] is None:
            values[f"adam_{name}"] = values[name]
    return Hyperparameters(**values)


def as_python_scalar(name: str, value: Any) -> Any:
    """Convert a scalar of NumPy; refuse one of fewer than 32 bits."""
    if not isinstance(value, np.generic | np.ndarray) or value.ndim:
        return value
    _checks.not_rounded(name, value)
    return value.item()


def _check(h: Hyperparameters) -> None:
    """Refuse bad values of arguments that no stage checks."""
    number = functools.partial(_checks.number, at_least=0)
    number("learning_rate", h.learning_rate, schedule=True)
    number("momentum", h.momentum, below=1)
    _checks.flag("nesterov", h.nesterov)
    check_mu_dtype(h.mu_dtype)
    number("weight_decay", h.weight_decay, schedule=True)
    check_mask(h.weight_decay_mask)
    number("adam_learning_rate", h.adam_learning_rate, schedule=True)
    number("adam_b1", h.adam_b1, below=1)
    number("adam_b2", h.adam_b2, below=1)
    number("adam_eps", h.adam_eps)
    number("adam_eps_root", h.adam_eps_root)
    _checks.flag("adam_nesterov", h.adam_nesterov)
    number("adam_weight_decay", h.adam_weight_decay, schedule=True)
    rate_multipliers.check(h.learning_rate_multipliers)
