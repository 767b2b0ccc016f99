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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from orscale_jax import muon, state_shardings

VOCABULARY, WIDTH, LAYERS, DEVICES = 64, 64, 2, 8
Params = dict[str, jax.Array]
SHAPES = {"embed": (VOCABULARY, WIDTH)}
for i in range(LAYERS):
    SHAPES |= {f"layer{i}.up": (WIDTH, 4 * WIDTH), f"layer{i}.down": (4 * WIDTH, WIDTH)}


def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
    """Of the next token, from the last two. Weights are gathered where they are used."""
    mesh = jax.typeof(tokens).sharding.mesh
    params = jax.tree.map(
        lambda p: jax.sharding.reshard(p, NamedSharding(mesh, P())), params
    )
    by_batch = NamedSharding(mesh, P("fsdp"))
    x = params["embed"].at[tokens[:, :-1]].get(out_sharding=by_batch)
    x = x.at[:, 1:].add(0.5 * x[:, :-1])
    for i in range(LAYERS):
        hidden = jax.nn.gelu(jax.nn.standardize(x) @ params[f"layer{i}.up"])
        x += hidden @ params[f"layer{i}.down"]
    logits = jax.nn.standardize(x)[:, 1:] @ params["embed"].T
    labels = jax.nn.one_hot(tokens[:, 2:], VOCABULARY)
    return -(labels * jax.nn.log_softmax(logits)).sum(-1).mean()


def main(steps: int = 100) -> tuple[list[float], list[float], Params]:
    """The losses on 8 devices; those of the second half on 4, and its weights."""
    jax.config.update("jax_num_cpu_devices", DEVICES)  # Before JAX looks for devices.
    devices = jax.devices() if jax.device_count() >= DEVICES else jax.devices("cpu")
    optimizer = muon(optax.warmup_cosine_decay_schedule(0, 0.02, steps // 10, steps))

    def abstract_run(mesh: Mesh) -> Any:
        """Weights and state, abstract: shapes, dtypes and shardings."""
        rows = NamedSharding(mesh, P("fsdp"))
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
            for name, shape in SHAPES.items()
        }
        init = jax.jit(optimizer.init, out_shardings=state_shardings(optimizer, params))
        return params, init.eval_shape(params)

    def begin() -> Any:
        keys = jax.random.split(jax.random.key(0), len(SHAPES))
        params = {
            name: jax.random.normal(key, shape) / shape[0] ** 0.5
            for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
        }
        return params, optimizer.init(params)

    @jax.jit
    def train_step(params: Params, state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def train(mesh: Mesh, run: Any, first: int, last: int) -> tuple[Any, list[float]]:
        losses = []
        for key in map(jax.random.key, range(first, last)):
            start, stride = jax.random.randint(key, (2, 64, 1), 0, VOCABULARY)
            tokens = (start + stride % 4 * jnp.arange(16)) % VOCABULARY
            *run, loss = train_step(
                *run, jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
            )
            losses.append(float(loss))
        return run, losses

    eight, four = (
        Mesh(devices[:count], ("fsdp",), axis_types=(AxisType.Explicit,))
        for count in (DEVICES, DEVICES // 2)
    )
    half = steps // 2
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_run(eight))
    run, losses = train(eight, jax.device_put(begin(), shardings), 0, half)
    with (
        tempfile.TemporaryDirectory() as folder,
        ocp.CheckpointManager(Path(folder)) as manager,
    ):
        manager.save(half, args=ocp.args.StandardSave(tuple(run)))
        manager.wait_until_finished()
        restored = manager.restore(
            half, args=ocp.args.StandardRestore(abstract_run(four))
        )
    _, rest = train(eight, run, half, steps)
    (params, _), on_four = train(four, restored, half, steps)
    return losses + rest, on_four, params


if __name__ == "__main__":
    losses, on_four, params = main()
    print(f"loss on 8 devices {losses[0]:.3f} → {losses[-1]:.4f}")
    print(f"loss on 4 devices, from step {len(on_four)}: {on_four[-1]:.4f}")
    print(
        jax.typeof(params["layer0.up"]),
        "on",
        len(params["layer0.up"].devices()),
        "devices",
    )
