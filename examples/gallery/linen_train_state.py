"""A Linen GPT in Flax's TrainState: fused projections, a tied head, a schedule, a clip.

    python -m examples.gallery.linen_train_state     # a minute; loss 0.001

It learns to repeat the first half of each sequence.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from orscale_jax import BlockDimensionNumbers, by_path, muon

# A fused kernel (width, 3 · width) holds three matrices, one beside the other. All other
# kernels of two axes are one matrix each; the embeddings and norms take AdamW.
NUMBERS = by_path({r"qkv\.kernel": BlockDimensionNumbers(0, 1, block_axis=1, blocks=3)})


class GPT(nn.Module):
    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(16, self.width, name="token_embed")
        positions = nn.Embed(16, self.width, name="position_embed")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for i in range(self.layers):
            qkv = nn.Dense(3 * self.width, False, name=f"{i}_qkv")(nn.RMSNorm()(x))
            heads = jnp.split(qkv.reshape(*x.shape[:2], 12, -1), 3, axis=2)
            mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
            x += nn.Dense(self.width, False, name=f"{i}_out")(mixed.reshape(x.shape))
            hidden = nn.gelu(
                nn.Dense(4 * self.width, False, name=f"{i}_up")(nn.RMSNorm()(x))
            )
            x += nn.Dense(self.width, False, name=f"{i}_down")(hidden)
        return embed.attend(nn.RMSNorm()(x))  # The head is the embedding.


@jax.jit
def train_step(state: TrainState, key: jax.Array) -> tuple[jax.Array, TrainState]:
    tokens = jnp.tile(jax.random.randint(key, (64, 8), 0, 16), (1, 2))

    def loss_fn(params: optax.Params) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])[:, 7:]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 8:]
        ).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return loss, state.apply_gradients(grads=grads)


def main(
    steps: int = 200, width: int = 64, layers: int = 2
) -> tuple[list[float], TrainState]:
    """The losses, and the state after the last step."""
    model = GPT(width, layers)
    keys = jax.random.split(jax.random.key(0), steps + 1)
    params = model.init(keys[0], jnp.zeros((1, 15), int))["params"]
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.005, steps // 10, steps)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), muon(rate, weight_dimension_numbers=NUMBERS)
    )
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses = []
    for key in keys[1:]:
        loss, state = train_step(state, key)
        losses.append(float(loss))
    return losses, state


if __name__ == "__main__":
    losses, _ = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
