"""Momentum of several timescales: a weighted sum of exponential averages."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from orscale_jax import validate
from orscale_jax.parameters.dimension_numbers import WeightDimensionNumbers
from orscale_jax.sharding import typed_sharding
from orscale_jax.transforms.matrices import Matrices, compute_dtype, on_matrices
from orscale_jax.transforms.momentum import Int8TraceState, is_int8, momentum_stage
from orscale_jax.trees.boxes import PyTree

Numbers: TypeAlias = Sequence[ArrayLike] | Callable[[jax.Array], Sequence[ArrayLike]]


class MixedEMAsState(NamedTuple):
    """State of :func:`mixed_emas`."""

    #: The number of steps, int32.
    steps: jax.Array
    #: A state for each average, which is Optax's ``TraceState`` or an
    #: :class:`Int8TraceState`.
    averages: tuple[optax.TraceState | Int8TraceState, ...]


def mixed_emas(
    decays: Numbers,
    weights: Numbers,
    *,
    gradient_share: optax.ScalarOrSchedule = 0.05,
    mu_dtype: DTypeLike | None = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Momentum of several timescales: a weighted sum of exponential averages.

    .. math::

      M_k \leftarrow \beta_k M_k + (1 - \beta_k) G, \qquad
      \tilde M = (1 - \gamma) \sum_k w_k M_k + \gamma G.

    With a single average and :math:`\gamma = 1 - \beta`, Q is that of Nesterov's
    momentum.

    Args:
      decays: :math:`\beta_k` in [0, 1) for each average, or a function from the number of
        the step, which starts at 0, to all of them. Averages whose decays have been equal
        so far are equal.
      weights: :math:`w_k` for each average, or such a function.
      gradient_share: :math:`\gamma` in [0, 1), or a schedule.
      mu_dtype: The dtype of the averages in the state. See :func:`orscale`.
      weight_dimension_numbers: See :func:`orscale`.

    Returns:
      A transformation with :class:`MixedEMAsState`. Updates keep their shapes and dtypes.

    Raises:
      ValueError: If an argument is not valid, or a leaf is not a matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import mixed_emas
      >>> stage = mixed_emas((0.5, 0.75), (0.4, 0.6), gradient_share=0.0)
      >>> grads = {"kernel": jnp.ones((2, 2))}
      >>> updates, _ = stage.update(grads, stage.init(grads))
      >>> print(updates["kernel"][0, 0])  # 0.4 · 0.5 + 0.6 · 0.25
      0.35

    References:
      Bi-Maxwell and K-Maxwell momentum: https://github.com/KellerJordan/modded-nanogpt,
      pull requests 340 and 357.
    """
    validate.number("gradient_share", gradient_share, at_least=0, below=1, schedule=True)
    if not is_int8(mu_dtype):
        validate.dtype("mu_dtype", mu_dtype, also='"int8" ')

    def at(numbers: Any, count: ArrayLike) -> Any:
        return numbers(jnp.asarray(count)) if callable(numbers) else numbers

    number_of_averages = len(at(decays, 0))
    if len(at(weights, 0)) != number_of_averages:
        validate.refuse("weights", weights, f"pass {number_of_averages}, as of decays")
    for decay in () if callable(decays) else decays:
        validate.number("decays", decay, at_least=0, below=1)

    def stage(matrices: Matrices) -> optax.GradientTransformation:
        def average(decay: ArrayLike) -> optax.GradientTransformation:
            return momentum_stage(decay, False, mu_dtype, matrices)

        def init(params: PyTree) -> MixedEMAsState:
            averages = (average(0.0).init(params) for _ in range(number_of_averages))
            return MixedEMAsState(jnp.zeros((), jnp.int32), tuple(averages))

        def update(
            updates: PyTree, state: MixedEMAsState, params: PyTree | None = None
        ) -> tuple[PyTree, MixedEMAsState]:
            dtype, averages = compute_dtype(updates), []
            share = jnp.asarray(at(gradient_share, state.steps), dtype)
            mixed = optax.tree.scale(share, updates)
            pairs = zip(at(decays, state.steps), at(weights, state.steps), strict=True)
            for (decay, weight), before in zip(pairs, state.averages, strict=True):
                decay, weight = (jnp.asarray(x, dtype) for x in (decay, weight))
                new = optax.tree.scale(1 - decay, updates)
                m, after = average(decay).update(new, before)
                m = jax.tree.map(typed_sharding.shard_like, m, mixed)
                mixed = optax.tree.add_scale(mixed, (1 - share) * weight, m)
                averages.append(after)
            return mixed, MixedEMAsState(state.steps + 1, tuple(averages))

        return optax.GradientTransformation(init, update)

    return on_matrices(weight_dimension_numbers, stage)
