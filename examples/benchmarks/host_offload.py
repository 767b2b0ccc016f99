"""A step whose optimizer state lies in the host's memory between the steps.

    python -m examples.benchmarks.host_offload     # seconds; losses, bytes by memory

Two lines of the user's own code do it: where the state is when the step ends, and a
`jax.device_put` inside the step. On a mesh of 8 devices; the losses are those of a run
whose state stays on the devices.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from orscale_jax import orscale, state_shardings

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # Where there are no accelerators.

Params = dict[str, jax.Array]
# Of the state's fields, those that go to the host: "trace" is the matrices' momentum.
LARGE = ("trace", "mu", "nu")


def on_host(shardings: Any, fields: tuple[str, ...] | None = None) -> Any:
    """The shardings of a state of which some fields, or all, lie in the host's memory."""

    def moved(path: Any, sharding: NamedSharding) -> NamedSharding:
        names = {jax.tree_util.keystr((key,), simple=True) for key in path}
        chosen = fields is None or names.intersection(fields)
        return sharding.with_memory_kind("pinned_host") if chosen else sharding

    return jax.tree.map_with_path(moved, shardings)


def loss_of(params: Params, x: jax.Array) -> jax.Array:
    y = jax.nn.gelu(x @ params["up"]) @ params["down"] * params["scale"]
    return jnp.mean((y - jnp.sin(3 * x)) ** 2)


def train(
    fields: tuple[str, ...] | None, steps: int = 20, width: int = 64
) -> tuple[list[float], Any]:
    """The losses, and the last state; the fields of the state are on the host."""
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = {"up": P("fsdp", None), "down": P(None, "fsdp"), "scale": P()}
    where = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    keys = jax.random.split(jax.random.key(0))
    up = jax.random.normal(keys[0], (width, 4 * width)) / width**0.5
    down = jax.random.normal(keys[1], (4 * width, width)) / (4 * width) ** 0.5
    params: Params = {"up": up, "down": down, "scale": jnp.ones(width)}
    params = jax.device_put(params, where)
    optimizer = orscale(1e-2, param_shardings=params)

    on_devices = state_shardings(optimizer, params)
    at_rest = on_host(on_devices, fields)  # 1. Where the state is between the steps.

    @functools.partial(
        jax.jit, donate_argnums=(0, 1), out_shardings=(where, at_rest, None)
    )
    def step(params: Params, state: Any, x: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        state = jax.device_put(state, on_devices)  # 2. It comes in; at_rest sends it out.
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.jit(optimizer.init, out_shardings=at_rest)(params)
    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        params, state, loss = step(params, state, jax.random.normal(key, (128, width)))
        losses.append(float(loss))
    return losses, state


def bytes_by_memory(state: Any) -> dict[str, int]:
    """How many bytes of the state lie in each kind of memory, over all devices."""
    found: dict[str, int] = collections.Counter()
    for leaf in jax.tree.leaves(state):
        shards = leaf.addressable_shards
        found[leaf.sharding.memory_kind] += sum(shard.data.nbytes for shard in shards)
    return found


if __name__ == "__main__":
    for name, fields in {"nothing": (), "momentum": LARGE, "everything": None}.items():
        losses, state = train(fields)
        kinds = ", ".join(f"{k} {n:,}" for k, n in sorted(bytes_by_memory(state).items()))
        print(f"{name} on the host: loss {losses[-1]:.4f}; bytes of state: {kinds}")
