"""The paper's dense decoder: RMSNorm, rotary positions, ReLU², no biases."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from examples.pretrain.models.attention import causal_attention
from examples.pretrain.models.layers import (
    Block,
    LayerConfig,
    Relu2Mlp,
    embedding,
    linear,
    look_up,
    rms_norm,
    rotate,
    run,
    stack,
)
from examples.pretrain.models.sharding import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(LayerConfig):
    """The sizes of a dense decoder."""

    # Tokens that there are.
    vocab_size: int = 50_304
    # Features of a token.
    width: int
    # Blocks of attention and MLP.
    layers: int
    # Heads of attention, which share the width.
    heads: int
    # Query, key and value in one matrix (width, 3·width), as in the paper, or in three.
    fused_qkv: bool = True

    def __post_init__(self) -> None:
        self.check_sizes("vocab_size", "width", "layers", "heads")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} with heads={self.heads}: the width has to be an "
                "even multiple of the heads: rotary positions turn pairs of features"
            )

    @property
    def attention_features(self) -> tuple[int, int]:
        """Of a head's queries and keys, and of its values."""
        return self.width // self.heads, self.width // self.heads


# The paper gives the names of its models. The sizes are those of its public code, from
# 399M on Moonlight's (arXiv:2502.16982, table 2).
PRESETS = {
    "125m": DenseConfig(width=768, layers=12, heads=12),
    "399m": DenseConfig(width=1536, layers=12, heads=12),
    "545m": DenseConfig(width=1792, layers=14, heads=14),
    "1.1b": DenseConfig(width=2304, layers=18, heads=18),
}


class Dense(nnx.Module):
    """A causal language model: tokens to logits of the token that follows each.

    The head is the transposed table of embeddings.
    """

    def __init__(self, config: DenseConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = embedding(config.vocab_size, config.width, config, rngs)
        self.blocks = stack(
            lambda rngs: Block(Attention, Relu2Mlp, 4 * config.width, config, rngs),
            config.layers,
            config.scan,
            rngs,
        )
        self.final_norm = rms_norm(config.width, config, rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        return self.logits(self.hidden(tokens_BxT))

    def hidden(self, tokens_BxT: jax.Array) -> jax.Array:
        """The normed states that the head turns into logits."""
        x_BxTxD = self.embedded(tokens_BxT)
        x_BxTxD, _ = run(self.blocks, x_BxTxD, remat=self.config.remat)
        return self.final_norm(x_BxTxD)

    def embedded(self, tokens_BxT: jax.Array) -> jax.Array:
        """The states that the first block is given."""
        return look_up(self.embed, tokens_BxT)

    def logits(self, x_BxTxD: jax.Array) -> jax.Array:
        """The logits of some of the `hidden` states."""
        return constrain(self.embed.attend(x_BxTxD), "batch", "length", "vocab")

    @property
    def head_DxV(self) -> jax.Array:
        """The matrix of the head, for a loss in parts of the vocabulary."""
        return self.embed.embedding[...].T


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: DenseConfig, rngs: nnx.Rngs):
        self.config, width = config, config.width
        if config.fused_qkv:
            self.qkv = linear(width, 3 * width, ("embed", "qkv"), config, rngs)
        else:
            self.query = linear(width, width, ("embed", "heads"), config, rngs)
            self.key = linear(width, width, ("embed", "heads"), config, rngs)
            self.value = linear(width, width, ("embed", "heads"), config, rngs)
        self.out = linear(width, width, ("heads", "embed"), config, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        B, T, D = x_BxTxD.shape
        if self.config.fused_qkv:
            qkv = jnp.split(self.qkv(x_BxTxD), 3, axis=-1)
        else:
            qkv = [project(x_BxTxD) for project in (self.query, self.key, self.value)]
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = (
            constrain(
                x.reshape(B, T, self.config.heads, -1), "batch", "length", "heads", None
            )
            for x in qkv
        )
        q_BxTxNxH, k_BxTxNxH = (
            rotate(x, self.config.rope_base) for x in (q_BxTxNxH, k_BxTxNxH)
        )
        mixed_BxTxNxH = causal_attention([q_BxTxNxH], [k_BxTxNxH], v_BxTxNxH)
        return self.out(mixed_BxTxNxH.reshape(B, T, D))
