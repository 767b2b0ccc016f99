"""A GPT in Flax NNX with FSDP over 8 devices, saved and restored with Orbax.

    python -m examples.gallery.sharded_gpt     # half a minute; the loss falls to 0.3

It learns to continue sequences such as 3, 6, 9, 12, …, each with its own start and
stride. Without an accelerator of 8 devices, it runs on 8 virtual CPU devices.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from orscale_jax import muon
from orscale_jax.flax import nnx_dimension_numbers

VOCABULARY, DEVICES = 64, 8
# The first axis of every kernel and of the embedding is split over the devices.
KERNEL = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp",))
TABLE = nnx.with_partitioning(nnx.initializers.normal(0.1), ("fsdp",))
Run = tuple[list[float], Any]  # Losses, and the state of model and optimizer after them.


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            8, width, kernel_init=KERNEL, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, kernel_init=KERNEL, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=KERNEL, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(jax.nn.standardize(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(jax.nn.standardize(x))))


class GPT(nnx.Module):
    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, width, embedding_init=TABLE, rngs=rngs)
        self.blocks = nnx.Sequential(*[Block(width, rngs) for _ in range(layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(jax.nn.standardize(self.blocks(self.embed(tokens))))


def loss_fn(model: GPT, tokens: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()


def main(steps: int = 100, width: int = 64, layers: int = 2) -> tuple[Run, Run]:
    """The whole run, and its second half from the checkpoint."""
    jax.config.update("jax_num_cpu_devices", DEVICES)  # Before JAX looks for devices.
    devices = jax.devices() if jax.device_count() >= DEVICES else jax.devices("cpu")
    mesh = Mesh(devices[:DEVICES], ("fsdp",))

    def build() -> tuple[GPT, nnx.Optimizer]:
        model = GPT(width, layers, nnx.Rngs(0))
        rate = optax.warmup_cosine_decay_schedule(0, 0.01, steps // 10, steps)
        tx = muon(rate, weight_dimension_numbers=nnx_dimension_numbers(model))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
        # The annotations say where each array of model and optimizer belongs.
        graph, shapes = nnx.split(nnx.eval_shape(build))
        shardings = nnx.get_named_sharding(shapes, mesh)
        state = jax.jit(lambda: nnx.state(build()), out_shardings=shardings)()

        @functools.partial(jax.jit, out_shardings=(None, shardings), donate_argnums=0)
        def train_step(state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
            model, optimizer = nnx.merge(graph, state)
            loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
            optimizer.update(model, grads)
            return loss, nnx.state((model, optimizer))

        def train(state: Any, first: int, last: int) -> Run:
            losses = []
            for key in map(jax.random.key, range(first, last)):
                start, stride = jax.random.randint(key, (2, 64, 1), 0, VOCABULARY)
                tokens = (start + stride % 4 * jnp.arange(16)) % VOCABULARY
                tokens = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
                loss, state = train_step(state, tokens)
                losses.append(float(loss))
            return losses, state

        half, path = steps // 2, Path(folder) / "state"
        first_losses, state = train(state, 0, half)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, state)
            checkpointer.wait_until_finished()  # Before the next step takes its memory.
            at = jax.tree.map(lambda x, to: x.update(sharding=to), shapes, shardings)
            restored = checkpointer.restore(path, at)
        losses, state = train(state, half, steps)
        return (first_losses + losses, state), train(restored, half, steps)


if __name__ == "__main__":
    (losses, _), (resumed, _) = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}, resumed: {resumed[-1]:.3f}")
