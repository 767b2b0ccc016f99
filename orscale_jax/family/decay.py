"""OrScale that decays only the entries that the update shrinks."""

from __future__ import annotations  # help() shows the names of types.

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from orscale_jax.arguments import OrScaleArguments, takes
from orscale_jax.optimizers import Stages, build, orscale_chain
from orscale_jax.transforms.matrices import Optimizer
from orscale_jax.trees.boxes import PyTree


@takes(OrScaleArguments)
def cautious(h: OrScaleArguments) -> Optimizer:
    r"""OrScale that decays only the entries that the update shrinks.

    .. math::

      D = \lambda \, \mathbf{1}[Q \odot W \geq 0] \odot W + sQ.

    The decay stays coupled: r is measured on this D and scales it. Its ceiling rises from
    :math:`1 / (c \lambda)` to :math:`\|W\| / (c \lambda \|W_+\|)`, with :math:`W_+` the
    entries that decay: by about :math:`\sqrt 2` where half of them do. AdamW's decay is
    unchanged.

    Returns:
      An optimizer. With ``r_min=1, r_max=1`` it is Muon with cautious decay.

    Example:
      >>> import jax.numpy as jnp
      >>> from orscale_jax import family
      >>> optimizer = family.cautious(
      ...     1.0, consistent_rms=None, weight_decay=0.5, ns_steps=8
      ... )
      >>> params = {"kernel": 4 * jnp.eye(2)}
      >>> grads = {"kernel": jnp.diag(jnp.array([1.0, -1.0]))}  # Down and up.
      >>> updates, _ = optimizer.update(grads, optimizer.init(params), params)
      >>> print(jnp.diag(updates["kernel"]).round(1))
      [-3.  1.]

    References:
      Chen et al. 2025, *Cautious Weight Decay*, arXiv:2510.12402.
    """

    def chain(s: Stages) -> optax.GradientTransformation:
        decay = cautious_stage(s.add_decayed_weights)
        return orscale_chain(dataclasses.replace(s, add_decayed_weights=decay))

    return build(chain, h)


def cautious_stage(decay: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply ``decay``, but not where its sign is opposite to the update's."""

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, Any]:
        zeros = jax.tree.map(jnp.zeros_like, updates)
        decayed, state = decay.update(zeros, state, params)
        # Signs, since the product of two numbers may underflow or overflow.
        added = jax.tree.map(
            lambda u, d: jnp.where(jnp.sign(u) * jnp.sign(d) >= 0, u + d, u),
            updates,
            decayed,
        )
        return added, state

    return optax.GradientTransformation(decay.init, update)
