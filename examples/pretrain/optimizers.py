"""The optimizers that a recipe may name."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import optax

from examples.pretrain import controls
from examples.pretrain.errors import UsageError
from examples.pretrain.recipe import Recipe
from examples.study import controls as of_study
from orscale_jax import family, keep_master_weights, muon, orscale
from orscale_jax.diagnostics import layer_classes

Transformation: TypeAlias = optax.GradientTransformationExtraArgs
Constructor: TypeAlias = Callable[..., Transformation]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One entry of the table.

    Attributes:
      label: Its name in tables and figures.
      constructor: Makes the transformation.
      fixed: Arguments that make the constructor this optimizer.
      given: Other arguments of the constructor, by the recipe's fields they are taken
        from; a field that is None leaves the constructor's default.
      has_matrices: Whether it treats matrices apart and takes what says which these are.
      readable: Whether `orscale_jax.diagnostics` can read its state.
    """

    label: str
    constructor: Constructor
    fixed: Mapping[str, Any]
    given: Mapping[str, str]
    has_matrices: bool
    readable: bool

    @property
    def hyperparameters(self) -> frozenset[str]:
        """The recipe's fields that it takes, apart from the learning rate."""
        of_adam = {"adam_learning_rate"} if self.has_matrices else set()
        return frozenset(self.given.values()) | of_adam


_ADAM = {"b1": "adam_b1", "b2": "adam_b2", "weight_decay": "weight_decay"}
_LARS = {"momentum": "momentum", "weight_decay": "weight_decay"}
_SAME_NAME = "momentum weight_decay r_min r_max adam_b1 adam_b2".split()


def _ours(label: str, constructor: Constructor, **fixed: Any) -> Optimizer:
    """An optimizer of this library: it has the recipe's names for what it has."""
    has = inspect.signature(constructor).parameters
    given = {name: name for name in _SAME_NAME if name in has and name not in fixed}
    return Optimizer(label, constructor, fixed, given, has_matrices=True, readable=True)


def _muon_like(label: str, constructor: Constructor) -> Optimizer:
    """An optimizer of the controls that passes its other arguments on to `muon`."""
    given = {n: n for n in ("momentum", "weight_decay", "adam_b1", "adam_b2")}
    return Optimizer(label, constructor, {}, given, has_matrices=True, readable=True)


def _wrapped(
    wrapper: Callable[[Transformation], Transformation], constructor: Constructor
) -> Constructor:
    """A constructor whose result is in a wrapper."""

    @functools.wraps(constructor)
    def wrapped(*args: Any, **kwargs: Any) -> Transformation:
        return wrapper(constructor(*args, **kwargs))

    return wrapped


def _optax(label: str, constructor: Constructor, given: Mapping[str, str]) -> Optimizer:
    return Optimizer(label, constructor, {}, given, has_matrices=False, readable=False)


def _optax_muon(
    learning_rate: optax.Schedule,
    *,
    weight_dimension_numbers: Any,
    param_shardings: Any = None,
    **arguments: Any,
) -> Transformation:
    """`optax.contrib.muon` by our names; it asks nobody where parameters lie."""
    return optax.contrib.muon(
        learning_rate, muon_weight_dimension_numbers=weight_dimension_numbers, **arguments
    )


_VISION = {"consistent_rms": None, "calibrate": False}
_OPTAX_MUON = {
    "beta": "momentum",
    "weight_decay": "weight_decay",
    "adam_weight_decay": "weight_decay",
    "adam_b1": "adam_b1",
    "adam_b2": "adam_b2",
}

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": _optax("AdamW", optax.adamw, _ADAM),
    "lamb": _optax("LAMB", optax.lamb, _ADAM),
    "lars": _optax("LARS", optax.lars, _LARS),
    "muon": _ours("Muon (s = 1)", muon, consistent_rms=None),
    "muon_moonlight": _ours("Muon+Moonlight", muon),
    "orscale": _ours("OrScale", orscale),
    "orscale_vision": _ours(
        "OrScale (s = 1)",
        functools.partial(orscale, r_min=0.5, r_max=1.5),
        **_VISION,
    ),
    # The paper's deleted design choices.
    "polar_factor_denominator": _ours(
        "‖Q‖ denominator", of_study.polar_factor_denominator
    ),
    "momentum_denominator": _ours("‖M̃‖ denominator", of_study.momentum_denominator),
    "momentum_rms_denominator": _ours(
        "RMS(M̃) + Moonlight", of_study.momentum_rms_denominator
    ),
    "uncalibrated": _ours("Uncalibrated ratio", orscale, calibrate=False),
    "decoupled_weight_decay": _ours(
        "Decoupled weight decay", of_study.decoupled_weight_decay
    ),
    "bfloat16_calibration": _ours(
        "Calibration in bfloat16", of_study.bfloat16_calibration
    ),
    "unclipped": _ours("No clip", orscale, r_min=-math.inf, r_max=math.inf),
    # The family.
    "hyperball": _ours("Hyperball", family.hyperball),
    "normuon": _ours("NorMuon", family.normuon),
    "muon_plus": _ours("Muon+", family.muon_plus),
    "cautious": _ours("OrScale, cautious decay", family.cautious),
    "pooled": _ours("OrScale, one ratio for all", of_study.pooled),
    "pooled_by_class": _ours(
        "OrScale, one ratio for a class", of_study.pooled, classes=layer_classes
    ),
    # Other anchors.
    "full_rank_anchor": _ours("OrScale, full-rank anchor", orscale, anchor="full_rank"),
    "largest_anchor": _ours("OrScale, largest anchor", orscale, anchor="largest"),
    "pooled_full_rank_anchor": _ours(
        "One ratio for all, full-rank anchor", of_study.pooled, anchor="full_rank"
    ),
    # Less memory: for the momentum, or for weights in bfloat16.
    "bfloat16_momentum": _ours(
        "OrScale, bfloat16 momentum", orscale, mu_dtype="bfloat16"
    ),
    "int8_momentum": _ours("OrScale, 8-bit momentum", orscale, mu_dtype="int8"),
    "rounding_to_nearest": _ours(
        "OrScale, rounding to nearest", _wrapped(controls.round_to_nearest, orscale)
    ),
    "master_weights": _ours(
        "OrScale, master weights", _wrapped(keep_master_weights, orscale)
    ),
    "stochastic_rounding": _ours(
        "OrScale, stochastic rounding", _wrapped(controls.round_stochastically, orscale)
    ),
    # Controls.
    "adamw_apart": Optimizer(
        "AdamW, two rates",
        controls.adamw_apart,
        {},
        _ADAM,
        has_matrices=True,
        readable=False,
    ),
    "one_scale": _muon_like("Muon+Moonlight, one scale", controls.one_scale),
    "orscale_on_normuon": _ours("OrScale on NorMuon", family.orscale_on_normuon),
    # The same as Muon+Moonlight, by another library.
    "optax_muon": Optimizer(
        "optax.contrib.muon",
        _optax_muon,
        {"consistent_rms": 0.2},
        _OPTAX_MUON,
        has_matrices=True,
        readable=False,
    ),
    # Of the family, and controls, too; last, since colours in figures go by the order.
    "aurora": _ours("Aurora", family.aurora),
    "scale_between": _ours("Muon, a scale between", controls.scale_between),
    "twice_the_decay": _muon_like(
        "Muon+Moonlight, twice the decay", controls.twice_the_decay
    ),
    "model_optimum": _muon_like(
        "Muon+Moonlight, r* of the class", controls.model_optimum
    ),
    "orscale_twice_the_decay": _muon_like(
        "OrScale, twice the decay",
        functools.partial(controls.twice_the_decay, optimizer=orscale),
    ),
}


def make_optimizer(
    recipe: Recipe, learning_rate: optax.Schedule, **matrices: Any
) -> Transformation:
    """The recipe's optimizer.

    Args:
      recipe: Names the optimizer and has its hyperparameters.
      learning_rate: The schedule of the recipe's learning rate. That of AdamW's
        parameters has its shape.
      **matrices: Arguments of :func:`orscale_jax.orscale` that the parameters call for,
        such as ``weight_dimension_numbers``. Optimizers without matrices do without.

    Raises:
      UsageError: If there is no such optimizer, or it does not take the recipe's
        hyperparameters.
    """
    optimizer = find_optimizer(recipe.optimizer)
    arguments = optimizer_arguments(recipe)
    if optimizer.has_matrices:
        arguments |= matrices | {"adam_learning_rate": _adam_rate(recipe, learning_rate)}
    try:
        return optimizer.constructor(learning_rate, **arguments)
    except ValueError as error:
        raise UsageError(f"--optimizer {recipe.optimizer}: {error}") from error


def optimizer_arguments(recipe: Recipe) -> dict[str, Any]:
    """The arguments that the recipe gives its optimizer, apart from learning rates."""
    optimizer = find_optimizer(recipe.optimizer)
    given = {name: getattr(recipe, field) for name, field in optimizer.given.items()}
    return {k: v for k, v in given.items() if v is not None} | dict(optimizer.fixed)


def find_optimizer(name: str) -> Optimizer:
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UsageError(f"--optimizer {name} is unknown. Choose one of: {known}.")
    return OPTIMIZERS[name]


def _adam_rate(recipe: Recipe, learning_rate: optax.Schedule) -> optax.Schedule | None:
    """AdamW's schedule, where its peak is another; None where it is the same."""
    if recipe.adam_learning_rate is None:
        return None
    ratio = recipe.adam_learning_rate / recipe.learning_rate

    def adam_rate(step: jax.Array) -> jax.Array:
        return ratio * learning_rate(step)

    return adam_rate
