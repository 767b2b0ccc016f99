"""Algorithm 1 from stages that can be rearranged, and AdamW for other parameters."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax.newton_schulz.coefficients import Coefficients
from orscale_jax.parameters.dimension_numbers import (
    WeightDimensionNumbers,
    is_axes_leaf,
    matrix_axes,
)
from orscale_jax.sharding.param_shardings import ParamShardings
from orscale_jax.transforms.decay import (
    Mask,
    add_decayed_weights,
    check_mask,
    is_mask_function,
    mask_of_matrices,
)
from orscale_jax.transforms.first_update import from_first_nonzero_update, with_moving
from orscale_jax.transforms.float32 import in_float32
from orscale_jax.transforms.fusion import of_stacks
from orscale_jax.transforms.orthogonalize import orthogonalize
from orscale_jax.transforms.shape import scale_by_shape
from orscale_jax.transforms.trust_ratio import scale_by_calibrated_trust_ratio
from orscale_jax.trees.boxes import PyTree, on_bare_arrays, unbox
from orscale_jax.trees.masks import mask_like
from orscale_jax.trees.updates import require_valid

ScalarOrSchedule: TypeAlias = ArrayLike | optax.Schedule
Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
Parameters = ParamSpec("Parameters")

# The groups of the partition, and so the keys of its state.
MATRIX, ADAMW = "matrix", "adamw"


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
    ns_products: str
    weight_dimension_numbers: WeightDimensionNumbers
    adam_learning_rate: ScalarOrSchedule | None
    adam_b1: ArrayLike
    adam_b2: ArrayLike
    adam_eps: ArrayLike
    adam_nesterov: bool
    adam_weight_decay: ScalarOrSchedule | None
    mesh: Mesh | AbstractMesh | None
    param_shardings: ParamShardings


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages after the momentum, for given matrices.

    Attributes:
      hyperparameters: The hyperparameters of the optimizer.
      params: The parameters or, without them, the updates; None before they are known.
      axes: The axes of the matrices.
      orthogonalize: M̃ to Q.
      scale: Q to sQ.
      decay: Adds λW.
      ratio: Multiplies its input by r̂, which is measured on that input.
      learning_rate: Multiplies by −η.
    """

    hyperparameters: Hyperparameters
    params: PyTree | None
    axes: WeightDimensionNumbers
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
        return self.once_moving(optax.chain(self.direction, self.decay))

    @property
    def decoupled_decay(self) -> optax.GradientTransformation:
        """Adds λW, once a matrix has received a direction."""
        return self.once_moving(self.decay)

    def after_q(self, stage: optax.GradientTransformation) -> "Stages":
        """These stages with another one between Q and s."""
        orthogonalize = optax.chain(self.orthogonalize, stage)
        return dataclasses.replace(self, orthogonalize=orthogonalize)

    def once_moving(
        self, inner: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """``inner`` from the first update of a matrix that is not zero."""
        return from_first_nonzero_update(inner, weight_dimension_numbers=self.axes)


# The links that follow the momentum in the chain: as a rule two, one that makes the
# direction and the learning rate. They determine the structure of the state.
Links: TypeAlias = tuple[optax.GradientTransformation, ...]
Arrangement: TypeAlias = Callable[[Stages], Links]


def with_arguments_of(
    optimizer: Callable[Parameters, Optimizer],
    without: tuple[str, ...] = (),
    **defaults: Any,
) -> Callable[[Callable[..., Links]], Callable[Parameters, Optimizer]]:
    """Make an optimizer from an arrangement, with the arguments of another optimizer.

    Keyword-only parameters of the arrangement become arguments of the optimizer, too.

    Args:
      optimizer: The optimizer whose arguments the new one takes.
      without: Arguments that the new one does not take; their defaults apply.
      **defaults: Defaults that differ from those of ``optimizer``.
    """
    inherited = inspect.signature(optimizer)
    fixed = {name: inherited.parameters[name].default for name in without}
    kept = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in inherited.parameters.items()
        if name not in without
    ]

    def decorate(arrangement: Callable[..., Links]) -> Callable[Parameters, Optimizer]:
        _, *own = inspect.signature(arrangement).parameters.values()
        signature = inherited.replace(parameters=[*kept, *own])

        def built(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Optimizer:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            added = {p.name: _as_python_scalar(given.pop(p.name)) for p in own}
            return build(
                functools.partial(arrangement, **added),
                Hyperparameters(**fixed, **given),
            )

        functools.update_wrapper(built, arrangement)
        built.__signature__ = signature  # type: ignore[attr-defined]
        return _checks.suggests_arguments(built)

    return decorate


def build(arrangement: Arrangement, hyperparameters: Hyperparameters) -> Optimizer:
    """Build Algorithm 1 from its arranged stages, with AdamW for other parameters."""
    h = _normalize(hyperparameters)
    _check(h)
    _matrices(arrangement, h, None, None)  # The stages refuse bad values before init.
    partition = _partition(arrangement, h)
    return on_bare_arrays(require_valid(in_float32(partition, h.mu_dtype)))


def _normalize(h: Hyperparameters) -> Hyperparameters:
    """Convert NumPy's scalars, and give AdamW the matrices' rate and decay.

    Where float64 is enabled, NumPy's scalars would promote JAX's arrays to it.
    """
    values = {
        field.name: _as_python_scalar(getattr(h, field.name))
        for field in dataclasses.fields(h)
    }
    for name in ("learning_rate", "weight_decay"):
        for argument in (name, f"adam_{name}"):
            values[argument] = _checks.scheduled(argument, values[argument])
        if values[f"adam_{name}"] is None:
            values[f"adam_{name}"] = values[name]
    return Hyperparameters(**values)


def _as_python_scalar(value: Any) -> Any:
    scalar = isinstance(value, np.generic | np.ndarray) and not value.ndim
    return value.item() if scalar else value


def _check(h: Hyperparameters) -> None:
    """Refuse bad values of arguments that no stage checks."""
    number = functools.partial(_checks.number, at_least=0)
    number("learning_rate", h.learning_rate, schedule=True)
    number("momentum", h.momentum, below=1)
    _checks.flag("nesterov", h.nesterov)
    _checks.dtype("mu_dtype", h.mu_dtype)
    number("weight_decay", h.weight_decay, schedule=True)
    check_mask(h.weight_decay_mask)
    number("adam_learning_rate", h.adam_learning_rate, schedule=True)
    number("adam_b1", h.adam_b1, below=1)
    number("adam_b2", h.adam_b2, below=1)
    number("adam_eps", h.adam_eps)
    _checks.flag("adam_nesterov", h.adam_nesterov)
    number("adam_weight_decay", h.adam_weight_decay, schedule=True)


def _matrices(
    arrangement: Arrangement,
    h: Hyperparameters,
    axes: WeightDimensionNumbers,
    mask: Mask | None,
    params: PyTree | None = None,
) -> optax.GradientTransformation:
    """Algorithm 1."""
    momentum = optax.trace(h.momentum, nesterov=h.nesterov, accumulator_dtype=h.mu_dtype)
    direction, *rest = arrangement(_stages(h, axes, mask, params))
    return optax.chain(
        # M ← μM + G, M̃ = μM + G
        of_stacks(momentum),
        with_moving(direction, axes),  # By M̃, since decay alone makes D ≠ 0.
        *rest,
    )


def _stages(
    h: Hyperparameters,
    axes: WeightDimensionNumbers,
    mask: Mask | None,
    params: PyTree | None,
) -> Stages:
    return Stages(
        hyperparameters=h,
        params=params,
        axes=axes,
        orthogonalize=orthogonalize(
            ns_steps=h.ns_steps,
            ns_coeffs=h.ns_coeffs,
            ns_dtype=h.ns_dtype,
            ns_preconditioning=h.ns_preconditioning,
            ns_products=h.ns_products,
            mesh=h.mesh,
            param_shardings=h.param_shardings,
            weight_dimension_numbers=axes,
        ),
        scale=scale_by_shape(h.consistent_rms, weight_dimension_numbers=axes),
        decay=add_decayed_weights(h.weight_decay, mask),
        ratio=scale_by_calibrated_trust_ratio(
            calibrate=h.calibrate,
            anchor=h.anchor,
            anchor_steps=h.anchor_steps,
            r_min=h.r_min,
            r_max=h.r_max,
            eps=h.eps,
            consistent_rms=h.consistent_rms,
            weight_decay=h.weight_decay,
            weight_decay_mask=mask,
            weight_dimension_numbers=axes,
        ),
        learning_rate=optax.scale_by_learning_rate(h.learning_rate),
    )


def _adamw(h: Hyperparameters, mask: Mask | None) -> optax.GradientTransformation:
    """:func:`optax.adamw`, link by link."""
    moments = optax.scale_by_adam(
        b1=h.adam_b1,
        b2=h.adam_b2,
        eps=h.adam_eps,
        mu_dtype=h.mu_dtype,
        nesterov=h.adam_nesterov,
    )
    return optax.chain(
        of_stacks(moments),
        add_decayed_weights(h.adam_weight_decay, mask),
        optax.scale_by_learning_rate(h.adam_learning_rate),
    )


def _partition(arrangement: Arrangement, h: Hyperparameters) -> Optimizer:
    """:func:`optax.partition`, built once the parameters are known.

    Dimension numbers and masks that are functions thus see the whole tree, not just one
    group of it. Labels and masks replace whole boxes, so that no box is without an array.
    """

    def build_for(tree: PyTree) -> Optimizer:
        tree = unbox(tree)
        axes = matrix_axes(h.weight_dimension_numbers, tree)
        mask = _resolve_mask(h.weight_decay_mask, tree, axes)
        labels = jax.tree.map(
            lambda leaf: ADAMW if isinstance(leaf, optax.MaskedNode) else MATRIX,
            axes,
            is_leaf=is_axes_leaf,
        )
        matrices = _matrices(arrangement, h, axes, mask, tree)
        groups = {MATRIX: matrices, ADAMW: _adamw(h, mask)}
        # A function, since optax.partition would call a tree of labels that is callable.
        return optax.partition(groups, lambda _: labels)

    def init(params: PyTree) -> optax.OptState:
        return build_for(params).init(params)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, optax.OptState]:
        tree = updates if params is None else params
        return build_for(tree).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _resolve_mask(mask: Mask | None, tree: PyTree, axes: PyTree) -> Mask | None:
    if isinstance(mask, str):
        return mask_of_matrices(axes)
    mask = unbox(mask)
    if is_mask_function(mask):
        # optax.tree.map_params passes a placeholder without leaves.
        mask = mask(tree) if jax.tree.leaves(tree) else tree
    if mask is not None and jax.tree.leaves(tree):
        mask = mask_like(mask, tree)
        _require_mask(mask, tree)
    return mask


def _require_mask(mask: PyTree, tree: PyTree) -> None:
    """Refuse masks that :func:`optax.masked` takes for True or rejects without a name."""
    remedy = "pass a tree of booleans with the parameters' structure, or a prefix of it"
    if len(jax.tree.leaves(tree)) > 1 and jax.tree_util.all_leaves([mask]):
        _checks.refuse(
            "weight_decay_mask",
            mask,
            f"{remedy} with more than one leaf. To optax.inject_hyperparams, which takes "
            'functions for schedules, pass static_args="weight_decay_mask"',
        )
    for leaf in jax.tree.leaves(mask):
        if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.bool):
            _checks.refuse("weight_decay_mask", leaf, remedy)
    try:
        jax.tree.map(lambda *_: None, mask, tree)
    except ValueError as error:
        raise ValueError(f"weight_decay_mask does not fit: {remedy}: {error}") from error
