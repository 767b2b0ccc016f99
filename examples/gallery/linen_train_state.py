"""A Linen GPT in Flax's TrainState: fused projections, a tied head, a schedule, a clip.

It learns to repeat the first half of each sequence.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from orscale_jax import BlockDimensionNumbers, by_path, orscale

VOCABULARY, LENGTH, HEADS = 16, 16, 4

# A fused kernel (width, 3 · width) holds three matrices, one beside the other. All other
# kernels of two axes are one matrix each; the embeddings and norms take AdamW.
NUMBERS = by_path({r"qkv\.kernel": BlockDimensionNumbers(0, 1, block_axis=1, blocks=3)})


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(nn.RMSNorm()(x))
        heads = qkv.reshape(*x.shape[:2], 3, HEADS, -1)
        mixed = jax.nn.dot_product_attention(
            heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True
        )
        x += nn.Dense(width, use_bias=False, name="out")(mixed.reshape(x.shape))
        hidden = nn.Dense(4 * width, use_bias=False, name="up")(nn.RMSNorm()(x))
        return x + nn.Dense(width, use_bias=False, name="down")(nn.gelu(hidden))


class GPT(nn.Module):
    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, self.width, name="token_embed")
        positions = nn.Embed(LENGTH, self.width, name="position_embed")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = Block()(x)
        return embed.attend(nn.RMSNorm()(x))  # The head is the embedding.


def sequences(key: jax.Array, count: int) -> jax.Array:
    half = jax.random.randint(key, (count, LENGTH // 2), 0, VOCABULARY)
    return jnp.concatenate([half, half], axis=1)


@jax.jit
def train_step(state: TrainState, key: jax.Array) -> tuple[jax.Array, TrainState]:
    tokens = sequences(key, 64)

    def loss_fn(params: optax.Params) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses[:, LENGTH // 2 - 1 :].mean()  # The first half is random.

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return loss, state.apply_gradients(grads=grads)


def main(
    steps: int = 200, width: int = 64, layers: int = 2
) -> tuple[list[float], TrainState]:
    """The losses, and the state after the last step."""
    model = GPT(width, layers)
    keys = jax.random.split(jax.random.key(0), steps + 1)
    params = model.init(keys[0], sequences(keys[0], 1))["params"]
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 0.005, warmup_steps=steps // 10, decay_steps=steps
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        orscale(schedule, weight_dimension_numbers=NUMBERS),
    )
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    losses = []
    for key in keys[1:]:
        loss, state = train_step(state, key)
        losses.append(float(loss))
    return losses, state


if __name__ == "__main__":
    losses, state = main()
    [(_, ratios)] = optax.tree.get_all_with_path(state.opt_state, "trust_ratio")
    query, key, value = ratios["Block_0"]["qkv"]["kernel"]
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    print(f"trust ratios of block 0: query {query:.2f}, key {key:.2f}, value {value:.2f}")
