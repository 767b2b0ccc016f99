"""The ratio of the ablations: measured on another input, or with c in bfloat16."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.transforms.anchors import not_one
from orscale_jax.transforms.trust_ratio import MEASURED
from orscale_jax.trees.boxes import PyTree


class _AroundState(NamedTuple):
    """States of the ratio and of the transformation inside it."""

    ratio: optax.OptState
    inner: optax.OptState


def around(
    inner: optax.GradientTransformation,
    ratio: optax.GradientTransformation,
    rescaled: Callable[[PyTree], PyTree] = lambda tree: tree,
) -> optax.GradientTransformation:
    """Scale the output of ``inner`` by the ratio of the rescaled weights and input."""
    ratio = optax.with_extra_args_support(ratio)

    def init(params: PyTree) -> _AroundState:
        return _AroundState(ratio.init(params), inner.init(params))

    def update(
        updates: PyTree, state: _AroundState, params: PyTree | None = None
    ) -> tuple[PyTree, _AroundState]:
        measured = rescaled(params), rescaled(updates)
        directions, inner_state = inner.update(updates, state.inner, params)
        scaled, ratio_state = ratio.update(
            directions, state.ratio, params, **{MEASURED: measured}
        )
        return scaled, _AroundState(ratio_state, inner_state)

    return optax.GradientTransformation(init, update)


def over_root_of_size(axes: MatrixAxes, leaf: jax.Array) -> jax.Array:
    """Matrices whose Frobenius norms are the root mean squares of the given ones."""
    size = jnp.asarray(axes.by_shape(operator.mul, leaf), leaf.dtype)
    return leaf / jnp.sqrt(size)


def calibrated_in_bfloat16(
    ratio: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """The ratio with a c that is anchored on rounded matrices, and rounded itself."""
    ratio = optax.with_extra_args_support(ratio)
    # Unlike a pair of casts, which XLA may remove, reduce_precision always rounds.
    rounded = functools.partial(
        jax.tree.map,
        functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7),
    )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        measured = rounded(params), rounded(updates)
        _, anchored = ratio.update(
            updates, state, params, **extra_args, **{MEASURED: measured}
        )
        c = jax.tree.map(not_one, rounded(anchored.calibration))
        return ratio.update(
            updates, anchored._replace(calibration=c), params, **extra_args
        )

    return optax.GradientTransformationExtraArgs(ratio.init, update)
