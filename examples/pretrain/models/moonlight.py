"""Moonlight (arXiv:2502.16982): latent attention and a mixture of experts.

Suffixes of array names are those of `examples.pretrain.models`, and E experts, K experts
of a token. The routing is DeepSeek-V3's (arXiv:2412.19437, section 2.1.2).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from examples.pretrain.models.attention import causal_attention
from examples.pretrain.models.experts import routed
from examples.pretrain.models.layers import (
    Block,
    LayerConfig,
    SwigluMlp,
    count_parameters,
    embedding,
    linear,
    look_up,
    rms_norm,
    rotate,
    run,
    stack,
)
from examples.pretrain.models.sharding import constrain, mesh_axes, named
from orscale_jax.flax import Weight, nnx_dimension_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoonlightConfig(LayerConfig):
    """The sizes of a Moonlight model; those of Moonlight-16B-A3B by default.

    Base of the rotary positions and epsilon of the norms are those of the paper's public
    code; Moonlight's own release has 50,000 and 1e-5.
    """

    # Tokens that there are.
    vocab_size: int = 163_840
    # Features of a token.
    width: int = 2048
    # Blocks of attention and MLP or mixture.
    layers: int = 27
    # Blocks with an MLP, the first ones.
    dense_layers: int = 1
    # Width of the MLP.
    dense_hidden: int = 10_944
    # Heads of attention.
    heads: int = 16
    # Rank of the latent that keys and values are made of.
    kv_rank: int = 512
    # Features of a head's query and key that know no position.
    nope_dim: int = 128
    # Features of a head's query and key that rotary positions turn.
    rope_dim: int = 64
    # Features of a head's value.
    value_dim: int = 128
    # Routed experts of a mixture.
    experts: int = 64
    # Routed experts that a token takes.
    experts_per_token: int = 6
    # Shared experts of a mixture, which every token takes.
    shared_experts: int = 2
    # Width of an expert.
    expert_hidden: int = 1408
    # Factor of the routed experts' weights, whose sum is 1 without it.
    routed_scale: float = 2.446
    # Coefficient of the auxiliary loss that evens out the loads.
    aux: float = 0.0

    def __post_init__(self) -> None:
        self.check_sizes(
            *"vocab_size width dense_hidden heads kv_rank nope_dim rope_dim".split(),
            *"value_dim shared_experts expert_hidden".split(),
        )
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} of layers={self.layers}: at least one "
                "layer has to be a mixture"
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}: choose between 1 and "
                f"experts={self.experts}"
            )
        if self.rope_dim % 2:
            raise ValueError(
                f"rope_dim={self.rope_dim}: rotary positions turn pairs of features; "
                "choose an even number"
            )

    @property
    def attention_features(self) -> tuple[int, int]:
        """Of a head's queries and keys, and of its values."""
        return self.nope_dim + self.rope_dim, self.value_dim

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers


# Weights start as in DeepSeek-V3 and the paper's public code.
MOONLIGHT_16B_A3B = MoonlightConfig(init_std=0.006)


class Routing(NamedTuple):
    """What a training loop wants to know of the routing of a batch."""

    fraction: jax.Array  # Of all assignments that goes to each expert, (E,) for a layer.
    aux_loss: jax.Array  # With its coefficient, to be added to the loss.


class RoutingBias(nnx.Variable):
    """Routing biases: state that :func:`balanced` updates, and no optimizer."""


class Moonlight(nnx.Module):
    """A causal language model: tokens to logits of the token that follows each."""

    def __init__(self, config: MoonlightConfig, rngs: nnx.Rngs):
        self.config, width = config, config.width
        self.embed = embedding(config.vocab_size, width, config, rngs)
        self.dense_blocks = nnx.List(
            Block(LatentAttention, SwigluMlp, config.dense_hidden, config, rngs)
            for _ in range(config.dense_layers)
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


class MixtureBlock(nnx.Module):
    """A `Block` with a mixture of experts for the MLP."""

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
        H, base = config.nope_dim, config.rope_base
        q_BxTxNxH, qp_BxTxNxP = jnp.split(self._heads(self.query(x_BxTxD)), [H], axis=-1)
        latent_BxTxR, kp_BxTxP = jnp.split(
            self.kv_down(x_BxTxD), [config.kv_rank], axis=-1
        )
        up_BxTxNxI = self._heads(self.kv_up(self.kv_norm(latent_BxTxR)))
        k_BxTxNxH, v_BxTxNxU = jnp.split(up_BxTxNxI, [H], axis=-1)
        qp_BxTxNxP = rotate(qp_BxTxNxP, base)
        kp_BxTxP = rotate(kp_BxTxP[:, :, None, :], base)[:, :, 0, :]

        mixed_BxTxNxU = causal_attention(
            [q_BxTxNxH, qp_BxTxNxP], [k_BxTxNxH, kp_BxTxP], v_BxTxNxU
        )
        return self.out(mixed_BxTxNxU.reshape(*x_BxTxD.shape[:2], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], self.config.heads, -1)
        return constrain(x, "batch", "length", "heads", None)


class Mixture(nnx.Module):
    """Routed experts, of which a token chooses some, and shared ones, which all take."""

    def __init__(self, config: MoonlightConfig, rngs: nnx.Rngs):
        self.config, width = config, config.width
        precise = dataclasses.replace(config, dtype=config.precise_dtype)
        self.router = linear(width, config.experts, ("embed", "router"), precise, rngs)
        self.experts = Experts(config, rngs)
        # Shared experts side by side are one MLP of their widths together.
        hidden = config.shared_experts * config.expert_hidden
        self.shared = SwigluMlp(width, hidden, config, rngs)

    def __call__(
        self, x_BxTxD: jax.Array, bias_E: jax.Array
    ) -> tuple[jax.Array, Routing]:
        selected_BxTxK, weight_BxTxK, routing = self.route(x_BxTxD, bias_E)
        y_BxTxD = self.experts(x_BxTxD, selected_BxTxK, weight_BxTxK)
        return y_BxTxD + self.shared(x_BxTxD), routing

    def route(
        self, x_BxTxD: jax.Array, bias_E: jax.Array
    ) -> tuple[jax.Array, jax.Array, Routing]:
        """The experts of each token, and their weights.

        The bias has a say in which experts are selected, and none in their weights.
        """
        E, K = self.config.experts, self.config.experts_per_token
        score_BxTxE = jax.nn.sigmoid(self.router(x_BxTxD))
        _, selected_BxTxK = jax.lax.top_k(jax.lax.stop_gradient(score_BxTxE + bias_E), K)
        weight_BxTxK = jnp.take_along_axis(score_BxTxE, selected_BxTxK, axis=-1)
        weight_BxTxK *= self.config.routed_scale / weight_BxTxK.sum(-1, keepdims=True)
        chosen_BxTxKxE = jax.nn.one_hot(selected_BxTxK, E, dtype=score_BxTxE.dtype)
        fraction_E = chosen_BxTxKxE.mean((0, 1, 2))
        share_BxTxE = score_BxTxE / score_BxTxE.sum(-1, keepdims=True)
        aux_loss = self.config.aux * E * jnp.sum(fraction_E * share_BxTxE.mean((0, 1)))
        return selected_BxTxK, weight_BxTxK, Routing(fraction_E, aux_loss)


class Experts(nnx.Module):
    """SwiGLU experts in three stacks of matrices; each computes its own tokens only.

    No token is dropped. On a mesh every device sorts its own tokens. Those of a group of
    devices that divides the experts are gathered there, and the results summed.
    """

    def __init__(self, config: MoonlightConfig, rngs: nnx.Rngs):
        self.config = config
        E, D, F = config.experts, config.width, config.expert_hidden
        init = config.weight_init(nnx.initializers.lecun_normal(batch_axis=0))
        inward = named(init, "expert", "expert_embed", "expert_mlp")
        outward = named(init, "expert", "expert_mlp", "expert_embed")
        self.gate = nnx.Param(inward(rngs.params(), (E, D, F), config.param_dtype))
        self.up = nnx.Param(inward(rngs.params(), (E, D, F), config.param_dtype))
        self.down = nnx.Param(outward(rngs.params(), (E, F, D), config.param_dtype))

    def __call__(
        self, x_BxTxD: jax.Array, selected_BxTxK: jax.Array, weight_BxTxK: jax.Array
    ) -> jax.Array:
        stacks = [
            w[...].astype(self.config.dtype) for w in (self.gate, self.up, self.down)
        ]
        batch, experts = mesh_axes("batch"), mesh_axes("expert")
        hidden = mesh_axes("expert_mlp")
        if not batch + experts + hidden:
            return routed(x_BxTxD, selected_BxTxK, weight_BxTxK, *stacks)
        gathered = tuple(axis for axis in batch if axis in experts)
        summed = tuple(axis for axis in experts + hidden if axis not in batch)

        def on_device(x: Any, selected: Any, weight: Any, *stacks: Any) -> jax.Array:
            if gathered:
                x, selected, weight = (
                    jax.lax.all_gather(array, gathered, tiled=True)
                    for array in (x, selected, weight)
                )
            first = jax.lax.axis_index(experts) * stacks[0].shape[0] if experts else 0
            y = jax.lax.psum(routed(x, selected - first, weight, *stacks), summed)
            return jax.lax.psum_scatter(y, gathered, tiled=True) if gathered else y

        tokens = PartitionSpec(batch)
        inward, outward = (
            PartitionSpec(experts, None, hidden),
            PartitionSpec(experts, hidden, None),
        )
        return jax.shard_map(
            on_device,
            in_specs=(tokens, tokens, tokens, inward, inward, outward),
            out_specs=tokens,
        )(x_BxTxD, selected_BxTxK, weight_BxTxK, *stacks)


def balanced(
    bias_LxE: jax.Array, fraction_LxE: jax.Array, rate: float = 1e-3
) -> jax.Array:
    """The routing biases after a step in which the experts had these shares of tokens.

    One with more than its share loses `rate`, one with less gains it. The paper's public
    code has the opposite sign.
    """
    even = fraction_LxE.mean(axis=-1, keepdims=True)
    return bias_LxE + rate * jnp.sign(even - fraction_LxE)


def weight_dimension_numbers(
    model: Moonlight, router: Literal["matrix", "adamw"] = "matrix"
) -> Callable[[Any], Any]:
    """For `orscale` and its relatives: every expert is a matrix, and so is a router."""
    if router not in ("matrix", "adamw"):
        raise ValueError(f"router={router!r}: choose one of matrix, adamw")
    config = model.config
    E, D, F = config.experts, config.width, config.expert_hidden
    inward, outward = Weight((E, D, F), 1, 2), Weight((E, F, D), 1, 2)
    return nnx_dimension_numbers(
        model,
        rules={Experts: lambda _: {"gate": inward, "up": inward, "down": outward}},
        overrides={r"\brouter\b": "adamw"} if router == "adamw" else {},
    )


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
