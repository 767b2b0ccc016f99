"""A user's factory, called with rates and axes, and a sentence on what is wrong with it.

``docs/track0.md`` says what a factory takes, and how it is applied.
"""

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.pretrain.errors import UsageError

PyTree = Any
Factory = Callable[..., optax.GradientTransformation]
# From the parameters to a tree of dimension numbers; None for a parameter of AdamW.
Numbers = Callable[[PyTree], PyTree]

_ASKED = ("learning_rate", "other_learning_rate", "weight_dimension_numbers")


def of_matrices(
    matrices: Callable[[PyTree], optax.GradientTransformation],
    others: optax.GradientTransformation,
    weight_dimension_numbers: Numbers,
) -> optax.GradientTransformation:
    """One optimizer for the matrices and another one for all other parameters.

    Args:
      matrices: The optimizer of the matrices, as a function of their dimension numbers.
        The tree of these numbers has `optax.MaskedNode()` in place of other parameters.
      others: The optimizer of all other parameters.
      weight_dimension_numbers: As Track 0 passes it to a factory.
    """
    if not callable(matrices):
        raise TypeError(
            "matrices has to be a function of dimension numbers: for an optimizer that "
            "needs none, pass lambda numbers: optimizer."
        )

    def build(params: PyTree) -> optax.GradientTransformation:
        numbers = weight_dimension_numbers(params)

        def over(fn: Callable[[Any], Any]) -> PyTree:
            return jax.tree.map(lambda _, n: fn(n), params, numbers)

        masked = over(lambda n: optax.MaskedNode() if n is None else n)
        labels = over(lambda n: "others" if n is None else "matrices")
        return optax.partition({"matrices": matrices(masked), "others": others}, labels)

    return optax.GradientTransformation(
        lambda params: build(params).init(params),
        lambda updates, state, params: build(params).update(updates, state, params),
    )


def find_factory(name: str) -> Factory:
    """The factory of `MODULE:FACTORY`; modules of the working directory count."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UsageError(f"{name}: write MODULE:FACTORY, such as my_optimizers:sophia.")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name} cannot be imported: {error}.") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise UsageError(f"{name} is no function, but {found!r}.")
    return found


def build(
    factory: Factory, rate: optax.Schedule, other: optax.Schedule, numbers: Numbers
) -> optax.GradientTransformation:
    """The optimizer of a factory at two rates."""
    takes = inspect.signature(factory).parameters
    axes = "weight_dimension_numbers" in takes
    if "other_learning_rate" in takes:
        given = {"weight_dimension_numbers": numbers} if axes else {}
        return factory(learning_rate=rate, other_learning_rate=other, **given)
    if axes:
        of_axes = functools.partial(factory, learning_rate=rate)
        adamw = optax.adamw(other, b1=0.9, b2=0.95, weight_decay=0.1)
        return of_matrices(
            lambda masked: of_axes(weight_dimension_numbers=masked), adamw, numbers
        )
    matrices, others = factory(learning_rate=rate), factory(learning_rate=other)
    return of_matrices(lambda _: matrices, others, numbers)


def check(factory: Factory, name: str) -> None:
    """Refuses a factory whose optimizer fails, or does not move what it should."""
    params = {"matrix": jnp.ones((4, 6)), "bias": jnp.ones(6)}
    grads = jax.tree.map(lambda x: jnp.linspace(-1, 1, x.size).reshape(x.shape), params)
    numbers = {"matrix": optax.contrib.MuonDimensionNumbers(0, 1), "bias": None}

    def moved(rate: float, other: float, then: float = 0.5) -> dict[str, np.ndarray]:
        schedules = (lambda step: rate * then**step, lambda step: other * then**step)
        optimizer = build(factory, *schedules, lambda _: numbers)
        now, state = params, optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(grads, state, now)
            now = optax.apply_updates(now, updates)
        return {key: np.asarray(now[key] - params[key]) for key in params}

    try:
        slow, *fast = moved(1e-3, 1e-3), moved(2e-3, 1e-3), moved(1e-3, 2e-3)
        later = moved(1e-3, 1e-3, then=0.25)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{name} fails on a matrix of 4×6 and a bias of 6: {words}\n"
            f"A factory takes keyword arguments of {', '.join(_ASKED)} and gives an "
            "optimizer of Optax. Rates are schedules, which are functions of the step "
            "count: pass them to a stage that takes schedules, such as "
            "optax.scale_by_learning_rate. update is called with updates, state and "
            "params."
        ) from error
    for given in inspect.signature(factory).parameters:
        meant = difflib.get_close_matches(given, _ASKED, 1, cutoff=0.9)
        if meant and given not in _ASKED:
            raise UsageError(f"{name} takes {given}: write {meant[0]}.")
    for key, rate, changed in zip(slow, _ASKED[:2], fast, strict=True):
        if not np.isfinite(slow[key]).all():
            raise UsageError(f"{name}: the {key} is not finite after two steps.")
        if not slow[key].any():
            raise UsageError(f"{name} does not move the {key}.")
        if np.array_equal(slow[key], changed[key]):
            raise UsageError(f"{name} does not use {rate} for the {key}.")
        if np.array_equal(slow[key], later[key]):
            raise UsageError(
                f"{name} keeps {rate} of the first step for the {key}: pass the schedule "
                "itself to the optimizer."
            )
        if np.vdot(slow[key], grads[key]) > 0:
            raise UsageError(
                f"{name} moves the {key} along its gradient: let the chain end with "
                "optax.scale_by_learning_rate, which changes the sign."
            )
