"""A decoder in Haiku whose layers are stacked by layer_stack.

    python -m examples.gallery.haiku_lm     # half a minute; the loss falls to 0.001

It learns to reverse: after eight letters come the same letters from last to first.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import by_path, muon

# All weights of the layers, stacked: (layers, inputs, outputs). Embeddings, head, norms
# and biases, whose stacks have two axes, take AdamW.
NUMBERS = by_path({r"layer_stack.*\.w$": MuonDimensionNumbers(-2, -1), "": "adamw"})


def norm(x: jax.Array, name: str) -> jax.Array:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True, name=name)(x)


def block(x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    init = hk.initializers.VarianceScaling()
    attention = hk.MultiHeadAttention(4, width // 4, w_init=init, name="attn")
    y = norm(x, "attn_norm")
    x += attention(y, y, y, jnp.tri(x.shape[1])[None, None])
    hidden = hk.Linear(4 * width, name="up")(norm(x, "mlp_norm"))
    return x + hk.Linear(width, name="down")(jax.nn.gelu(hidden))


def loss_fn(key: jax.Array, width: int, layers: int) -> jax.Array:
    letters = jax.random.randint(key, (64, 8), 0, 16)
    tokens = jnp.concatenate([letters, letters[:, ::-1]], axis=1)
    positions = hk.get_parameter("positions", (15, width), init=jnp.zeros)
    x = hk.Embed(16, width, name="token_embed")(tokens[:, :-1]) + positions
    x = hk.experimental.layer_stack(layers)(block)(x)
    logits = hk.Linear(16, name="head")(norm(x, "norm"))[
        :, 7:
    ]  # The first half is random.
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 8:]).mean()


def main(
    steps: int = 300, width: int = 32, layers: int = 2
) -> tuple[list[float], hk.Params, optax.OptState]:
    """The losses, and parameters and optimizer's state after the last step."""
    model = hk.without_apply_rng(hk.transform(lambda key: loss_fn(key, width, layers)))
    keys = jax.random.split(jax.random.key(0), steps + 1)
    params = model.init(keys[0], keys[0])
    schedule = optax.warmup_cosine_decay_schedule(0, 0.01, steps // 10, steps)
    optimizer = muon(schedule, weight_dimension_numbers=NUMBERS)
    state = optimizer.init(params)

    @jax.jit
    def train_step(
        params: hk.Params, state: optax.OptState, key: jax.Array
    ) -> tuple[hk.Params, optax.OptState, jax.Array]:
        loss, grads = jax.value_and_grad(model.apply)(params, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for key in keys[1:]:
        params, state, loss = train_step(params, state, key)
        losses.append(float(loss))
    return losses, params, state


if __name__ == "__main__":
    losses, _, _ = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
