"""The loss of a decoder and its gradient, as functions of parameters and tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.pretrain.loss import cross_entropy


def loss_of(graph: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """The mean loss in nats per token; tokens are (sequences, positions)."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        hidden = model.hidden(tokens[:, :-1])
        return cross_entropy(hidden, model.logits, tokens[:, 1:])

    return loss


def gradient_of(graph: Any) -> Callable[[Any, jax.Array], Any]:
    """The gradient as a function of parameters and tokens.

    Tokens are (batches, sequences, positions), and are taken a batch at a time.
    """
    loss = loss_of(graph)

    @jax.jit
    def gradient(params: Any, tokens: jax.Array) -> Any:
        def share(params: Any, batch: jax.Array) -> jax.Array:
            return loss(params, batch) / len(tokens)

        def add(grads: Any, batch: jax.Array) -> tuple[Any, None]:
            found = jax.grad(share)(params, batch)
            return jax.tree.map(jnp.add, grads, found), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, tokens)[0]

    return gradient
