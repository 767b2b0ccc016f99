"""The cross-entropy of a language model, also where all logits would be too many."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from optax import softmax_cross_entropy_with_integer_labels


def cross_entropy(
    hidden_BxTxD: jax.Array,
    head: Callable[[jax.Array], jax.Array] | jax.Array,
    targets_BxT: jax.Array,
    chunks: int = 1,
) -> jax.Array:
    """Mean over all positions, in nats per token.

    The head is a function from the hidden states to logits or, for several chunks, its
    matrix (D, V). Chunks are parts of the vocabulary whose logits exist one after
    another, in the backward pass, too. They divide the vocabulary.
    """
    if callable(head):
        logits_BxTxV = head(hidden_BxTxD)
        narrow = logits_BxTxV.dtype.itemsize == 2
        losses_of = of_narrow if narrow else softmax_cross_entropy_with_integer_labels
        return losses_of(logits_BxTxV, targets_BxT).mean()
    return _chunked(hidden_BxTxD, head, targets_BxT, chunks).mean()


@jax.custom_vjp
def of_narrow(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """The cross-entropy at each position of logits in 16 bits, with sums in float32.

    Automatic differentiation would keep a copy of all logits in float32.
    """
    return _with_sums(logits_BxTxV, targets_BxT)[0]


def _with_sums(
    logits_BxTxV: jax.Array, targets_BxT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    largest_BxTx1 = logits_BxTxV.max(-1, keepdims=True).astype(jnp.float32)
    shifted_BxTxV = logits_BxTxV.astype(jnp.float32) - largest_BxTx1
    sum_BxTx1 = jnp.exp(shifted_BxTxV).sum(-1, keepdims=True)
    is_target_BxTxV = jnp.arange(logits_BxTxV.shape[-1]) == targets_BxT[..., None]
    target_BxT = jnp.where(is_target_BxTxV, shifted_BxTxV, 0).sum(-1)
    losses_BxT = jnp.log(sum_BxTx1)[..., 0] - target_BxT
    return losses_BxT, (logits_BxTxV, targets_BxT, largest_BxTx1, sum_BxTx1)


def _gradient(
    kept: tuple[jax.Array, ...], gradient_BxT: jax.Array
) -> tuple[jax.Array, None]:
    logits_BxTxV, targets_BxT, largest_BxTx1, sum_BxTx1 = kept
    gradient_BxTx1 = gradient_BxT[..., None]
    power_BxTxV = jnp.exp(logits_BxTxV.astype(jnp.float32) - largest_BxTx1)
    is_target_BxTxV = jnp.arange(logits_BxTxV.shape[-1]) == targets_BxT[..., None]
    found_BxTxV = power_BxTxV * (gradient_BxTx1 / sum_BxTx1)
    found_BxTxV -= jnp.where(is_target_BxTxV, gradient_BxTx1, 0)
    return found_BxTxV.astype(logits_BxTxV.dtype), None


of_narrow.defvjp(_with_sums, _gradient)


def _chunked(
    hidden_BxTxD: jax.Array, head_DxV: jax.Array, targets_BxT: jax.Array, chunks: int
) -> jax.Array:
    D, V = head_DxV.shape
    if V % chunks:
        raise ValueError(
            f"loss_chunks={chunks} does not divide a vocabulary of {V}: choose one that "
            "does"
        )
    # Chunk c has the tokens v with v % C = c: where the vocabulary is sharded, every
    # device has its part of each.
    head_CxDxW = jnp.moveaxis(head_DxV.reshape(D, V // chunks, chunks), 2, 0)
    precise = jnp.promote_types(jnp.float32, hidden_BxTxD.dtype)

    @jax.checkpoint
    def chunk(
        carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        sum_BxT, target_BxT = carry  # Both are logarithms.
        index, head_DxW = inputs
        logits_BxTxW = jnp.einsum(
            "btd,dw->btw", hidden_BxTxD, head_DxW, preferred_element_type=precise
        )
        here_BxT = targets_BxT % chunks == index
        is_target_BxTxW = jnp.arange(V // chunks) == (targets_BxT // chunks)[..., None]
        is_target_BxTxW &= here_BxT[..., None]
        target_BxT += jnp.sum(jnp.where(is_target_BxTxW, logits_BxTxW, 0), axis=-1)
        sum_BxT = jnp.logaddexp(sum_BxT, jax.nn.logsumexp(logits_BxTxW, axis=-1))
        return (sum_BxT, target_BxT), None

    start = jnp.full(targets_BxT.shape, -jnp.inf, precise)
    (sum_BxT, target_BxT), _ = jax.lax.scan(
        chunk, (start, jnp.zeros_like(start)), (jnp.arange(chunks), head_CxDxW)
    )
    return sum_BxT - target_BxT
