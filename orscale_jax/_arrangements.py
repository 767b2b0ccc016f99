"""Optimizers from arrangements of the stages, with the arguments of another optimizer."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from orscale_jax import _checks
from orscale_jax._algorithm import (
    ChainTail,
    Hyperparameters,
    Optimizer,
    as_python_scalar,
    build,
)

Parameters = ParamSpec("Parameters")


def with_arguments_of(
    optimizer: Callable[Parameters, Optimizer],
    without: tuple[str, ...] = (),
    **defaults: Any,
) -> Callable[[Callable[..., ChainTail]], Callable[Parameters, Optimizer]]:
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

    def decorate(
        arrangement: Callable[..., ChainTail],
    ) -> Callable[Parameters, Optimizer]:
        _, *own = inspect.signature(arrangement).parameters.values()
        signature = inherited.replace(parameters=[*kept, *own])

        def built(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Optimizer:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            added = {p.name: as_python_scalar(p.name, given.pop(p.name)) for p in own}
            return build(
                functools.partial(arrangement, **added),
                Hyperparameters(**fixed, **given),
            )

        functools.update_wrapper(built, arrangement)
        built.__signature__ = signature  # type: ignore[attr-defined]
        return _checks.suggests_arguments(built)

    return decorate
