"""Checks of hyperparameters, which run when an optimizer is built.

Values that are known only when the program runs (traced values, schedules) pass.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

#: The arguments that may be schedules.
SCHEDULED = ("learning_rate", "weight_decay", "adam_learning_rate", "adam_weight_decay")


def refuse(name: str, value: Any, remedy: str) -> NoReturn:
    """Raise a ValueError with the argument's name, its value and the remedy."""
    raise ValueError(f"{name}={value!r} is not valid: {remedy}.")


def bound(function: str, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
    """Refuse arguments that a function does not take, and schedules for numbers."""
    known = signature.parameters
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        by_name = [name for name, x in known.items() if x.kind is x.KEYWORD_ONLY]
        others = [name for name in known if name not in by_name]
        raise TypeError(
            f"{function}(): {error}: its arguments are {', '.join(others)}, and by name "
            f"{', '.join(by_name)}."
        ) from None
    for name, value in given.items():
        is_number = type(known[name].default) in (int, float)
        if is_number and callable(value) and name not in SCHEDULED:
            required = [n for n, p in known.items() if p.default is p.empty]
            line = ", ".join([*required, f"{name}=schedule"])
            line = f"optax.inject_hyperparams({function})({line})"
            refuse(name, value, f"pass a number, or for a schedule write {line}")


def is_real(dtype: Any) -> bool:
    """Whether a dtype is of real numbers: floating or integer."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))


def is_whole(value: Any) -> bool:
    """Whether a value is one whole number, Python's or NumPy's."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def number(
    name: str,
    value: Any,
    *,
    at_least: float = -np.inf,
    below: float = np.inf,
    infinite: bool = False,
    schedule: bool = False,
    optional: bool = False,
    instead: str = "",
) -> None:
    """Refuse ``value`` unless it is a real scalar in ``[at_least, below)``."""
    not_rounded(name, value)
    if isinstance(value, jax.core.Tracer):
        return
    if (optional and value is None) or (schedule and callable(value)):
        return
    wanted = "a number" + " or a schedule" * schedule + " or None" * optional
    if callable(value):
        wanted += "; optax.inject_hyperparams makes one of a schedule"
    if not _is_real_scalar(value):
        refuse(name, value, f"pass {wanted}")
    number = float(jax.device_get(value))
    if not (at_least <= number < below or (infinite and number == np.inf)):
        interval = f"in [{at_least:g}, {below:g})".replace("[-inf", "(-inf")
        refuse(name, value, f"pass {wanted} {interval}{instead}")


def not_rounded(name: str, value: Any) -> None:
    """Refuse arrays, also traced ones, of a dtype narrower than float32."""
    dtype = getattr(value, "dtype", float)  # In Keras it is a name.
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4:
        raise ValueError(
            f"{name} has dtype {dtype}, which rounds it (0.999 to 1 in bfloat16): pass a "
            "Python number or float32. optax.inject_hyperparams casts hyperparameters to "
            "the dtype of the parameters unless it is given hyperparam_dtype=jnp.float32."
        )


def scheduled(name: str, value: Any) -> Any:
    """A schedule that refuses its values unless they are real scalars; or ``value``."""
    if not callable(value):
        return value

    @functools.wraps(value)
    def checked(*args: Any) -> Any:
        scalar = value(*args)
        if not _is_real_scalar(scalar):
            shape = f", of shape {np.shape(scalar)}" if hasattr(scalar, "shape") else ""
            raise ValueError(
                f"the schedule {name} returned {scalar!r}{shape}: return a real scalar."
            )
        not_rounded(f"the result of the schedule {name}", scalar)
        return scalar

    return checked


def ordered(low_name: str, low: Any, high_name: str, high: Any) -> None:
    """Refuse a pair of bounds whose lower one is the larger."""
    if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
        return
    if float(jax.device_get(low)) > float(jax.device_get(high)):
        raise ValueError(
            f"{low_name}={low} is larger than {high_name}={high}: swap or widen the "
            "bounds."
        )


def count(name: str, value: Any) -> None:
    """Refuse ``value`` unless it is a whole number of at least 1."""
    traced = isinstance(value, jax.core.Tracer)
    if not _is_integer(value) or not (traced or int(jax.device_get(value)) >= 1):
        refuse(name, value, "pass a whole number of at least 1")


def whole(name: str, value: Any) -> int:
    """Convert a whole number to Python's; refuse anything else."""
    if not _is_integer(value):
        refuse(name, value, "pass a whole number")
    return int(jax.device_get(value))


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        refuse(name, value, "pass True or False")


def choice(name: str, value: Any, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        refuse(name, value, f"pass {' or '.join(map(repr, choices))}")


def dtype(name: str, value: Any, *, also: str = "") -> None:
    """Refuse ``value`` unless it is None or a floating dtype of 16 bits or more."""
    # Newton–Schulz diverges in 8 bits, and JAX does not promote such dtypes to others.
    if value is None:
        return
    # jnp.dtype(array) is the array's dtype, but later casts to an array would fail.
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        refuse(
            name,
            value,
            "pass a floating dtype. optax.inject_hyperparams calls jnp.bfloat16 as if it "
            'were a schedule: pass it the name instead ("bfloat16")',
        )
    try:
        known = jnp.dtype(value)
        floating = jnp.issubdtype(known, jnp.floating) and jnp.finfo(known).bits >= 16
    except TypeError:
        floating = False
    if not floating:
        wide = "a floating dtype of 16 bits or more, such as jnp.bfloat16"
        refuse(name, value, f"pass {wide}, {also}or None")
    if jax.dtypes.canonicalize_dtype(value) != jnp.dtype(value):
        refuse(name, value, "enable jax_enable_x64, or pass jnp.float32")


def transformation(name: str, value: Any) -> None:
    """Refuse ``value`` unless it is a transformation of Optax's kind."""
    if not all(callable(getattr(value, each, None)) for each in ("init", "update")):
        raise ValueError(
            f"{name} is of type {type(value).__name__}: pass a gradient transformation, "
            "such as those of Optax. Dimension numbers are an argument of the optimizer: "
            "muon(rate, weight_dimension_numbers=numbers)."
        )


def mesh(name: str, value: Any) -> None:
    if not isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh | None):
        refuse(name, value, "pass a jax.sharding.Mesh, or None")


def slow_axes(name: str, value: Any) -> None:
    """Refuse ``value`` unless it is None, names of axes, or their numbers of slices."""
    if value is None:
        return
    known = isinstance(value, Mapping | Sequence) and not isinstance(value, str)
    counts = value.values() if isinstance(value, Mapping) else ()
    if (
        not known
        or not all(isinstance(axis, str) for axis in value)
        or not all(type(slices) is int and slices > 0 for slices in counts)
    ):
        refuse(
            name,
            value,
            "pass names of axes, such as ('dcn',), or the number of slices along each, "
            "such as {'fsdp': 2}; () if no axis is slow",
        )


def model(name: str, value: Any, kind: type) -> None:
    """Refuse ``value`` unless it is a model of this kind, or a tree of such models."""
    nodes = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, kind))
    if not any(isinstance(node, kind) for node in nodes):
        raise ValueError(
            f"{name} is of type {type(value).__name__}: pass the model itself, an "
            f"instance of {kind.__module__.rpartition('.')[0]}.{kind.__name__}, not its "
            "class, its state or its parameters."
        )


def _is_real_scalar(value: Any) -> bool:
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    return hasattr(value, "dtype") and is_real(value.dtype) and np.ndim(value) == 0


def _is_integer(value: Any) -> bool:
    dtype = getattr(value, "dtype", type(value))
    return _is_real_scalar(value) and jnp.issubdtype(dtype, jnp.integer)
