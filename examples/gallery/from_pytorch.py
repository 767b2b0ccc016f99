"""Arrays from PyTorch, whose rows are outputs: (out, in), (out, in, height, width).

    python -m examples.gallery.from_pytorch     # 20 seconds; loss, and what is a matrix

A `state_dict` is one flat dictionary, here made of NumPy arrays, as
`{name: tensor.numpy() for name, tensor in module.state_dict().items()}` is. It is trained
in JAX as it is. The dimension numbers say which axes are inputs (reduced over) and which
are outputs. `torch.from_numpy` of each array, and `load_state_dict`, take them back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from orscale_jax import BlockDimensionNumbers, by_path, describe, muon

Arrays = dict[str, Any]
# in_proj_weight is (3 · width, width): query, key and value, one below the other.
NUMBERS = by_path(
    {
        r"in_proj_weight": BlockDimensionNumbers(1, 0, block_axis=0, blocks=3),
        r"conv\.weight": MuonDimensionNumbers(reduction_axis=(1, 2, 3), output_axis=0),
        r"(out_proj|fc\d)\.weight": MuonDimensionNumbers(reduction_axis=1, output_axis=0),
        r"head\.weight": "adamw",
    }
)


def state_dict(width: int) -> Arrays:
    """What a small vision transformer in PyTorch would hold."""
    shapes = {
        "conv.weight": (width, 3, 2, 2),
        "attn.in_proj_weight": (3 * width, width),
        "attn.out_proj.weight": (width, width),
        "mlp.fc1.weight": (4 * width, width),
        "mlp.fc2.weight": (width, 4 * width),
        "head.weight": (2, width),
    }
    rng = np.random.default_rng(0)
    return {"conv.bias": np.zeros(width, np.float32)} | {
        name: (rng.normal(size=shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def loss_fn(params: Arrays, key: jax.Array) -> jax.Array:
    """Half of the images (batch, channel, height, width) have one bright pixel."""
    labels = jnp.arange(64) % 2
    row, column = jax.random.randint(key, (2, 64), 0, 8)
    images = jax.random.normal(key, (64, 3, 8, 8))
    images = images.at[jnp.arange(64), :, row, column].add(4.0 * labels[:, None])
    x = jax.lax.conv(images, params["conv.weight"], (2, 2), "VALID")
    x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2) + params["conv.bias"]
    qkv = jnp.split((x @ params["attn.in_proj_weight"].T)[:, :, None], 3, axis=-1)
    x += jax.nn.dot_product_attention(*qkv)[:, :, 0] @ params["attn.out_proj.weight"].T
    x += jax.nn.relu(x @ params["mlp.fc1.weight"].T) @ params["mlp.fc2.weight"].T
    logits = jax.nn.standardize(x.max(axis=1)) @ params["head.weight"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(steps: int = 200, width: int = 16) -> tuple[jax.Array, Arrays, Arrays]:
    """The losses, and the arrays before and after, both under PyTorch's names."""
    rate = optax.cosine_decay_schedule(0.01, steps)
    optimizer = muon(rate, weight_dimension_numbers=NUMBERS)

    def train_step(carry, key):  # type: ignore[no-untyped-def]
        loss, grads = jax.value_and_grad(loss_fn)(carry[0], key)
        updates, state = optimizer.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), loss

    before = state_dict(width)
    params = jax.tree.map(jnp.asarray, before)
    keys = jax.random.split(jax.random.key(0), steps)
    (after, _), losses = jax.lax.scan(train_step, (params, optimizer.init(params)), keys)
    return losses, before, jax.tree.map(np.asarray, after)


if __name__ == "__main__":
    losses, before, _ = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    optimizer = muon(1e-2, weight_dimension_numbers=NUMBERS)
    for row in describe(before, optimizer).rows:
        matrices = f"{row.matrices} of {row.m} × {row.n}" if row.matrices else ""
        print(f"{row.path:<22} {row.shape!s:<16} {row.rule:<7} {matrices}")
