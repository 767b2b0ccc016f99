"""Learning rates by class of layer, a decay mask, and frozen parameters.

`layer_classes` says what each parameter is, by its name. The learning rate is multiplied
by a number for each kind of layer, norms and biases do not decay, and the embedding stays
as it is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from orscale_jax import Description, describe, orscale
from orscale_jax.diagnostics import layer_classes

Params = dict[str, Any]
LENGTH, VOCABULARY = 8, 16
MULTIPLIERS = {"attention": 1.0, "mlp": 2.0}


def multipliers(params: Params) -> Params:
    """By the first word of a class, such as "attention query"; the others have half."""
    return jax.tree.map(
        lambda layer: MULTIPLIERS.get(layer.split()[0], 0.5), layer_classes(params)
    )


def groups(params: Params) -> Params:
    return jax.tree.map(
        lambda layer: "frozen" if layer == "embedding" else "trained",
        layer_classes(params),
    )


def decays(params: Params) -> Params:
    """All but norms and biases."""
    undecayed = {"norm", "scale", "bias"}
    return jax.tree.map(lambda layer: layer not in undecayed, layer_classes(params))


def make_optimizer(rate: float, steps: int) -> optax.GradientTransformationExtraArgs:
    trained = orscale(
        optax.cosine_decay_schedule(rate, steps),
        learning_rate_multipliers=multipliers,
        weight_decay=0.1,
        weight_decay_mask=decays,
    )
    frozen = optax.set_to_zero()  # No state is kept for them.
    return optax.partition({"trained": trained, "frozen": frozen}, groups)


def init(key: jax.Array, width: int) -> Params:
    keys = iter(jax.random.split(key, 8))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

    return {
        "embed": matrix(VOCABULARY, width),
        "attention": {name: matrix(width, width) for name in ("query", "key", "value")},
        "norm": {"scale": jnp.ones(width)},
        "mlp": {"up": matrix(width, 4 * width), "down": matrix(4 * width, width)},
        "lm_head": matrix(width, VOCABULARY),
    }


def loss_fn(params: Params, key: jax.Array) -> jax.Array:
    """The model is asked for the first token of each sequence."""
    tokens = jax.random.randint(key, (64, LENGTH), 0, VOCABULARY)
    x = params["embed"][tokens]
    x += 0.1 * jnp.arange(LENGTH)[:, None]  # Where in the sequence a token is.
    query, key_, value = (x @ params["attention"][n] for n in ("query", "key", "value"))
    x += jax.nn.dot_product_attention(
        query[:, :, None], key_[:, :, None], value[:, :, None]
    )[:, :, 0]
    x *= params["norm"]["scale"] / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    x += jax.nn.relu(x @ params["mlp"]["up"]) @ params["mlp"]["down"]
    logits = x.mean(axis=1) @ params["lm_head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 0])
    return losses.mean()


def main(
    steps: int = 200, width: int = 32
) -> tuple[list[float], Params, Params, Description]:
    """The losses, the parameters before and after, and who trains what."""
    before = init(jax.random.key(0), width)
    optimizer = make_optimizer(0.01, steps)

    def train_step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, key)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    train = jax.jit(functools.partial(jax.lax.scan, train_step))  # All steps at once.
    keys = jax.random.split(jax.random.key(1), steps)
    (after, _), losses = train((before, optimizer.init(before)), keys)
    return losses.tolist(), before, after, describe(before, optimizer=optimizer)


if __name__ == "__main__":
    losses, _, _, description = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    for row in description.rows:
        rate = "" if row.label == "frozen" else f"η × {row.multipliers[0]:g}"
        print(f"{row.path:<16} {row.layer_class:<16} {row.rule:<9} {rate or row.label}")
