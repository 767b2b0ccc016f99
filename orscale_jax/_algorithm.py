"""Algorithm 1 with its stages as arranged, and AdamW for what is no matrix."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import _checks
from orscale_jax._boxes import on_bare_arrays, unbox
from orscale_jax._decay import add_decayed_weights
from orscale_jax._matrix import (
    PyTree,
    WeightDimensionNumbers,
    is_axes_leaf,
    is_function,
    matrix_axes,
)
from orscale_jax._param_shardings import ParamShardings
from orscale_jax._polar import Coefficients
from orscale_jax._precision import in_float32
from orscale_jax._transforms import (
    from_first_nonzero_update,
    orthogonalize,
    scale_by_calibrated_trust_ratio,
    scale_by_shape,
)
from orscale_jax._updates import require_fitting, where_gradients_are

Mask: TypeAlias = PyTree | Callable[[PyTree], PyTree]
ScalarOrSchedule: TypeAlias = ArrayLike | optax.Schedule


class Hyperparameters(NamedTuple):
    """The arguments of :func:`orscale_jax.orscale`; Muon has none for the ratio."""

    learning_rate: ScalarOrSchedule
    momentum: ArrayLike
    nesterov: bool
    mu_dtype: DTypeLike | None
    weight_decay: ScalarOrSchedule
    weight_decay_mask: Mask | None
    consistent_rms: ArrayLike | None
    ns_steps: int | jax.Array
    ns_coeffs: Coefficients
    ns_dtype: DTypeLike | None
    ns_preconditioning: str
    weight_dimension_numbers: WeightDimensionNumbers
    adam_learning_rate: ScalarOrSchedule | None
    adam_b1: ArrayLike
    adam_b2: ArrayLike
    adam_eps: ArrayLike
    adam_nesterov: bool
    adam_weight_decay: ScalarOrSchedule | None
    mesh: Mesh | AbstractMesh | None
    param_shardings: ParamShardings
    calibrate: bool = True
    r_min: ArrayLike = 0.1
    r_max: ArrayLike = 5.0
    eps: ArrayLike = 1e-6


class Stages(NamedTuple):
    """What comes between the momentum and the learning rate, for given matrices."""

    #: The axes of the matrices.
    axes: WeightDimensionNumbers
    #: M̃ to sQ.
    direction: optax.GradientTransformation
    #: M̃ to D = λW + sQ, once the matrix has received momentum.
    coupled: optax.GradientTransformation
    #: Adds λW, once the matrix has received a direction.
    decay: optax.GradientTransformation
    #: Multiplies by r̂, measured on what comes in.
    ratio: optax.GradientTransformation


Arrangement: TypeAlias = Callable[[Stages], optax.GradientTransformation]


def arranged(
    arrangement: Arrangement, given: Hyperparameters
) -> optax.GradientTransformationExtraArgs:
    """Algorithm 1 with its stages as arranged, AdamW for what is no matrix."""
    # NumPy's scalars would make float64 of all that they meet, where there is float64.
    given = Hyperparameters(*map(_as_python_scalar, given))
    given = given._replace(
        adam_learning_rate=_default(given.adam_learning_rate, given.learning_rate),
        adam_weight_decay=_default(given.adam_weight_decay, given.weight_decay),
    )
    _check(given)
    matrices = functools.partial(_matrices, arrangement, given)
    matrices(None, None)  # The stages refuse bad hyperparameters now, not at init.
    others = functools.partial(_others, given)
    partition = _partition(
        matrices, others, given.weight_dimension_numbers, given.weight_decay_mask
    )
    return on_bare_arrays(where_gradients_are(in_float32(partition, given.mu_dtype)))


def _check(given: Hyperparameters) -> None:
    """Refuse what no stage of ours refuses."""
    number = functools.partial(_checks.number, at_least=0)
    number("learning_rate", given.learning_rate, schedule=True)
    number("momentum", given.momentum, below=1)
    _checks.flag("nesterov", given.nesterov)
    _checks.dtype("mu_dtype", given.mu_dtype)
    number("weight_decay", given.weight_decay, schedule=True)
    number("adam_learning_rate", given.adam_learning_rate, schedule=True)
    number("adam_b1", given.adam_b1, below=1)
    number("adam_b2", given.adam_b2, below=1)
    number("adam_eps", given.adam_eps)
    _checks.flag("adam_nesterov", given.adam_nesterov)
    number("adam_weight_decay", given.adam_weight_decay, schedule=True)


def _matrices(
    arrangement: Arrangement,
    given: Hyperparameters,
    axes: WeightDimensionNumbers,
    mask: Mask | None,
) -> optax.GradientTransformation:
    momentum = optax.trace(
        given.momentum, nesterov=given.nesterov, accumulator_dtype=given.mu_dtype
    )
    return optax.chain(
        # M ← μM + G, M̃ = μM + G
        _in_kernels_of_its_own(momentum),
        arrangement(_stages(given, axes, mask)),
        # W ← W − ηr̂D
        optax.scale_by_learning_rate(given.learning_rate),
    )


def _stages(
    given: Hyperparameters, axes: WeightDimensionNumbers, mask: Mask | None
) -> Stages:
    direction = optax.chain(
        # Q = NSₖ(M̃)
        orthogonalize(
            ns_steps=given.ns_steps,
            ns_coeffs=given.ns_coeffs,
            ns_dtype=given.ns_dtype,
            ns_preconditioning=given.ns_preconditioning,
            mesh=given.mesh,
            param_shardings=given.param_shardings,
            weight_dimension_numbers=axes,
        ),
        # sQ
        scale_by_shape(given.consistent_rms, weight_dimension_numbers=axes),
    )
    decay = add_decayed_weights(given.weight_decay, mask)
    once_moving = functools.partial(
        from_first_nonzero_update, weight_dimension_numbers=axes
    )
    return Stages(
        axes=axes,
        direction=direction,
        coupled=once_moving(optax.chain(direction, decay)),
        decay=once_moving(decay),
        ratio=scale_by_calibrated_trust_ratio(
            calibrate=given.calibrate,
            r_min=given.r_min,
            r_max=given.r_max,
            eps=given.eps,
            weight_dimension_numbers=axes,
        ),
    )


def _others(given: Hyperparameters, mask: Mask | None) -> optax.GradientTransformation:
    """``optax.adamw``, link by link."""
    return optax.chain(
        optax.scale_by_adam(
            b1=given.adam_b1,
            b2=given.adam_b2,
            eps=given.adam_eps,
            mu_dtype=given.mu_dtype,
            nesterov=given.adam_nesterov,
        ),
        add_decayed_weights(given.adam_weight_decay, mask),
        optax.scale_by_learning_rate(given.adam_learning_rate),
    )


def _partition(
    matrices: Callable[
        [WeightDimensionNumbers, Mask | None], optax.GradientTransformation
    ],
    others: Callable[[Mask | None], optax.GradientTransformation],
    weight_dimension_numbers: WeightDimensionNumbers,
    weight_decay_mask: Mask | None,
) -> optax.GradientTransformationExtraArgs:
    """:func:`optax.partition`, built once the parameters are there.

    Callables then see the whole tree, and not the half that a partition leaves of it.
    Labels and masks stand in the places of boxes: no box is made that holds nothing.
    """

    def at(tree: PyTree) -> optax.GradientTransformationExtraArgs:
        tree = unbox(tree)
        axes = matrix_axes(weight_dimension_numbers, tree)
        mask = unbox(weight_decay_mask)
        if is_function(mask, lambda leaf: isinstance(leaf, bool | np.bool_)):
            # As in matrix_axes, a placeholder is no tree to ask about.
            mask = mask(tree) if jax.tree.leaves(tree) else tree
        if mask is not None and jax.tree.leaves(tree):
            _require_mask(mask, tree)
        labels = jax.tree.map(
            lambda leaf: "adamw" if isinstance(leaf, optax.MaskedNode) else "matrix",
            axes,
            is_leaf=is_axes_leaf,
        )
        # A tree of labels may be callable, and optax.partition would call it.
        return optax.partition(
            {"matrix": matrices(axes, mask), "adamw": others(mask)}, lambda _: labels
        )

    def init(params: PyTree) -> optax.OptState:
        return at(params).init(params)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, optax.OptState]:
        if params is not None:
            require_fitting(updates, params)
        tree = updates if params is None else params
        return at(tree).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _require_mask(mask: PyTree, tree: PyTree) -> None:
    """Refuse what :func:`optax.masked` takes for True, or fails on without a name."""
    remedy = "pass a tree of booleans with the parameters' structure, or a prefix of it"
    if len(jax.tree.leaves(tree)) > 1 and jax.tree_util.all_leaves([mask]):
        _checks.refuse(
            "weight_decay_mask",
            mask,
            f"{remedy} with more than one. To optax.inject_hyperparams a function is "
            'a schedule, unless static_args="weight_decay_mask"',
        )
    for leaf in jax.tree.leaves(mask):
        if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.bool):
            _checks.refuse("weight_decay_mask", leaf, remedy)
    try:
        jax.tree.map(lambda *_: None, mask, tree)
    except ValueError as error:
        raise ValueError(f"weight_decay_mask does not fit: {remedy}: {error}") from error


def _in_kernels_of_its_own(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """``inner``, which a GPU's kernels do not mix with what comes after it.

    A kernel that also reduces cannot write over what it reads: XLA would make the new
    momentum beside the old one and copy it, at every step.
    """

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None
    ) -> tuple[PyTree, optax.OptState]:
        updates, state = inner.update(updates, state, params)
        apart = jax.lax.optimization_barrier
        updates = jax.lax.platform_dependent(
            updates, cuda=apart, rocm=apart, default=lambda updates: updates
        )
        return updates, state

    return optax.GradientTransformation(inner.init, update)


def _as_python_scalar(value: Any) -> Any:
    scalar = isinstance(value, np.generic | np.ndarray) and not value.ndim
    return value.item() if scalar else value


def _default(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
