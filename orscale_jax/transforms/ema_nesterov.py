"""EMA-Nesterov: gradients are taken ahead of the weights, along an average of steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.trees.boxes import PyTree
from orscale_jax.trees.checks import require_shapes
from orscale_jax.trees.nodes import nodes_of


class EMANesterovState(NamedTuple):
    """State of :func:`ema_nesterov`."""

    #: The number of steps, int32.
    steps: jax.Array
    #: :math:`\beta` of the parameters, a scalar of JAX's default float.
    lookahead: jax.Array
    #: The average step m, in a tree like the parameters, of dtype float32 or wider.
    average: PyTree
    #: The state of the inner optimizer.
    inner_state: optax.OptState


def ema_nesterov(
    inner: optax.GradientTransformation,
    lookahead: optax.ScalarOrSchedule,
    *,
    decay: ArrayLike = 0.99,
) -> optax.GradientTransformationExtraArgs:
    r"""Take gradients ahead of the weights, along an average of an optimizer's steps.

    .. math::

      \theta_{t+1} &= \mathcal{A}(\theta_t + \beta_t m_t), \\
      m_{t+1} &= \gamma m_t + (1 - \gamma) (\theta_{t+1} - \theta_t),

    where :math:`\mathcal{A}` takes a step of the optimizer. The parameters of the
    training loop are :math:`\theta_t + \beta_t m_t`. :func:`without_lookahead` gives
    :math:`\theta_t`, to evaluate and to export.

    Args:
      inner: The whole optimizer, such as ``muon(1e-3)``. :func:`keep_master_weights` goes
        around this wrapper, not into it.
      lookahead: :math:`\beta_t`, at least 0: a number, or a schedule of the number of the
        step, which starts at 0.
      decay: :math:`\gamma` in [0, 1).

    Returns:
      A transformation with :class:`EMANesterovState`. Updates have the dtypes of those of
      ``inner``.

    Raises:
      ValueError: If an argument is not valid, or, from ``update``, if ``params`` is
        missing, or a gradient or an average has another shape than its parameter.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from orscale_jax import ema_nesterov, without_lookahead
      >>> optimizer = ema_nesterov(optax.sgd(1.0), 0.5, decay=0.75)
      >>> params = {"w": jnp.ones(1)}
      >>> updates, state = optimizer.update(params, optimizer.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(params["w"], without_lookahead(state, params)["w"])  # 0.5 · 0.25 ahead
      [-0.125] [0.]

    References:
      Yau et al. 2026, *EMA-Nesterov*, arXiv:2605.25395.
    """
    validate.transformation("inner", inner)
    validate.number("lookahead", lookahead, at_least=0, schedule=True)
    validate.number("decay", decay, at_least=0, below=1)
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> EMANesterovState:
        def zeros(x: jax.Array) -> jax.Array:
            return jnp.zeros_like(x, jnp.promote_types(jnp.result_type(x), jnp.float32))

        steps, average = jnp.zeros((), jnp.int32), jax.tree.map(zeros, params)
        return EMANesterovState(steps, jnp.zeros(()), average, inner.init(params))

    def update(
        updates: PyTree,
        state: EMANesterovState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, EMANesterovState]:
        require_shapes(updates, params)
        require_shapes(state.average, params, "average step in the state")
        moves, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        steps = state.steps + 1
        beta = lookahead(steps) if callable(lookahead) else lookahead
        beta = jnp.asarray(beta, state.lookahead.dtype)

        def averaged(m: jax.Array, move: jax.Array) -> jax.Array:
            gamma, before = (jnp.asarray(x, m.dtype) for x in (decay, state.lookahead))
            return gamma * m + (1 - gamma) * (move + before * m)

        def ahead(m: jax.Array, move: jax.Array) -> jax.Array:
            return (move + beta.astype(m.dtype) * m).astype(move.dtype)

        average = jax.tree.map(averaged, state.average, moves)
        state = EMANesterovState(steps, beta, average, inner_state)
        return jax.tree.map(ahead, average, moves), state

    return optax.GradientTransformationExtraArgs(init, update)


def without_lookahead(state: optax.OptState, params: PyTree) -> PyTree:
    """Return the weights of :func:`ema_nesterov` without its lookahead.

    Args:
      state: A state with one :class:`EMANesterovState` in it, at any depth.
      params: The parameters of the same step.

    Returns:
      The weights, in a tree like ``params`` with its dtypes.

    Raises:
      ValueError: If there is not one :class:`EMANesterovState` in the state, or it is of
        parameters of other shapes.
    """
    states = nodes_of(state, EMANesterovState)
    if len(states) != 1:
        raise ValueError(
            f"the state has {len(states)} EMANesterovState instead of one: pass the "
            "state of one optimizer of ema_nesterov, and then the parameters."
        )
    beta, average = states[0].lookahead, states[0].average
    require_shapes(average, params, "average step in the state")
    return jax.tree.map(
        lambda x, m: (x - beta.astype(m.dtype) * m).astype(x.dtype), params, average
    )
