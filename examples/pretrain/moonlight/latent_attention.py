"""Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), without query rank."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from examples.pretrain.models.layers import (
    causal_mixture,
    linear,
    rms_norm,
    rotate,
)
from examples.pretrain.models.sharding import constrain
from examples.pretrain.moonlight.config import MoonlightConfig


class LatentAttention(nnx.Module):
    """Causal attention whose keys and values come from one narrow latent.

    A query and a key have a part with a position, P wide, and one without, H wide. The
    heads share the keys' part with a position.
    """

    def __init__(self, config: MoonlightConfig, rngs: nnx.Rngs):
        self.config = config
        width, N, R = config.width, config.heads, config.kv_rank
        H, P, U = config.nope_dim, config.rope_dim, config.value_dim
        self.query = linear(width, N * (H + P), ("embed", "heads"), config, rngs)
        self.kv_down = linear(width, R + P, ("embed", "kv"), config, rngs)
        self.kv_norm = rms_norm(R, config, rngs)
        self.kv_up = linear(R, N * (H + U), ("kv", "heads"), config, rngs)
        self.out = linear(N * U, width, ("heads", "embed"), config, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        config = self.config
        H, P, base = config.nope_dim, config.rope_dim, config.rope_base
        q_BxTxNxH, qp_BxTxNxP = jnp.split(self._heads(self.query(x_BxTxD)), [H], axis=-1)
        latent_BxTxR, kp_BxTxP = jnp.split(
            self.kv_down(x_BxTxD), [config.kv_rank], axis=-1
        )
        up_BxTxNxI = self._heads(self.kv_up(self.kv_norm(latent_BxTxR)))
        k_BxTxNxH, v_BxTxNxU = jnp.split(up_BxTxNxI, [H], axis=-1)
        qp_BxTxNxP = rotate(qp_BxTxNxP, base)
        kp_BxTxP = rotate(kp_BxTxP[:, :, None, :], base)[:, :, 0, :]

        product = functools.partial(
            jnp.einsum, preferred_element_type=config.precise_dtype
        )
        scores_BxNxTxS = product("btnh,bsnh->bnts", q_BxTxNxH, k_BxTxNxH)
        scores_BxNxTxS += product("btnp,bsp->bnts", qp_BxTxNxP, kp_BxTxP)
        mixed_BxTxNxU = causal_mixture(scores_BxNxTxS * (H + P) ** -0.5, v_BxTxNxU)
        return self.out(mixed_BxTxNxU.reshape(*x_BxTxD.shape[:2], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], self.config.heads, -1)
        return constrain(x, "batch", "length", "heads", None)
