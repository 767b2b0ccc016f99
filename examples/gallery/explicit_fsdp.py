"""FSDP on Explicit axes: saved on 8 devices, restored on 4 by Orbax's CheckpointManager.

    python -m examples.gallery.explicit_fsdp     # half a minute; both losses agree

The type of each array says how it is sharded: the first axis of every matrix is split
over the devices. Without an accelerator of 8 devices, it runs on 8 virtual CPU devices.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from orscale_jax import muon
from orscale_jax.flax import nnx_dimension_numbers

VOCABULARY, WIDTH, LAYERS, DEVICES = 64, 64, 2, 8


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """It predicts the next token from the last two."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(LAYERS))
        self.readout = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, out_sharding: Any = None) -> jax.Array:
        x = self.embed(tokens, out_sharding=out_sharding)
        x = x.at[:, 1:].add(0.5 * x[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.readout(x)


def loss_fn(model: Model, tokens: jax.Array) -> jax.Array:
    """Weights are gathered where they are used, and their gradients are scattered."""
    mesh = jax.typeof(tokens).sharding.mesh
    graph, params = nnx.split(model)
    whole = jax.tree.map(
        lambda p: jax.sharding.reshard(p, NamedSharding(mesh, P())), params
    )
    by_batch = NamedSharding(mesh, P("fsdp"))
    logits = nnx.merge(graph, whole)(tokens[:, :-1], by_batch)[:, 1:]
    labels = jax.nn.one_hot(tokens[:, 2:], VOCABULARY)
    return -(labels * jax.nn.log_softmax(logits)).sum(-1).mean()


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def train(mesh: Mesh, run: Any, first: int, last: int) -> list[float]:
    (model, optimizer), losses = run, []
    for key in map(jax.random.key, range(first, last)):
        start, stride = jax.random.randint(key, (2, 64, 1), 0, VOCABULARY)
        tokens = (start + stride % 4 * jnp.arange(16)) % VOCABULARY
        tokens = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
        losses.append(float(train_step(model, optimizer, tokens)))
    return losses


def main(steps: int = 100) -> tuple[list[float], list[float], Model]:
    """The losses on 8 devices; those of the second half on 4, and its model."""
    jax.config.update("jax_num_cpu_devices", DEVICES)  # Before JAX looks for devices.
    devices = jax.devices() if jax.device_count() >= DEVICES else jax.devices("cpu")
    rate = optax.warmup_cosine_decay_schedule(0, 0.02, steps // 10, steps)

    def begin(mesh: Mesh) -> tuple[Model, nnx.Optimizer]:
        model = Model(nnx.Rngs(0))
        # The trace of the model needs its weights before they are sharded.
        numbers = nnx_dimension_numbers(model, jnp.zeros((1, 4), jnp.int32))
        rows = NamedSharding(mesh, P("fsdp"))
        nnx.update(model, jax.device_put(nnx.state(model), rows))
        tx = muon(rate, weight_dimension_numbers=numbers)
        # The state has the shardings of the weights. Made in jit, counts are on the mesh.
        make = nnx.jit(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param))
        return model, make(model)

    eight, four = (
        Mesh(devices[:count], ("fsdp",), axis_types=(AxisType.Explicit,))
        for count in (DEVICES, DEVICES // 2)
    )
    half, run = steps // 2, begin(eight)
    losses = train(eight, run, 0, half)
    with (
        tempfile.TemporaryDirectory() as folder,
        ocp.CheckpointManager(Path(folder)) as manager,
    ):
        manager.save(half, args=ocp.args.StandardSave(nnx.state(run)))
        manager.wait_until_finished()
        restored = begin(four)
        wanted = ocp.args.StandardRestore(nnx.state(restored))
        nnx.update(restored, manager.restore(half, args=wanted))
    losses += train(eight, run, half, steps)
    return losses, train(four, restored, half, steps), restored[0]


if __name__ == "__main__":
    losses, on_four, model = main()
    print(f"loss on 8 devices {losses[0]:.3f} → {losses[-1]:.4f}")
    print(f"loss on 4 devices, from step {len(on_four)}: {on_four[-1]:.4f}")
    kernel = model.blocks[0].up.kernel[...]
    print(jax.typeof(kernel), "on", len(kernel.devices()), "devices")
