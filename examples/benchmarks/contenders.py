"""The optimizers that are compared: the same mathematics, up to their coefficients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import family, muon, orscale

NS_STEPS = 5
MARIN = "marin.grug_muon"


def last_two_axes(params: Any) -> Any:
    """Dimension numbers of leaves that all are matrices, or batches of them."""
    return jax.tree.map(lambda p: Dims(p.ndim - 2, p.ndim - 1), params)


def step_of(optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any]]:
    """A step from parameters, state and gradients to the new ones of the first two."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def contenders(
    numbers: Any,
    ns_dtype: DTypeLike | None,
    param_shardings: Any = None,
    slow_axes: Mapping[str, int] | None = None,
) -> dict[str, optax.GradientTransformation]:
    """AdamW, Optax's Muon, the two optimizers of this library and relatives, by name.

    Args:
      numbers: Dimension numbers, as all of them take them.
      ns_dtype: The dtype of our products; Optax multiplies in the gradients'.
      param_shardings: As of orscale, on Auto axes; not of the relatives.
      slow_axes: Likewise.
    """
    ours: dict[str, Any] = {
        "weight_dimension_numbers": numbers,
        "ns_steps": NS_STEPS,
        "ns_dtype": ns_dtype,
    }
    where = {"param_shardings": param_shardings, "slow_axes": slow_axes}
    return {
        "optax.adamw": optax.adamw(1e-3, weight_decay=0.1),
        "optax.contrib.muon": optax.contrib.muon(
            1e-3,
            ns_steps=NS_STEPS,
            weight_decay=0.1,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=numbers,
        ),
        "muon": muon(1e-3, **ours, **where),
        "orscale": orscale(1e-3, **ours, **where),
        "hyperball": family.hyperball(1e-3, **ours),
        "normuon": family.normuon(1e-3, **ours),
        "orscale_on_normuon": family.orscale_on_normuon(1e-3, **ours),
        "int8_momentum": orscale(1e-3, mu_dtype="int8", **ours),
        "aurora": family.aurora(1e-3, **ours),
    }


def installed_peers() -> dict[str, optax.GradientTransformation]:
    """marin's Muon for plain arrays, which multiplies in bfloat16, if it is installed.

    It is what marin's configuration builds, with Jordan's coefficients and the scale and
    decay of the others, without the last stage, which needs a mesh.
    """
    try:
        from levanter.optim.grugmuon import _grug_scale_with_muon as scale_by_grug_muon
    except ImportError:
        return {}
    direction = scale_by_grug_muon(
        steps=NS_STEPS, use_kimi_scaling=True, coefficient_type="simple"
    )
    return {
        MARIN: optax.chain(direction, optax.add_decayed_weights(0.1), optax.scale(-1e-3))
    }
