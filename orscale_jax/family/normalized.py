"""Muon with a Q whose inputs and neurons are divided by their norms."""

from __future__ import annotations  # help() shows the names of types.

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from orscale_jax import validate
from orscale_jax.arguments import MuonArguments, takes
from orscale_jax.optimizers import Stages, build, muon_chain
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.transforms.matrices import Optimizer, broadcast

NEURONS, INPUTS = VECTORS = ("neurons", "inputs")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _MuonPlus(MuonArguments):
    r"""The arguments of :func:`muon_plus`.

    Args:
      order: What is normalized, in this order: ``"neurons"`` or ``"inputs"`` or both,
        each any number of times.
      eps: The floor :math:`\varepsilon` under the root of each norm, at least 0.
    """

    order: Sequence[str] = (INPUTS, NEURONS)
    eps: ArrayLike = 1e-8


@takes(_MuonPlus)
def muon_plus(h: _MuonPlus) -> Optimizer:
    r"""Muon+: Muon that divides the inputs of Q, then its neurons, by their norms.

    Returns:
      An optimizer.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import family
      >>> optimizer = family.muon_plus(1.0, consistent_rms=None, weight_decay=0.0)
      >>> params = {"kernel": jnp.eye(2, 8)}
      >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
      >>> print((-updates["kernel"]).round(3))
      [[1. 0. 0. 0. 0. 0. 0. 0.]
       [0. 1. 0. 0. 0. 0. 0. 0.]]

    References:
      Zhang et al. 2026, arXiv:2602.21545. Its scale is ``scale_mode="unit_rms_norm"``,
      and its momentum has no Nesterov term (``nesterov=False``).
    """
    order = (h.order,) if isinstance(h.order, str) else h.order
    if not isinstance(order, tuple | list) or not order:
        validate.refuse("order", order, "pass 'neurons' or 'inputs' or a list of them")
    for vectors in order:
        validate.choice("order", vectors, VECTORS)
    validate.number("eps", h.eps, at_least=0)

    def normalize(axes: MatrixAxes, x: jax.Array) -> jax.Array:
        for vectors in order:
            each = axes.neurons if vectors == NEURONS else axes.inputs
            square = each.reduce(jnp.sum, jnp.square(x)) + jnp.asarray(h.eps, x.dtype)
            inverse = jax.lax.rsqrt(jnp.where(square == 0, 1, square))
            x = broadcast(each, inverse, x) * x
        return x

    def chain(s: Stages) -> optax.GradientTransformation:
        normalized = optax.stateless(lambda q, _: s.matrices.map(normalize, q))
        q = optax.chain(s.orthogonalize, normalized)
        return muon_chain(dataclasses.replace(s, orthogonalize=q))

    return build(chain, h)
