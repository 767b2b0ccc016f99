"""A mixture of experts with DeepSeek-V3's routing (arXiv:2412.19437, section 2.1.2)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from examples.pretrain.models.layers import SwigluMlp, linear
from examples.pretrain.models.sharding import mesh_axes, named
from examples.pretrain.moonlight.config import MoonlightConfig
from examples.pretrain.moonlight.grouped import grouped_product


class Routing(NamedTuple):
    """What a training loop wants to know of the routing of a batch.

    Attributes:
      fraction: The share of all assignments that goes to each expert, (E,) for a layer.
      aux_loss: The auxiliary loss with its coefficient, to be added to the loss.
    """

    fraction: jax.Array
    aux_loss: jax.Array


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


def routed(
    x_BxTxD: jax.Array,
    selected_BxTxK: jax.Array,
    weight_BxTxK: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
) -> jax.Array:
    """The weighted sum of each token's experts; those beyond the E give zero."""
    (*BT, D), E, K = x_BxTxD.shape, gate_ExDxF.shape[0], selected_BxTxK.shape[-1]
    expert_M = selected_BxTxK.reshape(-1)
    expert_M = jnp.where((expert_M >= 0) & (expert_M < E), expert_M, E)
    order_M = jnp.argsort(expert_M)
    sizes_E = jnp.zeros(E, jnp.int32).at[expert_M].add(1, mode="drop")
    here_Mx1 = (jnp.arange(expert_M.size) < sizes_E.sum())[:, None]

    # Masked on both sides: neither the rows after the last group nor their gradients are
    # defined.
    x_MxD = jnp.where(here_Mx1, x_BxTxD.reshape(-1, D)[order_M // K], 0)
    h_MxF = jax.nn.silu(grouped_product(x_MxD, gate_ExDxF, sizes_E))
    h_MxF *= grouped_product(x_MxD, up_ExDxF, sizes_E)
    y_MxD = jnp.where(here_Mx1, grouped_product(h_MxF, down_ExFxD, sizes_E), 0)

    y_MxD = y_MxD.at[jnp.argsort(order_M)].get(unique_indices=True)
    y_BxTxKxD = y_MxD.reshape(*BT, K, D)
    return jnp.einsum("btkd,btk->btd", y_BxTxKxD, weight_BxTxK).astype(x_BxTxD.dtype)
