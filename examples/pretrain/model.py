"""A GPT-2-style decoder: RMSNorm, rotary positions, ReLU² MLP, tied embeddings.

No biases. Weights start from Flax's defaults: normal, scaled by fan-in, as in the paper.

Suffixes of array names: B sequences, T positions, D width, N heads, H width of a head,
F width of the MLP, V vocabulary.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

ROTARY_BASE = 10_000.0


class Decoder(nnx.Module):
    """A causal language model: tokens to logits of the token that follows each."""

    def __init__(
        self, *, vocab_size: int, width: int, layers: int, heads: int, rngs: nnx.Rngs
    ):
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.final_norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x_BxTxD = self.embed(tokens_BxT)
        for block in self.blocks:
            x_BxTxD = block(x_BxTxD)
        return self.embed.attend(self.final_norm(x_BxTxD))


class Block(nnx.Module):
    """Attention, then MLP, each on a normed copy and added to the stream."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.mlp = Mlp(width, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        return x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))


class Attention(nnx.Module):
    """Causal self-attention with rotary positions.

    Query, key, value and output are four matrices, not one fused (D, 3D): what an
    optimizer orthogonalizes, and gives one trust ratio, is a matrix of the mathematics.
    """

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        B, T, D = x_BxTxD.shape
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = (
            project(x_BxTxD).reshape(B, T, self.heads, D // self.heads)
            for project in (self.query, self.key, self.value)
        )
        mixed_BxTxNxH = jax.nn.dot_product_attention(
            rotate(q_BxTxNxH), rotate(k_BxTxNxH), v_BxTxNxH, is_causal=True
        )
        return self.out(mixed_BxTxNxH.reshape(B, T, D))


class Mlp(nnx.Module):
    """ReLU² between two matrices, four times as wide as the stream."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        h_BxTxF = jnp.square(jax.nn.relu(self.up(x_BxTxD)))
        return self.down(h_BxTxF)


def rotate(x_BxTxNxH: jax.Array) -> jax.Array:
    """Rotary positions: turn each pair of features by an angle that grows with position.

    The product of a rotated query and a rotated key then depends on where they stand
    only through their distance.
    """
    T, H = x_BxTxNxH.shape[1], x_BxTxNxH.shape[3]
    dtype = x_BxTxNxH.dtype
    frequency_1xP = ROTARY_BASE ** -jnp.linspace(0, 1, H // 2, endpoint=False)[None, :]
    angle_TxP = jnp.arange(T, dtype=jnp.float32)[:, None] * frequency_1xP
    cos_1xTx1xP, sin_1xTx1xP = (
        f(angle_TxP).astype(dtype)[None, :, None, :] for f in (jnp.cos, jnp.sin)
    )
    a_BxTxNxP, b_BxTxNxP = jnp.split(x_BxTxNxH, 2, axis=-1)
    return jnp.concatenate(
        [
            a_BxTxNxP * cos_1xTx1xP - b_BxTxNxP * sin_1xTx1xP,
            a_BxTxNxP * sin_1xTx1xP + b_BxTxNxP * cos_1xTx1xP,
        ],
        axis=-1,
    )


def cross_entropy(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """Mean over all positions, in nats per token."""
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxTxV, targets_BxT
    )
    return losses_BxT.mean()
