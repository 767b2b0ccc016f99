"""A small convolutional network in Flax NNX on images as those of CIFAR-10.

It draws them: stripes in ten directions and random colors. Given a file of CIFAR-10's
binary version, such as data_batch_1.bin, it reads them from there.
"""

import argparse
import itertools
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from orscale_jax import orscale
from orscale_jax.flax import nnx_dimension_numbers

Images = tuple[np.ndarray, np.ndarray]


class Net(nnx.Module):
    """Three convolutions, each of which halves height and width; then a head."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        sizes = [3, width, 2 * width, 4 * width]
        self.convolutions = nnx.List(
            nnx.Conv(inputs, outputs, (3, 3), strides=2, rngs=rngs)
            for inputs, outputs in itertools.pairwise(sizes)
        )
        self.head = nnx.Linear(sizes[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for convolution in self.convolutions:
            x = nnx.relu(convolution(x))
        return self.head(x.mean(axis=(1, 2)))


def draw(rng: np.random.Generator, count: int) -> Images:
    """Images (count, 32, 32, 3) of bytes, and the classes of their directions."""
    labels = rng.integers(0, 10, count).astype(np.uint8)
    angle = labels[:, None, None] * np.pi / 10
    y, x = np.mgrid[:32, :32]
    phase = rng.uniform(0, 2 * np.pi, (count, 1, 1))
    wave = np.cos(0.8 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
    color = rng.uniform(-60, 60, (count, 1, 1, 3))
    pixels = 128 + wave[..., None] * color + rng.normal(0, 20, (count, 32, 32, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8), labels


def read(path: Path) -> Images:
    """A record is a label and three planes of bytes: red, green and blue."""
    records = np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return planes.transpose(0, 2, 3, 1), records[:, 0]


def accuracy(model: Net, images: jax.Array, labels: jax.Array) -> jax.Array:
    return (model(images / 128.0 - 1).argmax(axis=-1) == labels).mean()


@nnx.jit
def train_step(
    model: Net, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    def loss_fn(model: Net) -> jax.Array:
        logits = model(images / 128.0 - 1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main(
    steps: int = 150, width: int = 16, path: Path | None = None
) -> tuple[list[float], float, Net]:
    """The losses, the accuracy on 1000 images held out, and the model."""
    rng = np.random.default_rng(0)
    images, labels = jax.device_put(read(path) if path else draw(rng, 5000))
    model = Net(width, nnx.Rngs(0))
    numbers = nnx_dimension_numbers(model)  # Rows: window and inputs; columns: outputs.
    schedule = optax.cosine_decay_schedule(0.02, steps)
    tx = orscale(schedule, weight_dimension_numbers=numbers)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = []
    for _ in range(steps):
        chosen = rng.integers(0, len(labels) - 1000, 128)
        loss = train_step(model, optimizer, images[chosen], labels[chosen])
        losses.append(float(loss))
    return losses, float(nnx.jit(accuracy)(model, images[-1000:], labels[-1000:])), model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", help="such as data_batch_1.bin")
    losses, correct, _ = main(path=parser.parse_args().path)
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, accuracy {correct:.1%}")
