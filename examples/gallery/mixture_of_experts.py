"""A mixture of experts in plain JAX: every expert is a matrix with a ratio of its own.

    python -m examples.gallery.mixture_of_experts     # 20 seconds; error 0.05

The experts' weights are stacked on a leading axis. The task needs several of them: each
input belongs to one of four groups, and each group has its own rotation.
"""

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import by_path, diagnostics, orscale

GROUPS, FEATURES = 4, 16
# The leading axis counts matrices. Without its rule the router would be one, too.
EXPERTS = MuonDimensionNumbers(reduction_axis=1, output_axis=2)
NUMBERS = by_path({"router": "adamw", "up|down": EXPERTS})


def init(key: jax.Array, experts: int, hidden: int) -> dict[str, jax.Array]:
    router, up, down = map(jax.random.normal, jax.random.split(key, 3), [
        (FEATURES, experts), (experts, FEATURES, hidden), (experts, hidden, FEATURES),
    ])  # fmt: skip
    return {"router": 0.02 * router, "up": up / FEATURES**0.5, "down": down / hidden**0.5}


def mixture(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The outputs, and the loss that keeps the experts in balance: 1 if they are."""
    probabilities = jax.nn.softmax(x @ params["router"])
    weights, chosen = jax.lax.top_k(probabilities, 2)
    one_hot = jax.nn.one_hot(chosen, probabilities.shape[1])  # (batch, 2, experts)
    gates = jnp.einsum("bk,bke->be", weights / weights.sum(-1, keepdims=True), one_hot)
    # Every expert sees every input: simple, and fast enough for a few small experts.
    hidden = jax.nn.gelu(jnp.einsum("bd,edf->bef", x, params["up"]))
    balance = jnp.sum(one_hot.mean((0, 1)) * probabilities.mean(0)) * len(gates[0])
    return jnp.einsum("bef,efd,be->bd", hidden, params["down"], gates), balance


def batch(key: jax.Array, count: int = 256) -> tuple[jax.Array, jax.Array]:
    """Inputs around four centers, and a rotation of them that the center decides."""
    centers = 3 * jax.random.normal(jax.random.key(1), (GROUPS, FEATURES))
    maps = jax.random.orthogonal(jax.random.key(2), FEATURES, (GROUPS,))
    group = jax.random.randint(key, (count,), 0, GROUPS)
    noise = jax.random.normal(key, (count, FEATURES))
    return centers[group] + noise, jnp.einsum("bd,bdf->bf", noise, maps[group])


def loss_fn(params: dict[str, jax.Array], key: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = batch(key)
    predicted, balance = mixture(params, x)
    error = jnp.mean((predicted - y) ** 2)
    return error + 0.01 * balance, error


def main(
    steps: int = 300, experts: int = 8, hidden: int = 64
) -> tuple[jax.Array, diagnostics.Reading]:
    """The errors, and what the optimizer did at the last step."""
    rate = optax.cosine_decay_schedule(0.01, steps)
    optimizer = orscale(rate, weight_dimension_numbers=NUMBERS)

    def train_step(carry, key):  # type: ignore[no-untyped-def]
        grads, error = jax.grad(loss_fn, has_aux=True)(carry[0], key)
        updates, state = optimizer.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), error

    params = init(jax.random.key(0), experts, hidden)
    keys = jax.random.split(jax.random.key(3), steps)
    carry, errors = jax.lax.scan(train_step, (params, optimizer.init(params)), keys)
    params, state = carry
    return errors, diagnostics.read(state, params, NUMBERS)


if __name__ == "__main__":
    errors, reading = main()
    print(f"error {errors[0]:.3f} → {errors[-1]:.3f}")
    print(
        "trust ratios of down:",
        *(f"{ratio:.2f}" for ratio in reading.trust_ratio["down"]),
    )
