"""The optimizers that a recipe may name, and the learning rates that they take."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import optax

from examples.pretrain.config import Recipe
from examples.pretrain.errors import UsageError
from orscale_jax import family, keep_master_weights, muon, orscale

Transformation: TypeAlias = optax.GradientTransformationExtraArgs
Constructor: TypeAlias = Callable[..., Transformation]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One entry of the table."""

    label: str  # In tables and figures.
    constructor: Constructor
    # Its arguments, by the recipe's fields they are taken from; a field that is None
    # leaves the constructor's default.
    given: Mapping[str, str]
    # Its other arguments, which make it this optimizer.
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The multiples of AdamW's learning rate that docs/hyperparameters.md advises: for the
    # matrices, and for what AdamW trains beside them.
    advised: tuple[float, float] = (1.0, 1.0)
    # Whether it treats matrices apart and takes what says which these are.
    has_matrices: bool = False
    # Whether `orscale_jax.diagnostics` can read its state.
    readable: bool = False

    @property
    def options(self) -> frozenset[str]:
        """The options of a run that it takes, apart from the learning rate."""
        of_matrices = {"adam_learning_rate", "router"} if self.has_matrices else set()
        of_readings = {"measure_every"} if self.readable else set()
        return frozenset(self.given.values()) | of_matrices | of_readings


_ADAM = {"b1": "adam_b1", "b2": "adam_b2", "weight_decay": "weight_decay"}
_SAME_NAME = "momentum weight_decay r_min r_max adam_b1 adam_b2".split()
_LIKE_MUON = (2.0, 2.0)


def _ours(
    label: str,
    constructor: Constructor,
    advised: tuple[float, float] = (1.0, 1.0),
    **fixed: Any,
) -> Optimizer:
    """An optimizer with this library's names for what it has."""
    has = inspect.signature(constructor).parameters
    given = {name: name for name in _SAME_NAME if name in has and name not in fixed}
    return Optimizer(label, constructor, given, fixed, advised, True, readable=True)


def _orscale(label: str, constructor: Constructor = orscale, **fixed: Any) -> Optimizer:
    """One with a trust ratio, which multiplies the rate of the matrices alone."""
    return _ours(label, constructor, (1.0, 2.0), **fixed)


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


@functools.wraps(orscale)
def _with_master_weights(*args: Any, **kwargs: Any) -> Transformation:
    return keep_master_weights(orscale(*args, **kwargs))


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer("AdamW", optax.adamw, _ADAM),
    "lamb": Optimizer("LAMB", optax.lamb, _ADAM),
    # s = 1: a step of a matrix has singular values of the rate, whatever its shape.
    "muon_unit_scale": _ours("muon (s = 1)", muon, (4.0, 6.0), consistent_rms=None),
    # `orscale_jax.muon` as it is.
    "muon": _ours("muon", muon, _LIKE_MUON),
    "orscale": _orscale("OrScale"),
    "orscale_vision": _ours(
        "OrScale (s = 1)", functools.partial(orscale, r_min=0.5, r_max=1.5),
        consistent_rms=None, calibrate=False),
    "uncalibrated": _orscale("Uncalibrated ratio", calibrate=False),
    "unclipped": _orscale("No clip", r_min=-math.inf, r_max=math.inf),
    # The family.
    "hyperball": _ours("Hyperball", family.hyperball),
    "normuon": _ours("NorMuon", family.normuon, (2.0, 6.0)),
    "orscale_on_normuon": _ours("OrScale on NorMuon", family.orscale_on_normuon),
    "aurora": _ours("Aurora", family.aurora),
    # Another anchor.
    "largest_anchor": _orscale("OrScale, largest anchor", anchor="largest"),
    # Less memory: for the momentum, or by weights in bfloat16.
    "bfloat16_momentum": _orscale("OrScale, bfloat16 momentum", mu_dtype="bfloat16"),
    "int8_momentum": _orscale("OrScale, 8-bit momentum", mu_dtype="int8"),
    "master_weights": _orscale("OrScale, master weights", _with_master_weights),
    # The same as `muon`, by another library.
    "optax_muon": Optimizer(
        "optax.contrib.muon", _optax_muon,
        {"beta": "momentum", "adam_weight_decay": "weight_decay"}
        | {n: n for n in ("weight_decay", "adam_b1", "adam_b2")},
        {"consistent_rms": 0.2}, _LIKE_MUON, has_matrices=True),
}  # fmt: skip


def find_optimizer(name: str) -> Optimizer:
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UsageError(f"--optimizer {name} is unknown. Choose one of: {known}.")
    return OPTIMIZERS[name]


def optimizer_arguments(recipe: Recipe) -> dict[str, Any]:
    """The arguments that the recipe gives its optimizer, apart from learning rates."""
    optimizer = find_optimizer(recipe.optimizer)
    given = {name: getattr(recipe, field) for name, field in optimizer.given.items()}
    return {k: v for k, v in given.items() if v is not None} | dict(optimizer.fixed)


def peak_rates(recipe: Recipe) -> tuple[float, float]:
    """The peak learning rates of the matrices, and of what AdamW trains beside them."""
    factors = (1.0, 1.0)
    if recipe.rates == "advised":
        factors = find_optimizer(recipe.optimizer).advised
    rate, beside = (factor * recipe.learning_rate for factor in factors)
    return rate, recipe.adam_learning_rate or beside


def rates_and_decay(recipe: Recipe) -> str:
    """What the recipe's optimizer does with learning rates and decay, in a line."""
    optimizer, shown = find_optimizer(recipe.optimizer), list[str]()
    for rate in peak_rates(recipe):
        factor = rate / recipe.learning_rate
        apart = recipe.rates == "advised" and factor != 1
        shown.append(f"{rate:g}" + (f" ({factor:g} × AdamW's)" if apart else ""))
    text = f"{optimizer.label}: learning rate {shown[0]}"
    if optimizer.has_matrices:
        text += f" for matrices, {shown[1]} for the rest"
    decay = optimizer_arguments(recipe).get("weight_decay", 0.0)
    return f"{text}; weight decay {decay:g} for all"


def make_optimizer(
    recipe: Recipe, learning_rate: optax.Schedule, **matrices: Any
) -> Transformation:
    """The recipe's optimizer, at a schedule of the matrices' learning rate.

    That of AdamW's parameters has its shape. `matrices` are arguments of `orscale` that
    the parameters call for, such as `weight_dimension_numbers`; optimizers without
    matrices do without.
    """
    optimizer = find_optimizer(recipe.optimizer)
    arguments = optimizer_arguments(recipe)
    if optimizer.has_matrices:
        rate, beside = peak_rates(recipe)

        def adam_rate(step: jax.Array) -> jax.Array:
            return beside / rate * learning_rate(step)

        of_adam = adam_rate if beside != rate else None
        arguments |= matrices | {"adam_learning_rate": of_adam}
    try:
        return optimizer.constructor(learning_rate, **arguments)
    except ValueError as error:
        raise UsageError(f"--optimizer {recipe.optimizer}: {error}") from error
