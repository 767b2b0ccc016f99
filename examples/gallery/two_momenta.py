"""Momentum of two time scales: Q is the polar factor of an average of two momenta.

    python -m examples.gallery.two_momenta     # 20 seconds; both losses are alike

The rule of the best runs with one optimizer of modded-nanogpt's track 3. It takes a stage
of one's own between those of the library: a fast and a slow moving average of gradients.
The small task shows the lines, and no gain.
"""

import jax
import jax.numpy as jnp
import optax

from orscale_jax import muon, orthogonalize, scale_by_shape


def average_of_two(
    fast: float, slow: float, share: float
) -> optax.GradientTransformation:
    """The fast momentum times 1 - share, and the slow one times share."""
    parts = optax.ema(fast), optax.ema(slow)

    def update(grads, state, params=None):  # type: ignore[no-untyped-def]
        found = [part.update(grads, old) for part, old in zip(parts, state, strict=True)]
        (m, n), state = zip(*found, strict=True)
        return jax.tree.map(lambda a, b: (1 - share) * a + share * b, m, n), state

    return optax.GradientTransformation(lambda p: tuple(x.init(p) for x in parts), update)


def main(steps: int = 400, width: int = 32) -> dict[str, float]:
    """The mean loss of the last tenth of the steps, with Muon and with two momenta."""
    rate = optax.cosine_decay_schedule(0.02, steps)
    two = [average_of_two(0.9, 0.98, 0.56), orthogonalize(), scale_by_shape()]
    optimizers = {
        "muon": muon(rate, weight_decay=0.0),
        "two momenta": optax.chain(*two, optax.scale_by_learning_rate(rate)),
    }
    up, down, goal = jax.random.normal(jax.random.key(0), (3, width, width)) / width**0.5

    def loss_fn(params: optax.Params, key: jax.Array) -> jax.Array:
        x, noise = jax.random.normal(key, (2, 16, width))
        y = jnp.tanh(x @ params["up"]) @ params["down"]
        return jnp.mean((y - jnp.sin(2 * x @ goal) - noise) ** 2)

    losses = {}
    for name, optimizer in optimizers.items():

        def step(carry, key, optimizer=optimizer):  # type: ignore[no-untyped-def]
            loss, grads = jax.value_and_grad(loss_fn)(carry[0], key)
            updates, state = optimizer.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), loss

        params = {"up": up, "down": down}
        keys = jax.random.split(jax.random.key(1), steps)
        _, found = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        losses[name] = float(found[-steps // 10 :].mean())
    return losses


if __name__ == "__main__":
    for name, loss in main().items():
        print(f"{name}: {loss:.4f}")
