"""Arrays from PyTorch, whose rows are outputs: (out, in), (out, in, height, width).

A `state_dict` is one flat dictionary, here made of NumPy arrays, as
`{name: tensor.numpy() for name, tensor in module.state_dict().items()}` is. It is trained
in JAX as it is. The dimension numbers say which axes are inputs (reduced over) and which
are outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import BlockDimensionNumbers, by_path, describe, orscale

Params = dict[str, Any]
SIZE, CHANNELS, PATCH = 8, 3, 2

# in_proj_weight is (3 · width, width): query, key and value, one below the other.
NUMBERS = by_path(
    {
        r"in_proj_weight": BlockDimensionNumbers(1, 0, block_axis=0, blocks=3),
        r"conv\.weight": MuonDimensionNumbers(reduction_axis=(1, 2, 3), output_axis=0),
        r"(out_proj|fc\d)\.weight": MuonDimensionNumbers(reduction_axis=1, output_axis=0),
        r"head\.weight": "adamw",
    }
)


def state_dict(width: int) -> Params:
    """What a small vision transformer in PyTorch would hold."""
    draw = np.random.default_rng(0)

    def uniform(*shape: int) -> np.ndarray:
        bound = np.prod(shape[1:]) ** -0.5
        return draw.uniform(-bound, bound, shape).astype(np.float32)

    return {
        "conv.weight": uniform(width, CHANNELS, PATCH, PATCH),
        "conv.bias": np.zeros(width, np.float32),
        "attn.in_proj_weight": uniform(3 * width, width),
        "attn.out_proj.weight": uniform(width, width),
        "norm.weight": np.ones(width, np.float32),
        "mlp.fc1.weight": uniform(4 * width, width),
        "mlp.fc2.weight": uniform(width, 4 * width),
        "head.weight": uniform(2, width),
    }


def logits(params: Params, images: jax.Array) -> jax.Array:
    """The classes of images (batch, channel, height, width), as in PyTorch."""
    x = jax.lax.conv(images, params["conv.weight"], (PATCH, PATCH), "VALID")
    x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2) + params["conv.bias"]
    query, key, value = jnp.split(x @ params["attn.in_proj_weight"].T, 3, axis=-1)
    mixed = jax.nn.dot_product_attention(
        query[:, :, None], key[:, :, None], value[:, :, None]
    )[:, :, 0]
    x += mixed @ params["attn.out_proj.weight"].T
    x *= params["norm.weight"] * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    x += jax.nn.relu(x @ params["mlp.fc1.weight"].T) @ params["mlp.fc2.weight"].T
    return x.max(axis=1) @ params["head.weight"].T


def loss_fn(params: Params, key: jax.Array) -> jax.Array:
    """Half of the images have one bright pixel."""
    keys = jax.random.split(key, 3)
    images = jax.random.normal(keys[0], (64, CHANNELS, SIZE, SIZE))
    labels = jnp.arange(64) % 2
    row, column = jax.random.randint(keys[1], (2, 64), 0, SIZE)
    images = images.at[jnp.arange(64), :, row, column].add(4.0 * labels[:, None])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(params, images), labels
    )
    return losses.mean()


def main(steps: int = 200, width: int = 16) -> tuple[list[float], Params, Params]:
    """The losses, and the arrays before and after, both under PyTorch's names."""
    before = params = state_dict(width)
    schedule = optax.cosine_decay_schedule(0.01, steps)
    optimizer = orscale(schedule, weight_dimension_numbers=NUMBERS)
    state = optimizer.init(params)

    @jax.jit
    def train_step(params: Params, state: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, key)
        updates, state = optimizer.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    losses = []
    for key in jax.random.split(jax.random.key(0), steps):
        loss, params, state = train_step(params, state, key)
        losses.append(float(loss))
    # torch.from_numpy of each array, and load_state_dict, take them back.
    return losses, before, jax.tree.map(np.asarray, params)


if __name__ == "__main__":
    losses, before, _ = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    for row in describe(before, NUMBERS).rows:
        matrices = f"{row.matrices} of {row.m} × {row.n}" if row.matrices else ""
        print(f"{row.path:<22} {row.shape!s:<16} {row.rule:<7} {matrices}")
