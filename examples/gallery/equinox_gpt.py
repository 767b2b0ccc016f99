"""A GPT in Equinox whose layers are stacked by filter_vmap and run by jax.lax.scan.

It learns to sort: after eight digits come the same digits in order.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from orscale_jax import orscale
from orscale_jax.equinox import dimension_numbers

DIGITS, COUNT = 10, 8
LENGTH = 2 * COUNT


class Block(eqx.Module):
    norms: list[eqx.nn.RMSNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.RMSNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(y, y, y, mask)
        return x + jax.vmap(lambda row: self.mlp(self.norms[1](row)))(x)


class GPT(eqx.Module):
    token_embed: eqx.nn.Embedding
    position_embed: eqx.nn.Embedding
    blocks: Block  # Each of its arrays has one more axis in front: the layers.
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, width: int, layers: int, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.token_embed = eqx.nn.Embedding(DIGITS, width, key=keys[0])
        self.position_embed = eqx.nn.Embedding(LENGTH, width, key=keys[1])
        build = eqx.filter_vmap(functools.partial(Block, width))
        self.blocks = build(jax.random.split(keys[2], layers))
        self.norm = eqx.nn.RMSNorm(width)
        self.head = eqx.nn.Linear(width, DIGITS, use_bias=False, key=keys[3])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = self.position_embed.weight[: len(tokens)]
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(
            lambda x, layer: (eqx.combine(layer, rest)(x), None),
            jax.vmap(self.token_embed)(tokens) + positions,
            arrays,
        )
        return jax.vmap(lambda row: self.head(self.norm(row)))(x)


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses[:, COUNT - 1 :].mean()  # Of the digits in order.


def main(
    steps: int = 200, width: int = 32, layers: int = 2
) -> tuple[list[float], GPT, optax.OptState]:
    """The losses, and model and optimizer's state after the last step."""
    model = GPT(width, layers, jax.random.key(0))
    schedule = optax.warmup_cosine_decay_schedule(0, 0.01, steps // 10, steps)
    optimizer = orscale(schedule, weight_dimension_numbers=dimension_numbers(model))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(
        model: GPT, state: optax.OptState, key: jax.Array
    ) -> tuple[GPT, optax.OptState, jax.Array]:
        digits = jax.random.randint(key, (64, COUNT), 0, DIGITS)
        tokens = jnp.concatenate([digits, jnp.sort(digits)], axis=1)
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        model, state, loss = train_step(model, state, key)
        losses.append(float(loss))
    return losses, model, state


if __name__ == "__main__":
    losses, _, state = main()
    [(_, ratios)] = optax.tree.get_all_with_path(state, "trust_ratio")
    by_layer = ratios.blocks.attention.query_proj.weight
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    print("trust ratio of each layer's query:", *(f"{ratio:.2f}" for ratio in by_layer))
