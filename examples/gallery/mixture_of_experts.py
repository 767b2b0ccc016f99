"""A mixture of experts in plain JAX: every expert is a matrix with a ratio of its own.

The experts' weights are stacked on a leading axis. The task needs several of them: each
input belongs to one of four groups, and each group has its own function.
"""

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import by_path, orscale

Params = dict[str, jax.Array]
GROUPS, FEATURES = 4, 16

# The leading axis counts matrices. Without its rule the router would be one, too.
NUMBERS = by_path(
    {
        r"router": "adamw",
        r"up|down": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    }
)


def init(key: jax.Array, experts: int, hidden: int) -> Params:
    keys = jax.random.split(key, 3)
    normal = jax.random.normal
    return {
        "router": 0.02 * normal(keys[0], (FEATURES, experts)),
        "up": normal(keys[1], (experts, FEATURES, hidden)) / FEATURES**0.5,
        "down": normal(keys[2], (experts, hidden, FEATURES)) / hidden**0.5,
    }


def mixture(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The outputs, and the loss that keeps the experts in balance: 1 if they are."""
    experts = params["router"].shape[1]
    probabilities = jax.nn.softmax(x @ params["router"])
    weights, chosen = jax.lax.top_k(probabilities, 2)
    weights /= weights.sum(axis=-1, keepdims=True)
    one_hot = jax.nn.one_hot(chosen, experts)  # (batch, 2, experts)
    gates = jnp.einsum("bk,bke->be", weights, one_hot)
    # Every expert sees every input: simple, and fast enough for a few small experts.
    hidden = jax.nn.gelu(jnp.einsum("bd,edf->bef", x, params["up"]))
    y = jnp.einsum("bef,efd,be->bd", hidden, params["down"], gates)
    share = one_hot.mean(axis=(0, 1))
    return y, experts * jnp.sum(share * probabilities.mean(axis=0))


def batch(key: jax.Array, count: int = 256) -> tuple[jax.Array, jax.Array]:
    """Inputs around four centers, and a rotation of them that the center decides."""
    centers = 3 * jax.random.normal(jax.random.key(1), (GROUPS, FEATURES))
    maps = jax.random.orthogonal(jax.random.key(2), FEATURES, (GROUPS,))
    keys = jax.random.split(key)
    group = jax.random.randint(keys[0], (count,), 0, GROUPS)
    noise = jax.random.normal(keys[1], (count, FEATURES))
    return centers[group] + noise, jnp.einsum("bd,bdf->bf", noise, maps[group])


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    predicted, balance = mixture(params, x)
    error = jnp.mean((predicted - y) ** 2)
    return error + 0.01 * balance, error


def main(
    steps: int = 300, experts: int = 8, hidden: int = 64
) -> tuple[list[float], optax.OptState]:
    """The errors, and the optimizer's state after the last step."""
    optimizer = orscale(
        optax.cosine_decay_schedule(0.01, steps), weight_dimension_numbers=NUMBERS
    )
    params = init(jax.random.key(0), experts, hidden)
    state = optimizer.init(params)

    @jax.jit
    def train_step(
        params: Params, state: optax.OptState, key: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        (_, error), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *batch(key))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, error

    errors = []
    for key in jax.random.split(jax.random.key(3), steps):
        params, state, error = train_step(params, state, key)
        errors.append(float(error))
    return errors, state


if __name__ == "__main__":
    errors, state = main()
    [(_, ratios)] = optax.tree.get_all_with_path(state, "trust_ratio")
    print(f"error {errors[0]:.3f} → {errors[-1]:.3f}")
    print("trust ratios of down:", *(f"{ratio:.2f}" for ratio in ratios["down"]))
