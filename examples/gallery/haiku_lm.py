"""A decoder in Haiku whose layers are stacked by layer_stack.

It learns to reverse: after eight letters come the same letters from last to first.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import by_path, orscale

LETTERS, COUNT, HEADS = 16, 8, 4
LENGTH = 2 * COUNT

# All weights of the transformer, stacked or not: (..., inputs, outputs). The embeddings,
# the output head, norms and biases, whose stacks have two axes, take AdamW.
NUMBERS = by_path({r"transformer.*\.w$": MuonDimensionNumbers(-2, -1), "": "adamw"})


def norm(x: jax.Array, name: str) -> jax.Array:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(x)


def block(x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    init = hk.initializers.VarianceScaling()
    attention = hk.MultiHeadAttention(HEADS, width // HEADS, w_init=init, name="attn")
    y = norm(x, "attn_norm")
    x += attention(y, y, y, jnp.tri(x.shape[1])[None, None])
    hidden = hk.Linear(4 * width, name="up")(norm(x, "mlp_norm"))
    return x + hk.Linear(width, name="down")(jax.nn.gelu(hidden))


class Transformer(hk.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = layers

    def __call__(self, x: jax.Array) -> jax.Array:
        return norm(hk.experimental.layer_stack(self.layers)(block)(x), "norm")


class LanguageModel(hk.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.width, self.layers = width, layers

    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = hk.Embed(LETTERS, self.width, name="token_embed")
        shape = (LENGTH, self.width)
        positions = hk.get_parameter("positions", shape, init=jnp.zeros)
        x = embed(tokens) + positions[: tokens.shape[1]]
        return hk.Linear(LETTERS)(Transformer(self.layers)(x))


def sequences(key: jax.Array, count: int) -> jax.Array:
    letters = jax.random.randint(key, (count, COUNT), 0, LETTERS)
    return jnp.concatenate([letters, letters[:, ::-1]], axis=1)


def main(
    steps: int = 300, width: int = 32, layers: int = 2
) -> tuple[list[float], hk.Params, optax.OptState]:
    """The losses, and parameters and optimizer's state after the last step."""
    model = hk.without_apply_rng(
        hk.transform(lambda tokens: LanguageModel(width, layers)(tokens))
    )
    keys = jax.random.split(jax.random.key(0), steps + 1)
    params = model.init(keys[0], sequences(keys[0], 1))
    schedule = optax.warmup_cosine_decay_schedule(0, 0.01, steps // 10, steps)
    optimizer = orscale(schedule, weight_dimension_numbers=NUMBERS)
    state = optimizer.init(params)

    def loss_fn(params: hk.Params, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses[:, COUNT - 1 :].mean()  # The first half is random.

    @jax.jit
    def train_step(
        params: hk.Params, state: optax.OptState, key: jax.Array
    ) -> tuple[hk.Params, optax.OptState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, sequences(key, 64))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for key in keys[1:]:
        params, state, loss = train_step(params, state, key)
        losses.append(float(loss))
    return losses, params, state


if __name__ == "__main__":
    losses, _, state = main()
    [(_, ratios)] = optax.tree.get_all_with_path(state, "trust_ratio")
    [stack] = [name for name in ratios if name.endswith("query")]
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    print("trust ratio of each layer's query:", *(f"{r:.2f}" for r in ratios[stack]["w"]))
