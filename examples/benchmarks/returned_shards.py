"""What a data-parallel step waits for: it returns whole weights, or their shards.

    python -m examples.benchmarks.returned_shards

compiles both for eight H100s, which it needs none of (make VENV=.venv-gpu
.venv-gpu/.has-examples,gpu), and prints the bytes of their collectives. The optimizer's
state is sharded over the replicas in both (ZeRO-1). Whole weights are gathered at the end
of a step, when nothing is left to compute. Shards are gathered where the next forward
pass needs them, and XLA gathers a matrix while it multiplies by the one before.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.benchmarks import hlo_cost, topologies
from examples.study.statistics import markdown
from orscale_jax import muon, orscale, state_shardings

DEVICES, LAYERS, WIDTH, TOKENS = 8, 8, 2048, 32_768
OPTIMIZERS = {"optax.adamw": optax.adamw, "muon": muon, "orscale": orscale}


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for layer in range(LAYERS):
        up, down = params[f"up{layer}"], params[f"down{layer}"]
        x += jax.nn.gelu(x @ up.astype(x.dtype)) @ down.astype(x.dtype)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def compiled(optimizer: str, returns_shards: bool) -> jax.stages.Compiled:
    """A donated step; products are bfloat16, weights float32."""
    devices = np.array(topologies.h100s(DEVICES))
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    whole, sharded = (NamedSharding(mesh, PartitionSpec(*a)) for a in ((), ("data",)))
    shapes = {f"up{i}": (WIDTH, 4 * WIDTH) for i in range(LAYERS)}
    shapes |= {f"down{i}": (4 * WIDTH, WIDTH) for i in range(LAYERS)}

    def weights(sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            for name, shape in shapes.items()
        }

    shards = weights(sharded)
    ours = {} if optimizer == "optax.adamw" else {"param_shardings": shards}
    tx = OPTIMIZERS[optimizer](1e-3, **ours)
    of_state = state_shardings(tx, shards)
    state = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        jax.eval_shape(tx.init, shards),
        of_state,
    )

    def step(params, state, x):  # type: ignore[no-untyped-def]
        used = params
        if returns_shards:
            # The barrier keeps XLA from gathering first, and rounding then.
            narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            narrow = jax.lax.optimization_barrier(narrow)
            used = jax.lax.with_sharding_constraint(narrow, whole)
        grads = jax.grad(loss)(used, x)
        grads = jax.lax.with_sharding_constraint(grads, sharded)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    of_params = sharded if returns_shards else whole
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16, sharding=sharded)
    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=(of_params, of_state),
        compiler_options=topologies.GPU_COMPILER_OPTIONS,
    )
    return jitted.lower(weights(of_params), state, x).compile()


def main() -> None:
    """Prints the table."""
    rows = []
    for optimizer in OPTIMIZERS:
        for returns_shards in (False, True):
            program = compiled(optimizer, returns_shards)
            cost, memory = hlo_cost.of(program.as_text() or ""), program.memory_analysis()
            assert memory is not None
            sizes = [cost.collective_bytes / 1e6, cost.exposed_bytes / 1e6]
            sizes.append(memory.argument_size_in_bytes / 2**20)
            what = "shards" if returns_shards else "whole weights"
            rows.append([f"`{optimizer}`", what, *(f"{size:.4g}" for size in sizes)])
    heading = "collectives, MB", "of these exposed, MB", "arguments, MiB"
    print(markdown(["optimizer", "returns", *heading], rows, left=2))


if __name__ == "__main__":
    main()
