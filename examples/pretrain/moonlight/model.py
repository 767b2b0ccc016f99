"""Moonlight (arXiv:2502.16982): latent attention and a mixture of experts."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from examples.pretrain.models.layers import (
    SwigluMlp,
    count_parameters,
    embedding,
    linear,
    look_up,
    rms_norm,
    run,
    stack,
)
from examples.pretrain.models.sharding import constrain
from examples.pretrain.moonlight.config import MoonlightConfig
from examples.pretrain.moonlight.latent_attention import LatentAttention
from examples.pretrain.moonlight.mixture import Experts, Mixture, Routing
from orscale_jax.flax import Weight, nnx_dimension_numbers


class RoutingBias(nnx.Variable):
    """Routing biases: state that :func:`balanced` updates, and no optimizer."""


class Moonlight(nnx.Module):
    """A causal language model: tokens to logits of the token that follows each."""

    def __init__(self, config: MoonlightConfig, rngs: nnx.Rngs):
        self.config, width = config, config.width
        self.embed = embedding(config.vocab_size, width, config, rngs)
        self.dense_blocks = nnx.List(
            [DenseBlock(config, rngs) for _ in range(config.dense_layers)]
        )
        self.blocks = stack(
            lambda rngs: MixtureBlock(config, rngs),
            config.expert_layers,
            config.scan,
            rngs,
        )
        self.final_norm = rms_norm(width, config, rngs)
        self.head = linear(width, config.vocab_size, ("embed", "vocab"), config, rngs)
        bias_LxE = jnp.zeros((config.expert_layers, config.experts), config.precise_dtype)
        self.routing_bias = RoutingBias(
            bias_LxE, out_sharding=("layers", None), eager_sharding=False
        )

    def __call__(self, tokens_BxT: jax.Array) -> tuple[jax.Array, Routing]:
        """The logits, and the routing: fractions (L, E), and the auxiliary loss."""
        x_BxTxD, routing = self.hidden(tokens_BxT)
        return self.logits(x_BxTxD), routing

    def hidden(self, tokens_BxT: jax.Array) -> tuple[jax.Array, Routing]:
        """The normed states that the head turns into logits, and the routing."""
        config, bias_LxE = self.config, self.routing_bias[...]
        x_BxTxD = look_up(self.embed, tokens_BxT)
        x_BxTxD, _ = run(self.dense_blocks, x_BxTxD, remat=config.remat)
        x_BxTxD, routing = run(self.blocks, x_BxTxD, bias_LxE, remat=config.remat)
        routing = Routing(routing.fraction, routing.aux_loss.mean())
        return self.final_norm(x_BxTxD), routing

    def logits(self, x_BxTxD: jax.Array) -> jax.Array:
        """The logits of some of the `hidden` states."""
        return constrain(self.head(x_BxTxD), "batch", "length", "vocab")

    @property
    def head_DxV(self) -> jax.Array:
        """The matrix of the head, for a loss in parts of the vocabulary."""
        return self.head.kernel[...]


class DenseBlock(nnx.Module):
    """Attention, then MLP, each on a normed copy and added to the stream."""

    def __init__(self, config: MoonlightConfig, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config.width, config, rngs)
        self.attention = LatentAttention(config, rngs)
        self.mlp_norm = rms_norm(config.width, config, rngs)
        self.mlp = SwigluMlp(config.width, config.dense_hidden, config, rngs)

    def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, None]:
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        x_BxTxD = x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))
        return constrain(x_BxTxD, "batch", "length", None), None


class MixtureBlock(nnx.Module):
    """The same with a mixture of experts for the MLP."""

    def __init__(self, config: MoonlightConfig, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config.width, config, rngs)
        self.attention = LatentAttention(config, rngs)
        self.mixture_norm = rms_norm(config.width, config, rngs)
        self.mixture = Mixture(config, rngs)

    def __call__(
        self, x_BxTxD: jax.Array, bias_E: jax.Array
    ) -> tuple[jax.Array, Routing]:
        x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD))
        y_BxTxD, routing = self.mixture(self.mixture_norm(x_BxTxD), bias_E)
        return constrain(x_BxTxD + y_BxTxD, "batch", "length", None), routing


def balanced(
    bias_LxE: jax.Array, fraction_LxE: jax.Array, rate: float = 1e-3
) -> jax.Array:
    """The routing biases after a step in which the experts had these shares of tokens.

    An expert with more than its share loses `rate`, one with less gains it (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2). The paper's public code has the opposite sign.
    """
    even = fraction_LxE.mean(axis=-1, keepdims=True)
    return bias_LxE + rate * jnp.sign(even - fraction_LxE)


# Who trains the routers: Muon and its relatives, as in the paper, or AdamW.
ROUTERS = {"matrix": {}, "adamw": {r"\brouter\b": "adamw"}}


def weight_dimension_numbers(
    model: Moonlight,
    router: Literal["matrix", "adamw"] = "matrix",
    per_head: bool = False,
) -> Callable[[Any], Any]:
    """For `orscale` and its relatives: every expert is a matrix, and so is a router.

    With `per_head`, so is each head of attention: its key and its value together.
    """
    if router not in ROUTERS:
        raise ValueError(f"router={router!r}: choose one of {', '.join(ROUTERS)}")
    config = model.config
    sizes = {
        r"\bquery\b": config.nope_dim + config.rope_dim,
        r"\bkv_up\b": config.nope_dim + config.value_dim,
        r"\bout\b": config.value_dim,
    }
    return nnx_dimension_numbers(
        model,
        rules={Experts: _matrices_of_experts},
        overrides=ROUTERS[router],
        head_size=per_head and sizes,
    )


def _matrices_of_experts(experts: Experts) -> dict[str, Weight]:
    config = experts.config
    E, D, F = config.experts, config.width, config.expert_hidden
    inward, outward = Weight((E, D, F), 1, 2), Weight((E, F, D), 1, 2)
    return {"gate": inward, "up": inward, "down": outward}


def count_active_parameters(model: Moonlight) -> int:
    """Parameters that take part for one token, without embeddings and head."""
    config = model.config
    stacks = jax.tree.leaves(
        nnx.state(model, lambda path, _: "experts" in path and "mixture" in path)
    )
    experts = sum(leaf.size for leaf in stacks)
    resting = experts - experts * config.experts_per_token // config.experts
    tables = 2 * config.vocab_size * config.width
    return count_parameters(model) - resting - tables
