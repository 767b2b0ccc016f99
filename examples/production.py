"""Two published recipes with stages of their own: modded-nanogpt and marin.

They are for the model of ``docs/recipes.md``, which names the sources.

`modded_nanogpt` differs from the code, which we read, in these points:

- NorMuon keeps the norm of Q in both. The code divides along the longer axis, and the
  call by output neurons.
- The decay is cautious in both: 1.2 times the square of the rate. In the call, the scale
  does not multiply the decay.
- The code stores the second matrix of the MLP as (4d, d), with a scale of 2 and twice the
  rate. The call has four times the rate, because its scale is 1.
- In the code, Adam has a rate, β and decay for each parameter, and takes every other
  step. The call has one rate, one β and no decay.

`marin`: MuonH trains the matrices of attention and experts, AdamH trains the head at the
same rate, and Adam trains embedding, router, gates and norms. We read: momentum 0.95 with
Nesterov's term, five steps of "quintic" (here ``"dion"``), rates of 0.003291 and
0.000759, β = (0.9, 0.95), ε = 6.04e-15, a linear schedule with 1 % of warm-up down to
5 %, no clipping, and no decay of parameters that keep their norm. The decay of Adam's
other parameters is not known, and the call has 0. marin keeps the norm of the step
before, and this library keeps the first norm. The coefficients are in
``lib/levanter/src/levanter/optim/util.py`` at 054a715.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers as Dims

from orscale_jax import BlockDimensionNumbers, by_path, family

Tx: TypeAlias = optax.GradientTransformationExtraArgs | optax.GradientTransformation
Schedule: TypeAlias = Callable[[jax.Array], jax.Array]

_RULES = {
    "query|key|value": Dims(0, (1, 2)),  # (inputs, heads, features)
    r"attention\.out": Dims((0, 1), 2),  # (heads, features, outputs)
    "router": "adamw",
    "experts": Dims(-2, -1),  # (experts, inputs, outputs)
}
PAIRS = BlockDimensionNumbers(0, (1, 2), block_axis=1, blocks=2)  # Of four heads.
HEAD_PAIRS = by_path({"query|key": PAIRS} | _RULES)
WITH_HEAD = by_path(_RULES | {"lm_head": "matrix"})


def modded_nanogpt(rate: Schedule) -> Tx:
    """NorMuon with cautious decay; `rate` is the schedule of the matrices, from 0.023."""
    adam_rate = 0.008 / 0.023  # relative to the rate of matrices
    direction = family.normuon(
        1.0,
        b2=0.9,
        norm="kept",
        scale_mode="shape_scaling",
        weight_decay=0.0,
        adam_learning_rate=adam_rate,
        adam_eps=1e-10,
        weight_dimension_numbers=HEAD_PAIRS,
    )
    return optax.chain(
        direction,
        optax.scale(-1),  # from a step to a direction: decay is added before the rate
        cautious(optax.add_decayed_weights(lambda step: 1.2 * rate(step))),
        optax.scale_by_learning_rate(rate),
        optax.stateless(down_takes_larger_steps),
    )


def cautious(decay: Tx) -> Tx:
    """Decay only the entries that the update shrinks."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, updates)
        decayed, state = decay.update(zeros, state, params)
        agree = jax.tree.map(
            lambda u, d: jnp.sign(u) * jnp.sign(d) >= 0, updates, decayed
        )
        both = jax.tree.map(
            lambda a, u, d: jnp.where(a, u + d, u), agree, updates, decayed
        )
        return both, state

    return optax.GradientTransformation(decay.init, update)


def down_takes_larger_steps(updates: Any, params: Any) -> Any:
    """And decays more."""

    def scaled(path: Any, update: jax.Array) -> jax.Array:
        return 4 * update if "down" in jax.tree_util.keystr(path) else update

    return jax.tree.map_with_path(scaled, updates)


def marin(rate: Schedule) -> Tx:
    """MuonH, and AdamH for the head; `rate` is relative, 0.003291 at its peak."""

    def adam_rate(step: jax.Array) -> jax.Array:
        return 3 / 13 * rate(step)

    muonh = family.hyperball(
        rate,
        ns_coeffs="dion",
        adam_learning_rate=adam_rate,
        adam_eps=6.04e-15,
        weight_decay=0.0,
        weight_dimension_numbers=WITH_HEAD,
    )
    adamh = optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=6.04e-15),
        keep_norm(optax.scale_by_learning_rate(rate)),
    )
    return optax.partition({"others": muonh, "head": adamh}, head_or_others)


def keep_norm(learning_rate: Tx) -> Tx:
    """Hyperball's step, for arrays that are one matrix each."""

    def scaled(norm: jax.Array, x: jax.Array) -> jax.Array:
        return norm * x / jnp.linalg.norm(x)

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.linalg.norm, params), learning_rate.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norms, inner = state
        updates = jax.tree.map(scaled, norms, updates)
        steps, inner = learning_rate.update(updates, inner, params)
        moved = jax.tree.map(lambda n, w, s: scaled(n, w + s) - w, norms, params, steps)
        return moved, (norms, inner)

    return optax.GradientTransformation(init, update)


def head_or_others(params: Any) -> Any:
    return {name: "head" if name == "lm_head" else "others" for name in params}
